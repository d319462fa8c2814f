"""Keeps the KV cache of a transformers model in a prefix cache, and takes it back from there.

It knows tensors of one model and entries of one layout. It knows no tier, no file and no eviction.

Keys and values of full-attention layers are global. Those of sliding layers are window KV: taken at
block boundaries, put into the window pool, and rebuilt by bounded replay when they are gone.

A prefill that starts from restored entries computes, bit for bit, what a prefill without them
computes, if both are cut into chunks at the same place: matrix products of other shapes may round
differently. So every prefill here is cut at the last block boundary before its last token, which is
where a later run of the same prompt can start. With sliding layers this holds for a window out of the
pool; a replayed one differs, because its first rows never saw what lies before the replay.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import kvstore
from kvstore.cache import Scope
from kvstore.engine.layers import StoredLayer, WindowLayer
from kvstore.engine.options import check_names
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.hash import as_tokens
from kvstore.layout import LayerGroup, Layout
from kvstore.tier.paged import RAW_DTYPES, decode_rows, encode_rows

Tokens = Sequence[int] | NDArray[np.integer[Any]]
WindowSource = Literal["pool", "replay", "none"]
Stage = Literal["lookup", "read", "restore", "forward"]
"""The stages of a prefill, in order. The first three are missing where nothing is looked up."""

KEYS, VALUES = "k", "v"
"""Names of the GLOBAL groups of a layout: full-attention layers."""
WINDOW_KEYS, WINDOW_VALUES = "k_window", "v_window"
"""Names of its WINDOW groups: sliding layers, if there are any."""
_CONFIG_LABELS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
    }
)
"""Fields of a config that change nothing computed, or say what the parameters say themselves."""


def model_layout(model: Any, *, dtype: str | Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a loaded model: its own KV dtype unless ``dtype`` names another format.

    Raises:
        ConfigError: if the model does not cache plain keys and values in every layer, or only in
            layers with a sliding window.
    """
    found = kvstore.layout(_config(model, str(model.dtype).removeprefix("torch.")), dtype=dtype)
    if not {group.name for group in found.groups} <= {KEYS, VALUES, WINDOW_KEYS, WINDOW_VALUES}:
        msg = (
            f"model type {model.config.model_type!r} caches {_describe(found)}, expected plain keys and "
            "values in every layer"
        )
        raise ConfigError(msg)
    return found


def model_namespace(model: Any, *, tenant: str = "", tokenizer: str = "") -> kvstore.Namespace:
    """Return the namespace of a loaded model: what it computes is in it, what it is called is not.

    ``weights`` is a digest of its config and of every parameter as it is in memory now, adapters
    merged or attached included: name, type, shape and all values. It does not follow later changes:
    after one, close the adapter and open it again.

    Cost: reads all parameters once, at the speed of memory; those of another device are copied here,
        one by one.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_LABELS}
    digest = hashlib.sha256(b"kvstore.parameters.2")
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{len(name)}:{name}{tensor.dtype}{list(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        if len(values):
            digest.update(xxhash.xxh3_128_digest(values.view(torch.uint8).numpy()))
    return kvstore.Namespace(
        model=str(model.config.model_type),
        weights=digest.hexdigest(),
        tokenizer=tokenizer,
        tenant=tenant,
    )


@contextmanager
def open_adapter(
    model: Any,
    path: str | Path,
    *,
    namespace: kvstore.Namespace | None = None,
    tenant: str = "",
    dtype: str | Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[TransformersAdapter]:
    """Open the cache in directory ``path`` for a loaded model, and close it again.

    ``namespace`` defaults to ``model_namespace(model, tenant=tenant)``, ``dtype`` to the model's own
    number format; ``options`` are those of ``PrefixCache.open``.

    Raises:
        ConfigError: for an option that there is none of, or something that is no loaded model.
        KVStoreError: as ``PrefixCache.open``.
    """
    _check_opening(model, namespace, tenant, options)
    with kvstore.PrefixCache.open(
        path,
        layout=model_layout(model, dtype=dtype),
        namespace=model_namespace(model, tenant=tenant) if namespace is None else namespace,
        **options,
    ) as cache:
        yield TransformersAdapter(model, cache)


def _check_opening(
    model: Any, namespace: kvstore.Namespace | None, tenant: str, options: Mapping[str, Any]
) -> None:
    if not isinstance(model, torch.nn.Module):
        msg = f"model must be a loaded transformers model, found {type(model).__name__}"
        raise ConfigError(msg)
    if namespace is not None and tenant:
        msg = f"tenant {tenant!r} stands beside a namespace, which has one: give one of the two"
        raise ConfigError(msg)
    known = [*inspect.signature(open_adapter).parameters][1:-1]
    known += [*inspect.signature(kvstore.PrefixCache.open).parameters]
    known = [name for name in dict.fromkeys(known) if name != "layout"]
    check_names("open_adapter", options, known)


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

    def forward(self, tokens: Tokens, past: Cache | None = None) -> NDArray[np.float32]:
        """Run ``tokens`` after those in ``past``, which grows by them.

        Shapes:
            returns the last token's logits, float32 ``[vocab]``.
        """
        ids = torch.from_numpy(as_tokens(tokens).astype(np.int64))[None].to(self._model.device)
        cache = DynamicCache(config=self._model.config) if past is None else past
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

    past: Cache
    """The KV cache of the whole prompt, ready for the next token."""
    logits: NDArray[np.float32]
    hit_tokens: int
    """Leading tokens whose entries came from the prefix cache."""
    replay_tokens: int = 0
    """Tokens of the hit that were run again to rebuild their windows."""
    window_source: WindowSource = "none"
    """Where the windows of the hit came from; ``"none"`` without a hit or without sliding layers."""
    windows: tuple[kvstore.WindowSnapshot, ...] = ()
    """Windows at the block boundaries where a later run of the prompt can start; for ``keep``."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What a prompt was continued with, always by the likeliest token.

    Shapes:
        logits float32 ``[len(new_tokens), vocab]``: those that each new token was chosen from.
    """

    new_tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    hit_tokens: int
    replay_tokens: int = 0
    window_source: WindowSource = "none"


class TransformersAdapter:
    """Runs a causal model of transformers over a prefix cache: dense, or with sliding layers as well.

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
        self.cache = cache
        """For what the adapter does not do itself: ``flush``, ``stats``, ``scope``."""
        self._store_wait = store_wait
        self._on_stage = on_stage
        self._layout = cache.layout
        self._dtype: torch.dtype = model.dtype
        _check_layout(self._layout, kvstore.layout(_config(model, "float32")))
        self._window_tokens = self._layout.window_tokens
        self._layer_count = len({layer for group in self._layout.groups for layer in group.layers})
        if self._window_tokens == 1:
            # Transformers keeps the last W - 1 rows as a slice from -(W - 1), here from 0: all of them.
            msg = "transformers keeps every row of a sliding window of 1, expected at least 2"
            raise ConfigError(msg)

    # ---- tensors and entries -------------------------------------------------------------------

    def capture(
        self, past: Cache, start: int = 0, stop: int | None = None
    ) -> dict[str, NDArray[np.uint8]]:
        """Return the GLOBAL entries of tokens ``[start, stop)`` of a KV cache, to the end by default.

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
        return self._pack_pair(past, KEYS, VALUES, start, end)

    def snapshot(self, past: Cache, source: str = "engine") -> kvstore.WindowSnapshot:
        """Return the rows that the sliding layers of a KV cache hold: W - 1, or what there is.

        Its ``stop`` is the length of the KV cache, which the window pool wants at a block boundary.

        Shapes:
            rows of ``k_window`` and ``v_window``, as ``capture``.

        Cost: one copy.
        """
        stop = past.get_seq_length()
        layer = past.layers[self._layout.group(WINDOW_KEYS).layers[0]]
        held = int(layer.keys.shape[-2])
        rows = self._pack_pair(past, WINDOW_KEYS, WINDOW_VALUES, 0, held)
        return kvstore.WindowSnapshot(stop - held, stop, rows, source)

    def restore(
        self,
        entries: Mapping[str, NDArray[np.uint8]],
        window: kvstore.WindowSnapshot | None = None,
    ) -> Cache:
        """Return a KV cache that holds ``entries``, with the memory layout of a computed one.

        ``window`` is the window that ends them, for a model with sliding layers. Without it those
        layers hold no row: ``rebuild`` makes them.

        Shapes:
            as ``capture`` returns them, and as ``PrefixCache.read`` does.

        Cost: one copy into the order that attention reads.
        """
        past = self._empty(0 if window is None else window.start)
        self._fill(past, KEYS, VALUES, entries)
        if window is not None:
            self._fill(past, WINDOW_KEYS, WINDOW_VALUES, window.rows)
        return past

    def rebuild(self, past: Cache, tokens: Tokens, start: int) -> Cache:
        """Return ``past`` with sliding layers rebuilt from a run of ``tokens[start:]``: bounded replay.

        ``past`` holds the full-attention layers of all ``tokens``. They are read and stay as they
        are, in the returned KV cache too. A replayed query at ``p`` reads sliding rows of
        ``[max(start, p - W + 1), p]``.

        Cost: one forward over ``len(tokens) - start`` tokens.
        """
        ids = as_tokens(tokens)
        full, sliding = self._layout.group(KEYS).layers, self._layout.group(WINDOW_KEYS).layers
        replayed = self._empty(start)
        for layer in full:
            replayed.layers[layer] = StoredLayer(past.layers[layer], start)
        self._causal.forward(ids[start:], replayed)
        layers = list(past.layers)
        for layer in sliding:
            layers[layer] = replayed.layers[layer]
        return Cache(layers=layers)

    def _empty(self, start: int = 0) -> Cache:
        """Return a KV cache of no rows; sliding layers will hold those from ``start`` on."""
        if not self._window_tokens:
            return DynamicCache()
        sliding = self._layout.group(WINDOW_KEYS).layers
        layers = [
            WindowLayer(self._window_tokens, start) if layer in sliding else DynamicLayer()
            for layer in range(self._layer_count)
        ]
        return Cache(layers=layers)

    def _fill(
        self, past: Cache, keys: str, values: str, entries: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        key_group, value_group = self._layout.group(keys), self._layout.group(values)
        packed = zip(key_group.layers, entries[keys], entries[values], strict=True)
        for layer, key_bytes, value_bytes in packed:
            # A cache layer copies what it is given, as it does when it grows, so its tensors are
            # contiguous like computed ones: with others attention may take another kernel, which
            # rounds otherwise.
            past.update(
                self._unpack(key_group, key_bytes), self._unpack(value_group, value_bytes), layer
            )

    def _pack_pair(
        self, past: Cache, keys: str, values: str, start: int, stop: int
    ) -> dict[str, NDArray[np.uint8]]:
        if len(past.layers) != self._layer_count:
            msg = f"expected a KV cache of {self._layer_count} layers, found {len(past.layers)}"
            raise ValueError(msg)
        layers = [past.layers[layer] for layer in self._layout.group(keys).layers]
        return {
            keys: self._pack(self._layout.group(keys), [x.keys for x in layers], start, stop),
            values: self._pack(self._layout.group(values), [x.values for x in layers], start, stop),
        }

    def _pack(
        self, group: LayerGroup, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> NDArray[np.uint8]:
        packed = np.empty((len(group.layers), stop - start, group.entry_bytes), np.uint8)
        if start == stop:
            return packed  # torch cannot view empty arrays as another type
        raw = RAW_DTYPES.get(group.entry_format)
        for layer, tensor in enumerate(tensors):
            rows = tensor[0, :, start:stop].transpose(0, 1)  # [tokens, kv_heads, head_dim]
            target = torch.from_numpy(packed[layer])
            if raw is not None:
                target.view(raw).view(rows.shape).copy_(rows)
            else:
                target.copy_(encode_rows(group, rows.reshape(stop - start, -1).contiguous()))
        return packed

    def _unpack(self, group: LayerGroup, packed: NDArray[np.uint8]) -> torch.Tensor:
        """Return ``[1, kv_heads, tokens, head_dim]`` in the model's dtype, on its device."""
        rows = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
        numbers = decode_rows(group, rows, self._dtype)
        head_dim = group.values // self._kv_heads
        heads = numbers.view(len(packed), self._kv_heads, head_dim).transpose(0, 1)
        return heads[None].to(self._model.device)

    @property
    def _kv_heads(self) -> int:
        config = self._model.config.get_text_config()
        if getattr(config, "multi_query", False):  # Falcon and GPT-BigCode, whatever else they say
            return 1
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
        made = self._recall(ids) if reuse else _Recalled(self._empty())
        past, hit, windows = made.past, made.hit_tokens, []
        if made.replay_tokens:
            past = self.rebuild(past, ids[:hit], hit - made.replay_tokens)
            windows.append(self.snapshot(past, "replay"))
        cut = (len(ids) - 1) // self.cache.block_tokens * self.cache.block_tokens
        if hit < cut:
            self._causal.forward(ids[hit:cut], past)
            windows += self._boundary(past)
        logits = self._causal.forward(ids[max(hit, cut) :], past)
        windows += self._boundary(past)
        self._end("forward")
        return Prefilled(past, logits, hit, made.replay_tokens, made.window_source, tuple(windows))

    def generate(self, tokens: Tokens, count: int, *, reuse: bool = True) -> Generated:
        """Run a prompt, continue it by ``count`` tokens, and offer the cache what was computed."""
        if count < 1:
            msg = f"count must be at least 1, found {count}"
            raise ValueError(msg)
        ids = as_tokens(tokens)
        prefilled = self.prefill(ids, reuse=reuse)
        rows = [prefilled.logits]
        new_tokens = [int(rows[0].argmax())]
        windows = deque[kvstore.WindowSnapshot](maxlen=2)
        while len(new_tokens) < count:
            rows.append(self._causal.forward(new_tokens[-1:], prefilled.past))
            new_tokens.append(int(rows[-1].argmax()))
            windows += self._boundary(prefilled.past)
        run = np.concatenate([ids, np.asarray(new_tokens[:-1], np.uint32)])
        # The last boundary, and the one before it where the run ends on one: a repeat hits there.
        if len(run) % self.cache.block_tokens:
            windows = deque(list(windows)[-1:])
        self.keep(run, prefilled.past, prefilled.hit_tokens, (*prefilled.windows, *windows))
        return Generated(
            tuple(new_tokens),
            np.stack(rows),
            prefilled.hit_tokens,
            prefilled.replay_tokens,
            prefilled.window_source,
        )

    def keep(
        self,
        tokens: Tokens,
        past: Cache,
        start: int = 0,
        windows: Sequence[kvstore.WindowSnapshot] = (),
    ) -> kvstore.Stored:
        """Offer the cache the entries of tokens ``[start, len(tokens))``, ``start`` a block boundary.

        ``windows`` are snapshots at boundaries within ``tokens``, as ``Prefilled.windows`` has them.
        """
        ids = as_tokens(tokens)
        for window in windows:
            self.cache.put_window(ids, window)
        whole = len(ids) // self.cache.block_tokens * self.cache.block_tokens
        end = max(start, whole)
        entries = self.capture(past, start, end)
        return self.cache.store(ids[:end], entries, start=start, wait=self._store_wait)

    def _boundary(self, past: Cache) -> list[kvstore.WindowSnapshot]:
        """Return the window of a KV cache that ends on a block boundary, if there is one to take."""
        if not self._window_tokens or past.get_seq_length() % self.cache.block_tokens:
            return []
        return [self.snapshot(past)]

    def _recall(self, ids: NDArray[np.uint32]) -> _Recalled:
        with self.cache.lookup(ids) as match:
            self._end("lookup")
            # A bad block shortens what was read and the match with it, down to nothing: then it is
            # all computed again.
            entries = self.cache.read(match)
            self._end("read")
            window = self.cache.window(match) if match.window_hit else None
            hit, replay = match.hit_tokens, match.hit_tokens - match.replay_start
        past = self.restore(entries, window) if hit else self._empty()
        self._end("restore")
        source: WindowSource = "pool" if window is not None else "replay" if replay else "none"
        return _Recalled(past, hit, replay, source)

    def _end(self, stage: Stage) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)


@dataclass(frozen=True, slots=True)
class _Recalled:
    """What the prefix cache had of a prompt; ``replay_tokens`` of it still have to run again."""

    past: Cache
    hit_tokens: int = 0
    replay_tokens: int = 0
    window_source: WindowSource = "none"


def _config(model: Any, dtype: str) -> dict[str, Any]:
    """Return a model's config under its own ``dtype``: it may have been cast since it was written."""
    config = {**model.config.to_dict(), "dtype": dtype}
    # A label for people: the folder's name, not where this machine keeps it.
    config["_name_or_path"] = Path(str(model.config.name_or_path or "")).name
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {**config["text_config"], "dtype": dtype}
    return config


def _cache_argument(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the name under which a model's forward takes its cache: it changed in transformers 5."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    msg = f"the model's forward takes neither cache nor past_key_values, found {', '.join(parameters)}"
    raise ConfigError(msg)


def _check_layout(found: Layout, expected: Layout) -> None:
    """Compare what a cache was opened for with what a model caches, entry formats apart."""

    def shape(layout: Layout) -> tuple[object, ...]:
        groups = {
            g.name: (g.layers, g.values, g.tokens_per_entry, g.lifetime.value)
            for g in layout.groups
        }
        return groups, layout.window_tokens

    if shape(found) != shape(expected):
        msg = (
            f"the cache was opened for layout {found.model!r}, which is not that of the model: found "
            f"groups {_describe(found)}, expected {_describe(expected)}; open it with model_layout(model)"
        )
        raise LayoutMismatch(msg)


def _describe(layout: Layout) -> str:
    groups = ", ".join(f"{g.name} ({len(g.layers)} layers of {g.values})" for g in layout.groups)
    return f"{groups}, window {layout.window_tokens}" if layout.window_tokens else groups
