"""Keeps the KV cache of a dense transformers model in a prefix cache, and takes it back from there.

It knows tensors of one model and entries of one layout. It knows no tier, no file and no eviction.

A prefill that starts from restored entries computes, bit for bit, what a prefill without them
computes, if both are cut into chunks at the same place: matrix products of other shapes may round
differently. So every prefill here is cut at the last block boundary before its last token, which is
where a later run of the same prompt can start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

import kvstore
from kvstore.cache import Scope
from kvstore.codec import codec_for
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.hash import as_tokens
from kvstore.layout import LayerGroup, Layout

Tokens = Sequence[int] | NDArray[np.integer[Any]]
Stage = Literal["lookup", "read", "restore", "forward"]
"""The stages of a prefill, in order. The first three are missing where nothing is looked up."""

KEYS, VALUES = "k", "v"
"""Names of the two groups of a dense layout."""
RAW_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Formats whose entries are plain numbers: exact if they are the model's own, else one rounding."""


def model_layout(model: Any, *, dtype: str | Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a loaded model: its own KV dtype unless ``dtype`` names another format.

    Raises:
        ConfigError: if the model does not cache plain keys and values in every layer.
    """
    config = dict(model.config.to_dict())
    # A label for people: the folder's name, not where this machine keeps it.
    config["_name_or_path"] = Path(str(model.config.name_or_path or "")).name
    chosen = dtype if dtype is not None else str(model.dtype).removeprefix("torch.")
    return kvstore.layout(config, dtype=chosen)


class CausalModel:
    """Calls a causal language model one stretch of tokens at a time.

    Raises:
        ConfigError: if its forward takes no cache under either of the names that transformers uses.
    """

    def __init__(self, model: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_argument = _cache_argument(parameters)
        # Logits of one row instead of all: with a large vocabulary they outweigh the KV cache.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def forward(self, tokens: Tokens, past: DynamicCache | None = None) -> NDArray[np.float32]:
        """Run ``tokens`` after those in ``past``, which grows by them.

        Shapes:
            returns the last token's logits, float32 ``[vocab]``.
        """
        ids = torch.from_numpy(as_tokens(tokens).astype(np.int64))[None].to(self._model.device)
        cache = DynamicCache() if past is None else past
        arguments = {self._cache_argument: cache, "use_cache": True, **self._only_last}
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=ids, **arguments).logits[0, -1]
        row: NDArray[np.float32] = logits.float().cpu().numpy()
        return row


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that has been run.

    Shapes:
        logits float32 ``[vocab]``, of the last token.
    """

    past: DynamicCache
    """The KV cache of the whole prompt, ready for the next token."""
    logits: NDArray[np.float32]
    hit_tokens: int
    """Leading tokens whose entries came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What a prompt was continued with, always by the likeliest token.

    Shapes:
        logits float32 ``[len(new_tokens), vocab]``: those that each new token was chosen from.
    """

    new_tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    hit_tokens: int


class TransformersAdapter:
    """Runs a dense causal model of transformers over a prefix cache.

    ``on_stage`` is called with the name of each stage of a prefill when it ends, for measurements.

    Raises:
        LayoutMismatch: if ``cache`` was opened for another model's shape.
        ConfigError: if the model cannot be described or takes no cache.

    Threads: one thread at a time.
    """

    def __init__(
        self,
        model: Any,
        cache: Scope,
        *,
        store_wait: float = 1.0,
        on_stage: Callable[[Stage], None] | None = None,
    ) -> None:
        """Bind a model to a cache.

        ``store_wait`` is the most seconds to wait for room in the cache's queue; a server that must
        never wait passes 0, and what finds no room is dropped and counted.
        """
        self._model = model
        self._causal = CausalModel(model)
        self._cache = cache
        self._store_wait = store_wait
        self._on_stage = on_stage
        self._layout = cache.layout
        self._dtype: torch.dtype = model.dtype
        _check_layout(self._layout, model_layout(model))

    # ---- tensors and entries -------------------------------------------------------------------

    def capture(
        self, past: DynamicCache, start: int = 0, stop: int | None = None
    ) -> dict[str, NDArray[np.uint8]]:
        """Return the entries of tokens ``[start, stop)`` of a KV cache, to the end by default.

        Shapes:
            each uint8 ``[layers, stop - start, entry_bytes]``. One entry is the ``[kv_heads,
            head_dim]`` numbers of one layer and token.

        Cost: one copy.
        """
        length = past.get_seq_length()
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            msg = f"expected 0 <= start <= stop <= {length} tokens in the KV cache, found [{start}, {end})"
            raise ValueError(msg)
        pairs = [(keys, values) for keys, values, *_ in past]
        return {
            KEYS: self._pack(self._layout.group(KEYS), [k for k, _ in pairs], start, end),
            VALUES: self._pack(self._layout.group(VALUES), [v for _, v in pairs], start, end),
        }

    def restore(self, entries: Mapping[str, NDArray[np.uint8]]) -> DynamicCache:
        """Return a KV cache that holds ``entries``, with the memory layout of a computed one.

        Shapes:
            as ``capture`` returns them, and as ``PrefixCache.read`` does.

        Cost: one copy into the order that attention reads.
        """
        keys, values = self._layout.group(KEYS), self._layout.group(VALUES)
        # DynamicCache copies what it is given, as it does when it grows, so its tensors are contiguous
        # like computed ones: with others attention may take another kernel, which rounds otherwise.
        return DynamicCache(
            (
                (self._unpack(keys, key_bytes), self._unpack(values, value_bytes))
                for key_bytes, value_bytes in zip(entries[KEYS], entries[VALUES], strict=True)
            )
        )

    def _pack(
        self, group: LayerGroup, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> NDArray[np.uint8]:
        packed = np.empty((len(group.layers), stop - start, group.entry_bytes), np.uint8)
        if len(tensors) != len(group.layers):
            msg = f"expected a KV cache of {len(group.layers)} layers, found {len(tensors)}"
            raise ValueError(msg)
        if start == stop:
            return packed  # torch cannot view empty arrays as another type
        raw = RAW_DTYPES.get(group.entry_format)
        for layer, tensor in enumerate(tensors):
            rows = tensor[0, :, start:stop].transpose(0, 1)  # [tokens, kv_heads, head_dim]
            target = torch.from_numpy(packed[layer])
            if raw is not None:
                target.view(raw).view(rows.shape).copy_(rows)
            else:
                target.copy_(codec_for(group).encode(rows.reshape(stop - start, -1).contiguous()))
        return packed

    def _unpack(self, group: LayerGroup, packed: NDArray[np.uint8]) -> torch.Tensor:
        """Return ``[1, kv_heads, tokens, head_dim]`` in the model's dtype, on its device."""
        rows = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
        raw = RAW_DTYPES.get(group.entry_format)
        if raw is not None:
            numbers = rows.view(raw).to(self._dtype)
        else:
            numbers = codec_for(group).decode(rows, self._dtype)
        head_dim = group.values // self._kv_heads
        heads = numbers.view(len(packed), self._kv_heads, head_dim).transpose(0, 1)
        return heads[None].to(self._model.device)

    @property
    def _kv_heads(self) -> int:
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return int(heads)

    # ---- running -------------------------------------------------------------------------------

    def prefill(self, tokens: Tokens, *, reuse: bool = True) -> Prefilled:
        """Run a prompt, starting from the longest prefix that the cache holds.

        ``reuse=False`` looks nothing up and computes everything. It stores nothing; see ``keep``.
        """
        ids = as_tokens(tokens)
        if not len(ids):
            msg = "a prompt needs at least one token, found none"
            raise ValueError(msg)
        past, hit = self._recall(ids) if reuse else (DynamicCache(), 0)
        cut = (len(ids) - 1) // self._cache.block_tokens * self._cache.block_tokens
        if hit < cut:
            self._causal.forward(ids[hit:cut], past)
        logits = self._causal.forward(ids[max(hit, cut) :], past)
        self._end("forward")
        return Prefilled(past, logits, hit)

    def generate(self, tokens: Tokens, count: int, *, reuse: bool = True) -> Generated:
        """Run a prompt, continue it by ``count`` tokens, and offer the cache what was computed."""
        if count < 1:
            msg = f"count must be at least 1, found {count}"
            raise ValueError(msg)
        ids = as_tokens(tokens)
        prefilled = self.prefill(ids, reuse=reuse)
        rows = [prefilled.logits]
        new_tokens = [int(rows[0].argmax())]
        while len(new_tokens) < count:
            rows.append(self._causal.forward(new_tokens[-1:], prefilled.past))
            new_tokens.append(int(rows[-1].argmax()))
        run = np.concatenate([ids, np.asarray(new_tokens[:-1], np.uint32)])
        self.keep(run, prefilled.past, prefilled.hit_tokens)
        return Generated(tuple(new_tokens), np.stack(rows), prefilled.hit_tokens)

    def keep(self, tokens: Tokens, past: DynamicCache, start: int = 0) -> kvstore.Stored:
        """Offer the cache the entries of tokens ``[start, len(tokens))``, ``start`` a block boundary."""
        ids = as_tokens(tokens)
        whole = len(ids) // self._cache.block_tokens * self._cache.block_tokens
        end = max(start, whole)
        entries = self.capture(past, start, end)
        return self._cache.store(ids[:end], entries, start=start, wait=self._store_wait)

    def _recall(self, ids: NDArray[np.uint32]) -> tuple[DynamicCache, int]:
        with self._cache.lookup(ids) as match:
            self._end("lookup")
            entries = self._cache.read(match)
            self._end("read")
        # A bad block shortens what was read, down to nothing: then it is all computed again.
        past = self.restore(entries) if entries.tokens else DynamicCache()
        self._end("restore")
        return past, entries.tokens

    def _end(self, stage: Stage) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)


def _cache_argument(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the name under which a model's forward takes its cache: it changed in transformers 5."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    msg = f"the model's forward takes neither cache nor past_key_values, found {', '.join(parameters)}"
    raise ConfigError(msg)


def _check_layout(found: Layout, expected: Layout) -> None:
    """Compare what a cache was opened for with what a model caches, entry formats apart."""

    def shape(layout: Layout) -> dict[str, tuple[object, ...]]:
        return {
            g.name: (len(g.layers), g.layers[0], g.values, g.tokens_per_entry, g.lifetime.value)
            for g in layout.groups
        }

    if shape(found) != shape(expected):
        msg = (
            f"the cache was opened for layout {found.model!r}, which is not that of the model: found "
            f"groups {_describe(found)}, expected {_describe(expected)}; open it with model_layout(model)"
        )
        raise LayoutMismatch(msg)


def _describe(layout: Layout) -> str:
    return ", ".join(f"{g.name} ({len(g.layers)} layers of {g.values})" for g in layout.groups)
