"""Adapter for transformers: stores the KV cache of a model in a prefix cache, and restores it.

Keys and values of full-attention layers are GLOBAL. Those of sliding layers are window KV: copied at
block boundaries to the window pool, and rebuilt by bounded replay if the pool has evicted them.

A prefill from restored entries and a cold prefill have bit-identical results if both are chunked at the
same position, because matrix products of other shapes may round differently. So every prefill is chunked
at the last block boundary before its last token, where a later prefill of the same prompt can start. With
sliding layers this requires a pooled window: the first rows of a replayed one lack the rows before it.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import kvstore
from kvstore.engine.faults import Faults
from kvstore.engine.layers import StoredLayer, WindowLayer
from kvstore.engine.model_digest import ModelIdentity
from kvstore.engine.options import check_names
from kvstore.engine.rope import RopeTables
from kvstore.errors import ConfigError, LayoutMismatch

_log = logging.getLogger(__name__)

Tokens = Sequence[int] | NDArray[np.integer[Any]]
WindowSource = Literal["pool", "replay", "none"]
Stage = Literal["lookup", "read", "restore", "forward"]
"""Stages of a prefill, in order; only the last without a lookup."""

KEYS, VALUES = "k", "v"
"""GLOBAL groups of a layout: full-attention layers."""
WINDOW_KEYS, WINDOW_VALUES = "k_window", "v_window"
"""WINDOW groups of a layout: sliding layers."""
_NUMBERS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Entry formats of plain numbers, which need no codec."""


def model_layout(model: Any, *, dtype: str | Mapping[str, str] | None = None) -> kvstore.Layout:
    """Return the layout of a loaded model. ``dtype`` names an entry format; the model's dtype by default.

    Raises:
        ConfigError: if a layer does not cache plain keys and values, or every layer is sliding.
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
    """Return the namespace of a loaded model. It depends on the model's computation, not on its name.

    ``weights`` is a digest of the model's present state: all values of parameters and buffers, adapters
    and which of them are active, the config, attributes of modules, hooks, and the settings of torch
    that choose dtypes or kernels.

    Raises:
        ConfigError: as ``ModelIdentity``.

    Cost: one read of all parameters at memory speed; those on a device are copied one by one.
    """
    return _namespace(model, ModelIdentity(model), tenant, tokenizer)


def _namespace(
    model: Any, identity: ModelIdentity, tenant: str, tokenizer: str = ""
) -> kvstore.Namespace:
    return kvstore.Namespace(
        model=str(model.config.model_type),
        weights=identity.weights(),
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
    """Context manager with the cache in directory ``path``, opened for a loaded model.

    ``namespace`` defaults to ``model_namespace(model, tenant=tenant)`` at each request. A given
    namespace must identify the model's present state; later changes of the model are detected.
    ``dtype`` is as for ``model_layout``; ``options`` are those of ``PrefixCache.open``.

    Raises:
        ConfigError: for an unknown option, or a model that is not a loaded one.
        KVStoreError: as ``PrefixCache.open``.
    """
    _check_opening(model, namespace, tenant, options)
    layout = model_layout(model, dtype=dtype)
    identity = ModelIdentity(model, None if namespace is None else namespace.weights)
    if namespace is None:
        namespace = _namespace(model, identity, tenant)
    with kvstore.PrefixCache.open(path, layout=layout, namespace=namespace, **options) as cache:
        yield TransformersAdapter(model, cache, identity=identity)


def _check_opening(
    model: Any, namespace: kvstore.Namespace | None, tenant: str, options: Mapping[str, Any]
) -> None:
    if not isinstance(model, torch.nn.Module):
        msg = f"model must be a loaded transformers model, found {type(model).__name__}"
        raise ConfigError(msg)
    if namespace is not None and tenant:
        msg = f"found tenant {tenant!r} and a namespace, which has its own tenant; expected one of the two"
        raise ConfigError(msg)
    known = [*inspect.signature(open_adapter).parameters][1:-1]
    known += [*inspect.signature(kvstore.PrefixCache.open).parameters]
    known = [name for name in dict.fromkeys(known) if name != "layout"]
    check_names("open_adapter", options, known)


class CausalModel:
    """Forward passes of a causal language model over consecutive tokens.

    A result depends on the arguments only: rope tables are not inherited from an earlier request.

    Raises:
        ConfigError: if the model's forward has neither ``cache`` nor ``past_key_values``.
    """

    def __init__(self, model: Any, ropes: RopeTables | None = None) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_argument = _cache_argument(parameters)
        # Logits of the last row only: with a large vocabulary, all rows are larger than the KV cache.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._ropes = RopeTables(model) if ropes is None else ropes

    def forward(
        self, tokens: Tokens, past: Cache | None = None, length: int | None = None
    ) -> NDArray[np.float32]:
        """Run ``tokens`` after those in ``past``, and append their rows to it.

        ``length`` of the whole request decides its rope tables; by default it ends with ``tokens``.

        Shapes:
            returns the last token's logits, float32 ``[vocab]``.
        """
        rows = torch.from_numpy(kvstore.as_tokens(tokens).astype(np.int64))
        ids = rows[None].to(self._model.device)
        cache = DynamicCache(config=self._model.config) if past is None else past
        arguments = {self._cache_argument: cache, "use_cache": True, **self._only_last}
        whole = cache.get_seq_length() + len(tokens) if length is None else length
        with torch.no_grad(), self._ropes.request(whole):
            logits: torch.Tensor = self._model(input_ids=ids, **arguments).logits[0, -1]
        row: NDArray[np.float32] = logits.float().cpu().numpy()
        return row


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Result of a prefill. Shapes: logits float32 ``[vocab]``, of the last token."""

    past: Cache
    """KV cache of the whole prompt, ready for the next token."""
    logits: NDArray[np.float32]
    hit_tokens: int
    """Leading tokens whose entries were restored from the prefix cache."""
    replay_tokens: int = 0
    """Tokens of the hit that were recomputed to rebuild their windows."""
    window_source: WindowSource = "none"
    """Source of the hit's windows; ``"none"`` without a hit or without sliding layers."""
    windows: tuple[kvstore.WindowSnapshot, ...] = ()
    """Windows at block boundaries where a later prefill of the prompt can start, for ``keep``."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A greedy continuation of a prompt.

    Shapes:
        logits float32 ``[len(new_tokens), vocab]``: row i chose new token i.
    """

    new_tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    hit_tokens: int
    replay_tokens: int = 0
    window_source: WindowSource = "none"


class TransformersAdapter:
    """A causal model of transformers with a prefix cache, with or without sliding layers.

    ``on_stage`` is called with the name of each stage of a prefill when it ends, for measurements.

    Raises:
        LayoutMismatch: if ``cache`` was opened for another model's shape.
        ConfigError: if the model's layout is unknown or its forward has no cache argument.

    Threads: one thread at a time.
    """

    def __init__(
        self,
        model: Any,
        cache: kvstore.Scope,
        *,
        store_wait: float = 1.0,
        on_stage: Callable[[Stage], None] | None = None,
        identity: ModelIdentity | None = None,
    ) -> None:
        """Bind a model to a cache.

        ``identity`` detects changes of the model; by default the namespace of ``cache`` identifies its
        present state. ``store_wait`` is the longest wait for room in the cache's queue, in seconds;
        after it, or at once with 0, blocks without room are dropped and counted.
        """
        _check_whole(model)
        self._model = model
        self.cache = cache
        """Scope of the model, for ``flush``, ``stats`` and ``scope``."""
        self._identity = identity or ModelIdentity(model, cache.namespace.weights)
        self._causal = CausalModel(model, self._identity.ropes)
        self._origins: WeakKeyDictionary[Cache, _Origin] = WeakKeyDictionary()
        self._faults = Faults(_log)
        self._store_wait = store_wait
        self._on_stage = on_stage
        self._layout = cache.layout
        self._dtype: torch.dtype = model.dtype
        _check_layout(self._layout, kvstore.layout(_config(model, "float32")))
        self._window_tokens = self._layout.window_tokens
        self._layer_count = len({layer for group in self._layout.groups for layer in group.layers})
        if self._window_tokens == 1:
            # Transformers slices the last W - 1 rows from -(W - 1): for W = 1 from 0, which is all rows.
            msg = "transformers keeps every row of a sliding window of 1, expected at least 2"
            raise ConfigError(msg)

    # ---- tensors and entries -------------------------------------------------------------------

    def capture(
        self, past: Cache, start: int = 0, stop: int | None = None
    ) -> dict[str, NDArray[np.uint8]]:
        """Return a copy of the GLOBAL entries of tokens ``[start, stop)``, to the end by default.

        Shapes:
            each uint8 ``[layers, stop - start, entry_bytes]``; an entry has the ``[kv_heads,
            head_dim]`` numbers of one layer and token.
        """
        length = past.get_seq_length()
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            msg = f"expected 0 <= start <= stop <= {length} tokens in the KV cache, found [{start}, {end})"
            raise ValueError(msg)
        return self._entries(past, KEYS, VALUES, start, end)

    def snapshot(self, past: Cache, source: str = "engine") -> kvstore.WindowSnapshot:
        """Return a copy of the last W - 1 rows of sliding layers, or of all if there are fewer.

        ``stop`` is the length of the KV cache, which must be a block boundary for the window pool.

        Shapes:
            rows of ``k_window`` and ``v_window``, as ``capture``.
        """
        stop = past.get_seq_length()
        layer = past.layers[self._layout.group(WINDOW_KEYS).layers[0]]
        held = int(layer.keys.shape[-2])
        rows = self._entries(past, WINDOW_KEYS, WINDOW_VALUES, 0, held)
        return kvstore.WindowSnapshot(stop - held, stop, rows, source)

    def restore(
        self, entries: Mapping[str, NDArray[np.uint8]], window: kvstore.WindowSnapshot | None = None
    ) -> Cache:
        """Return a KV cache with a copy of ``entries``, in the memory layout of a computed one.

        ``window`` is the window at their end. Without it, sliding layers have no rows: ``rebuild``
        computes them.

        Shapes:
            as returned by ``capture`` and ``PrefixCache.read``.
        """
        past = self._empty(0 if window is None else window.start)
        self._fill(past, KEYS, VALUES, entries)
        if window is not None:
            self._fill(past, WINDOW_KEYS, WINDOW_VALUES, window.rows)
        return past

    def rebuild(self, past: Cache, tokens: Tokens, start: int, length: int | None = None) -> Cache:
        """Return ``past`` with sliding layers recomputed from ``tokens[start:]``: bounded replay.

        Full-attention layers of ``past`` have rows of all ``tokens`` and stay unchanged. A replayed query
        at ``p`` reads sliding rows ``[max(start, p - W + 1), p]``. ``length`` is as for ``forward``.

        Cost: one forward pass over ``len(tokens) - start`` tokens.
        """
        ids = kvstore.as_tokens(tokens)
        full, sliding = self._layout.group(KEYS).layers, self._layout.group(WINDOW_KEYS).layers
        replayed = self._empty(start)
        for layer in full:
            replayed.layers[layer] = StoredLayer(past.layers[layer], start)
        self._causal.forward(ids[start:], replayed, length)
        layers = list(past.layers)
        for layer in sliding:
            layers[layer] = replayed.layers[layer]
        return Cache(layers=layers)

    def _empty(self, start: int = 0) -> Cache:
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
        pairs = zip(key_group.layers, entries[keys], entries[values], strict=True)
        for layer, key_bytes, value_bytes in pairs:
            # ``update`` copies, so tensors are contiguous as computed ones. With other strides attention
            # may use another kernel, which rounds differently.
            key_rows = self._decode(key_group, key_bytes)
            past.update(key_rows, self._decode(value_group, value_bytes), layer)

    def _entries(
        self, past: Cache, keys: str, values: str, start: int, stop: int
    ) -> dict[str, NDArray[np.uint8]]:
        if len(past.layers) != self._layer_count:
            msg = f"expected a KV cache of {self._layer_count} layers, found {len(past.layers)}"
            raise ValueError(msg)
        layers = [past.layers[layer] for layer in self._layout.group(keys).layers]
        held = min(int(layer.keys.shape[-2]) for layer in layers)
        if held < stop:
            msg = f"expected {stop} rows of keys in every layer, found {held}: compressed KV cache?"
            raise ValueError(msg)
        group = self._layout.group
        return {
            keys: self._encode(group(keys), [x.keys for x in layers], start, stop),
            values: self._encode(group(values), [x.values for x in layers], start, stop),
        }

    def _encode(
        self, group: kvstore.LayerGroup, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> NDArray[np.uint8]:
        data = np.empty((len(group.layers), stop - start, group.entry_bytes), np.uint8)
        if start == stop:
            return data  # torch cannot view empty arrays as another type
        raw = _NUMBERS.get(group.entry_format)
        for layer, tensor in enumerate(tensors):
            rows = tensor[0, :, start:stop].transpose(0, 1)  # [tokens, kv_heads, head_dim]
            target = torch.from_numpy(data[layer])
            if raw is not None:
                target.view(raw).view(rows.shape).copy_(rows)
            else:
                flat = rows.reshape(stop - start, -1).contiguous()
                target.copy_(kvstore.encode_rows(group, flat))
        return data

    def _decode(self, group: kvstore.LayerGroup, data: NDArray[np.uint8]) -> torch.Tensor:
        """Return ``[1, kv_heads, tokens, head_dim]`` in the model's dtype, on its device."""
        rows = torch.from_numpy(data if data.flags.writeable else data.copy())
        numbers = kvstore.decode_rows(group, rows, self._dtype)
        head_dim = group.values // self._kv_heads
        heads = numbers.view(len(data), self._kv_heads, head_dim).transpose(0, 1)
        return heads[None].to(self._model.device)

    @property
    def _kv_heads(self) -> int:
        config = self._model.config.get_text_config()
        # Falcon and GPT-BigCode: with multi_query, other fields do not count.
        if getattr(config, "multi_query", False):
            return 1
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return int(heads)

    # ---- running -------------------------------------------------------------------------------

    def prefill(self, tokens: Tokens, *, reuse: bool = True) -> Prefilled:
        """Compute a prompt after its longest cached prefix, or all of it with ``reuse=False``.

        Nothing is stored; see ``keep``.
        """
        ids = kvstore.as_tokens(tokens)
        if not len(ids):
            raise ValueError("a prompt needs at least one token, found none")
        if self._model.dtype != self._dtype:
            msg = (
                f"the model was cast to {self._model.dtype} since its cache was opened for "
                f"{self._dtype}; open a cache for it in another directory"
            )
            raise ConfigError(msg)
        origin = _Origin(len(ids), self._identity.weights(len(ids)))
        past, hit, replay, source = self._recall(ids, self._scope(origin) if reuse else None)
        windows = []
        if replay:
            past = self.rebuild(past, ids[:hit], hit - replay, len(ids))
            windows.append(self.snapshot(past, "replay"))
        cut = kvstore.hit_limit(len(ids), self.cache.block_tokens)
        if hit < cut:
            self._causal.forward(ids[hit:cut], past, len(ids))
            windows += self._boundary(past)
        logits = self._causal.forward(ids[max(hit, cut) :], past, len(ids))
        windows += self._boundary(past)
        if past.get_seq_length() != len(ids):
            msg = (
                f"the model cached {past.get_seq_length()} rows for {len(ids)} tokens, expected one row for "
                "each token; rows without tokens, such as a soft prompt's, cannot be cached"
            )
            raise ConfigError(msg)
        self._origins[past] = origin
        self._end("forward")
        return Prefilled(past, logits, hit, replay, source, tuple(windows))

    def generate(self, tokens: Tokens, count: int, *, reuse: bool = True) -> Generated:
        """Compute a prompt, continue it by ``count`` tokens, and store the computed entries."""
        if count < 1:
            raise ValueError(f"count must be at least 1, found {count}")
        ids = kvstore.as_tokens(tokens)
        prefilled = self.prefill(ids, reuse=reuse)
        rows = [prefilled.logits]
        new_tokens = [int(rows[0].argmax())]
        windows = deque[kvstore.WindowSnapshot](maxlen=2)
        while len(new_tokens) < count:
            rows.append(self._causal.forward(new_tokens[-1:], prefilled.past))
            new_tokens.append(int(rows[-1].argmax()))
            windows += self._boundary(prefilled.past)
        done = np.concatenate([ids, np.asarray(new_tokens[:-1], np.uint32)])
        # The last boundary, and the one before it if the tokens end on one: an exact repeat hits there.
        if len(done) % self.cache.block_tokens:
            windows = deque(list(windows)[-1:])
        self.keep(done, prefilled.past, prefilled.hit_tokens, (*prefilled.windows, *windows))
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
        """Store the entries of tokens ``[start, len(tokens))``; ``start`` is a block boundary.

        ``windows`` are snapshots at boundaries within ``tokens``, as in ``Prefilled.windows``.
        Entries are stored under the namespace that the prefill of ``past`` looked up; none if the model
        has changed since, and none of tokens computed with other rope tables.

        Raises:
            ValueError: if rope tables depend on length, and this adapter did not compute ``past``.
        """
        ids = kvstore.as_tokens(tokens)
        origin = self._origins.get(past)
        if origin is None:
            origin = self._external(len(ids))
        elif origin.weights != self._identity.weights(origin.length):
            self._faults.say(
                "the model changed between the prefill of a prompt and keep, so the prompt was not stored; "
                "further prompts are not logged"
            )
            blocks = (len(ids) - start) // self.cache.block_tokens
            return kvstore.Stored(start, present=0, dropped=max(0, blocks))
        scope = self._scope(origin)
        last = self._identity.ropes.last_under(origin.length, len(ids))
        for window in windows:
            if window.stop <= last:
                scope.put_window(ids, window)
        end = max(start, last // self.cache.block_tokens * self.cache.block_tokens)
        entries = self.capture(past, start, end)
        return scope.store(ids[:end], entries, start=start, wait=self._store_wait)

    def _external(self, length: int) -> _Origin:
        """Return the origin of a KV cache computed elsewhere: the model's present state."""
        if self._identity.ropes:
            msg = (
                "the model's rope tables depend on the length of a request, and this KV cache is of no "
                "prefill of this adapter; expected Prefilled.past"
            )
            raise ValueError(msg)
        return _Origin(length, self._identity.weights())

    def _scope(self, origin: _Origin) -> kvstore.Scope:
        if origin.weights == self.cache.namespace.weights:
            return self.cache
        return self.cache.scope(replace(self.cache.namespace, weights=origin.weights))

    def _boundary(self, past: Cache) -> list[kvstore.WindowSnapshot]:
        """Return the window at the end of a KV cache, if the end is a block boundary."""
        if not self._window_tokens or past.get_seq_length() % self.cache.block_tokens:
            return []
        return [self.snapshot(past)]

    def _recall(
        self, ids: NDArray[np.uint32], scope: kvstore.Scope | None
    ) -> tuple[Cache, int, int, WindowSource]:
        """Return the cached prefix, its tokens, the number of them to replay, and its window's source."""
        if scope is None:
            return self._empty(), 0, 0, "none"
        with scope.lookup(ids) as match:
            self._end("lookup")
            # A corrupt block shortens the entries and the match, possibly to 0 tokens.
            entries = scope.read(match)
            self._end("read")
            window = scope.window(match) if match.window_hit else None
            hit, replay = match.hit_tokens, match.hit_tokens - match.replay_start
        past = self.restore(entries, window) if hit else self._empty()
        self._end("restore")
        return past, hit, replay, "pool" if window is not None else "replay" if replay else "none"

    def _end(self, stage: Stage) -> None:
        if self._on_stage is not None:
            self._on_stage(stage)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Request length of a KV cache, and identity of the model that computed it at that length."""

    length: int
    weights: str


def _check_whole(model: Any) -> None:
    ranks = getattr(model, "tp_size", None) or 1
    if ranks > 1:
        msg = f"the model is one of {ranks} tensor-parallel ranks, expected a whole model"
        raise ConfigError(msg)


def _config(model: Any, dtype: str) -> dict[str, Any]:
    """Return a model's config with ``dtype``, because the model may have been cast after loading."""
    config = {**model.config.to_dict(), "dtype": dtype}
    # A label only, so without the folder's path.
    config["_name_or_path"] = Path(str(model.config.name_or_path or "")).name
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {**config["text_config"], "dtype": dtype}
    return config


def _cache_argument(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the name of the cache argument of a model's forward, which changed in transformers 5."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    msg = f"the model's forward needs an argument cache or past_key_values, found {', '.join(parameters)}"
    raise ConfigError(msg)


def _check_layout(found: kvstore.Layout, expected: kvstore.Layout) -> None:
    """Raise ``LayoutMismatch`` if two layouts differ in more than entry formats."""

    def shape(layout: kvstore.Layout) -> tuple[object, ...]:
        groups = layout.groups
        facts = {g.name: (g.layers, g.values, g.tokens_per_entry, g.lifetime.value) for g in groups}
        return facts, layout.window_tokens

    if shape(found) != shape(expected):
        msg = (
            f"the cache was opened for layout {found.model!r}, which is not the model's: found "
            f"groups {_describe(found)}, expected {_describe(expected)}; open it with model_layout(model)"
        )
        raise LayoutMismatch(msg)


def _describe(layout: kvstore.Layout) -> str:
    groups = ", ".join(f"{g.name} ({len(g.layers)} layers of {g.values})" for g in layout.groups)
    return f"{groups}, window {layout.window_tokens}" if layout.window_tokens else groups
