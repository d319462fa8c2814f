"""vLLM's KV cache groups as a layout, and its tensors as entries of that layout.

An entry is one block of vLLM of one layer, with unchanged bytes. The byte order within a block is
private to vLLM's kernels: on a CPU all keys precede all values, in the order of vector registers;
DeepSeek-V4.1 separates FP4 values from their scales; both depend on version and machine. So blocks are
never split, and the namespace covers all facts that decide the byte order. The groups that vLLM marks
prefix-cacheable are stored, and no others: vLLM replays those itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import kvstore
from kvstore.engine.paged import block_tokens_for
from kvstore.errors import ConfigError, LayoutMismatch

KINDS: Mapping[type[KVCacheSpec], str] = {
    FullAttentionSpec: "kv",
    SlidingWindowSpec: "kv_window",
    MLAAttentionSpec: "latent",
}
"""Group names of the layout, by exact class of vLLM's spec; subclasses are other kinds."""
WHOLE_IN_PAGE = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR, KVQuantMode.NVFP4_DS_MLA)
"""Quantizations with scales in the blocks or in the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayers:
    """Layers with one block table and one shape of blocks."""

    index: int
    """Number of the KV cache group with the block table."""
    page_tokens: int
    """Tokens per block of the engine."""
    page_bytes: int
    """Bytes per block of the engine and layer."""
    layer_names: tuple[str, ...]
    """vLLM's names, in the order of the layout's layer ids."""
    name: str
    """Group of the layout."""
    is_window: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Layout of the stored KV of one rank, and its position in vLLM's KV cache."""

    layout: kvstore.Layout
    block_tokens: int
    layers: tuple[PagedLayers, ...]
    group_count: int
    """KV cache groups of the engine, stored or not: lists in its block tables."""
    is_replicated: bool
    """Whether every tensor-parallel rank has the same bytes."""

    @property
    def windows(self) -> tuple[PagedLayers, ...]:
        """Sliding layers whose windows vLLM cannot rebuild."""
        return tuple(layers for layers in self.layers if layers.is_window)


def engine_layout(config: KVCacheConfig, model: str) -> EngineLayout:
    """Return the layout of a KV cache. Raises ``ConfigError`` if a layer cannot be stored."""
    parts = [
        (index, names, spec, _kind(names, spec))
        for index in config.prefix_cacheable_group_ids
        for names, spec in _alike(config.kv_cache_groups[index])
    ]
    kinds = [kind for *_, kind in parts]
    windows = {spec.sliding_window for _, _, spec, kind in parts if kind == "kv_window"}
    if len(windows) > 1:
        msg = f"layers with sliding windows of {sorted(windows)} tokens, expected one size for all"
        raise ConfigError(msg)
    layers, groups = [], []
    for number, (index, names, spec, kind) in enumerate(parts):
        name = kind if kinds.count(kind) == 1 else f"{kind}.{kinds[:number].count(kind)}"
        paged = PagedLayers(
            index=index,
            page_tokens=spec.block_size,
            page_bytes=spec.unpadded_page_size_bytes,
            layer_names=names,
            name=name,
            is_window=kind == "kv_window",
        )
        layers.append(paged)
        groups.append(
            kvstore.LayerGroup(
                name=name,
                layers=tuple(extract_layer_index(layer) for layer in names),
                values=paged.page_bytes,
                entry_format="u8",
                tokens_per_entry=paged.page_tokens,
                lifetime=kvstore.Lifetime.WINDOW if paged.is_window else kvstore.Lifetime.GLOBAL,
            )
        )
    tokens = {part.page_tokens for part in layers}
    return EngineLayout(
        layout=kvstore.Layout(
            model=model, groups=tuple(groups), window_tokens=max(windows, default=0)
        ),
        block_tokens=block_tokens_for(tokens | {config.cache_hit_alignment_tokens or 1}),
        layers=tuple(layers),
        group_count=len(config.kv_cache_groups),
        is_replicated=set(kinds) == {"latent"},
    )


def _alike(group: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Split a KV cache group into layers of one spec, each layer id once."""
    spec = group.kv_cache_spec
    each = (
        spec.kv_cache_specs
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else dict.fromkeys(group.layer_names, spec)
    )
    parts: list[tuple[KVCacheSpec, dict[int, str]]] = []
    for name in group.layer_names:
        layer = extract_layer_index(name)
        part = next((p for s, p in parts if s == each[name] and layer not in p), None)
        if part is None:
            part = {}
            parts.append((each[name], part))
        part[layer] = name
    return [(tuple(part[layer] for layer in sorted(part)), one) for one, part in parts]


def _kind(names: Sequence[str], spec: Any) -> str:
    """Return the kind of a spec. Raises ``ConfigError`` if it cannot be stored."""
    kind = KINDS.get(type(spec))
    found = ""
    if kind is None:
        found = type(spec).__name__
    elif spec.kv_quant_mode not in WHOLE_IN_PAGE:
        found = f"a KV cache quantized as {spec.kv_quant_mode.name}"
    elif isinstance(spec, FullAttentionSpec) and spec.attention_chunk_size is not None:
        found = "attention in chunks"
    if kind is None or found:
        msg = (
            f"layer {names[0]} uses {found}, expected full or sliding attention, or MLA, with scales "
            "in its blocks or in the weights; serve this model without the connector"
        )
        raise ConfigError(msg)
    return kind


def page_views(layers: PagedLayers, caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return KV ``caches`` as entries. Raises ``LayoutMismatch`` if a tensor does not match its spec.

    Shapes:
        each uint8 ``[blocks, 1, *axes, bytes]``, a view of vLLM's memory: ``page_bytes`` of a block in
        memory order; contiguous, or strided where vLLM has other blocks or layers between the heads
        of a block (its layouts LHBNC and BHLNC).
    """
    return [_page_view(layers, name, caches) for name in layers.layer_names]


def _page_view(layers: PagedLayers, name: str, caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    cache = caches.get(name)
    if cache is None:
        msg = f"vLLM registered no KV cache for layer {name}, found {sorted(caches)[:4]} ..."
        raise LayoutMismatch(msg)
    size, stride = cache[0].nbytes, cache.stride(0) * cache.itemsize
    # A block may consist of kernel blocks: consecutive rows of the tensor.
    parts = layers.page_bytes // size if size else 0
    is_whole = parts * size == layers.page_bytes and len(cache) % max(1, parts) == 0
    axes = _merged([(parts, stride), *_axes(cache[0])]) if is_whole else []
    is_apart = bool(_merged([(len(cache), stride), *_axes(cache[0])]))
    if not (axes and is_apart and axes[-1][0] > cache.itemsize):
        msg = (
            f"KV cache of {name}: found {cache.dtype} {list(cache.shape)} with strides "
            f"{list(cache.stride())}, expected blocks of {layers.page_bytes} bytes; "
            "this version does not support this order of vLLM's KV cache; serve without the connector"
        )
        raise LayoutMismatch(msg)
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    view.set_(
        cache.untyped_storage(),
        cache.storage_offset() * cache.itemsize,
        (len(cache) // parts, 1, *(length for length, _ in axes)),
        (stride * parts, 1, *(step for _, step in axes)),
    )
    return view


def _axes(block: torch.Tensor) -> list[tuple[int, int]]:
    """Return the axes of a tensor's bytes as lengths and steps in bytes."""
    steps = [
        (n, step * block.itemsize) for n, step in zip(block.shape, block.stride(), strict=True)
    ]
    return [*steps, (block.itemsize, 1)]


def _merged(axes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return axes by descending step, contiguous ones merged; none if axes overlap."""
    merged: list[tuple[int, int]] = []
    for length, step in sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[1]):
        if not step or (merged and merged[-1][1] < length * step):
            return []
        if merged and merged[-1][1] == length * step:
            merged[-1] = (merged[-1][0] * length, step)
        else:
            merged.append((length, step))
    return merged
