"""vLLM's KV cache groups as a layout, and its tensors as pages of that layout's entries.

Keys and values of attention without quantisation become plain numbers: the groups ``k`` and ``v``,
``k_window`` and ``v_window`` for sliding layers. A cache whose bytes only vLLM's kernels understand
(MLA latents, DeepSeek-V4.1's FP4 records) is kept page by page as it is: one entry is one page.
What vLLM does not mark prefix-cacheable is left alone.
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

from kvstore.engine.paged import block_tokens_for
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.layout import LayerGroup, Layout, Lifetime

FORMATS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}
"""Entry formats of the dtypes that vLLM keeps keys and values in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayers:
    """Layers that share a block table and cache entries of one shape."""

    index: int
    """Number of the KV cache group that owns the block table."""
    page_tokens: int
    """Tokens of one of the engine's blocks."""
    layer_names: tuple[str, ...]
    """vLLM's names, in the order of the layout's layer ids."""
    names: tuple[str, ...]
    """The layout's groups: keys and values, or one group of whole pages."""
    heads: int
    """Slots of a token in a page: one per KV head."""
    widths: tuple[int, ...]
    """Values of each of ``names`` in one slot; of a page, bytes in all."""
    dtype: torch.dtype
    is_window: bool

    @property
    def is_opaque(self) -> bool:
        """Say whether an entry is a whole page."""
        return len(self.names) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How one rank of an engine keeps what a store keeps."""

    layout: Layout
    block_tokens: int
    layers: tuple[PagedLayers, ...]
    group_count: int
    """KV cache groups of the engine, stored or not: lists in its block tables."""
    is_replicated: bool
    """Whether every tensor-parallel rank holds the same bytes."""

    @property
    def stored(self) -> tuple[PagedLayers, ...]:
        """The layers whose entries are global."""
        return tuple(layers for layers in self.layers if not layers.is_window)

    @property
    def windows(self) -> tuple[PagedLayers, ...]:
        """The sliding layers whose windows vLLM cannot rebuild."""
        return tuple(layers for layers in self.layers if layers.is_window)


def engine_layout(config: KVCacheConfig, model: str) -> EngineLayout:
    """Return how an engine with the KV cache ``config`` keeps what a store keeps.

    Exactly the groups that vLLM marks prefix-cacheable count; it replays the others by itself.

    Raises:
        ConfigError: naming the layers whose cache this version cannot describe.
    """
    parts = [
        (index, names, spec)
        for index in config.prefix_cacheable_group_ids
        for names, spec in _alike(config.kv_cache_groups[index])
    ]
    kinds = [_kind(names, spec) for _, names, spec in parts]
    windows = {spec.sliding_window for (_, _, spec), kind in zip(parts, kinds, strict=True) if kind == "window"}
    if len(windows) > 1:
        msg = f"layers with sliding windows of {sorted(windows)} tokens, expected one size for all"
        raise ConfigError(msg)
    layers, groups = [], []
    for (index, names, spec), kind in zip(parts, kinds, strict=True):
        suffix = "" if kinds.count(kind) == 1 else f".{kinds[: len(layers)].count(kind)}"
        ids = tuple(extract_layer_index(name) for name in names)
        paged, described = _describe(index, names, spec, kind, suffix, ids)
        layers.append(paged)
        groups += described
    tokens = {part.page_tokens for part in layers}
    return EngineLayout(
        layout=Layout(model=model, groups=tuple(groups), window_tokens=max(windows, default=0)),
        block_tokens=block_tokens_for(tokens | {config.cache_hit_alignment_tokens or 1}),
        layers=tuple(layers),
        group_count=len(config.kv_cache_groups),
        is_replicated=all(kind == "page" for kind in kinds),
    )


def _alike(group: Any) -> Iterable[tuple[tuple[str, ...], KVCacheSpec]]:
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


def _kind(names: Sequence[str], spec: KVCacheSpec) -> str:
    """Return ``"full"``, ``"window"`` or ``"page"``. Raises ``ConfigError`` for anything else."""
    what = ""
    if type(spec) is MLAAttentionSpec:
        return "page"
    if type(spec) is FullAttentionSpec:
        kind = "full"
        if spec.attention_chunk_size is not None:
            what = "attention in chunks"
    elif type(spec) is SlidingWindowSpec:
        kind = "window"
    else:
        kind, what = "", type(spec).__name__
    if kind:
        is_dense = spec.num_head_slots is None and spec.state_content_bytes is None
        if spec.kv_quant_mode != KVQuantMode.NONE or spec.dtype not in FORMATS or not is_dense:
            what = f"a quantised or packed KV cache ({spec.dtype}, {spec.kv_quant_mode.name})"
        elif spec.tokens_per_state != 1:
            what = f"{spec.tokens_per_state} tokens per entry"
    if what:
        msg = (
            f"layer {names[0]} uses {what}, expected full or sliding attention in "
            "bf16, f16 or f32, or MLA; serve this model without the connector"
        )
        raise ConfigError(msg)
    return kind


def _describe(
    index: int,
    names: tuple[str, ...],
    spec: Any,
    kind: str,
    suffix: str,
    ids: tuple[int, ...],
) -> tuple[PagedLayers, list[LayerGroup]]:
    if kind == "page":
        widths = (spec.unpadded_page_size_bytes,)
        ours = (f"page{suffix}",)
        groups = [
            LayerGroup(
                name=ours[0],
                layers=ids,
                values=widths[0],
                entry_format="u8",
                tokens_per_entry=spec.block_size,
            )
        ]
    else:
        widths = (spec.head_size, spec.head_size_v)
        ending = "_window" if kind == "window" else ""
        ours = (f"k{ending}{suffix}", f"v{ending}{suffix}")
        groups = [
            LayerGroup(
                name=name,
                layers=ids,
                values=spec.num_kv_heads * width,
                entry_format=FORMATS[spec.dtype],
                lifetime=Lifetime.WINDOW if kind == "window" else Lifetime.GLOBAL,
            )
            for name, width in zip(ours, widths, strict=True)
        ]
    paged = PagedLayers(
        index=index,
        page_tokens=spec.block_size,
        layer_names=names,
        names=ours,
        heads=spec.num_heads,
        widths=widths,
        dtype=spec.dtype,
        is_window=kind == "window",
    )
    return paged, groups


@dataclass(frozen=True, slots=True)
class PagedTensors:
    """One :class:`PagedLayers` as tensors.

    Shapes:
        ``views[name][layer]``: ``[pages, entries of a page, *entry]``, a view of vLLM's memory. The
        entry is ``[kv_heads, values]`` of vLLM's dtype, or uint8 ``[bytes of a page]``.
    """

    layers: PagedLayers
    views: Mapping[str, tuple[torch.Tensor, ...]]
    split: int
    """Pages of the tensors that one of the engine's blocks is made of."""

    def page_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Return the pages of the blocks of a request, in order of tokens."""
        if self.split == 1:
            return list(block_ids)
        return [block * self.split + part for block in block_ids for part in range(self.split)]

    @property
    def entries_of_page(self) -> int:
        """Entries of a page of the tensors."""
        return int(next(iter(self.views.values()))[0].shape[1])


def paged_tensors(layers: PagedLayers, caches: Mapping[str, torch.Tensor]) -> PagedTensors:
    """Return views of the registered KV ``caches`` of some layers.

    Raises:
        LayoutMismatch: if a tensor is not what its spec announced.
    """
    views: dict[str, list[torch.Tensor]] = {name: [] for name in layers.names}
    splits = set()
    for name in layers.layer_names:
        cache = caches.get(name)
        if cache is None:
            msg = f"vLLM registered no KV cache for layer {name}"
            raise LayoutMismatch(msg)
        parts, split = (_opaque if layers.is_opaque else _plain)(layers, name, cache)
        splits.add(split)
        for group, part in zip(layers.names, parts, strict=True):
            views[group].append(part)
    if len(splits) != 1:
        msg = f"layers {layers.layer_names} have kernel blocks of several sizes, expected one"
        raise LayoutMismatch(msg)
    return PagedTensors(layers, {name: tuple(view) for name, view in views.items()}, splits.pop())


def _plain(
    layers: PagedLayers, name: str, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Split ``[pages, kv_heads, tokens, keys and values]`` into keys and values by token."""
    is_fitting = (
        cache.ndim == 4
        and cache.shape[1] == layers.heads
        and cache.shape[3] == sum(layers.widths)
        and cache.dtype == layers.dtype
        and layers.page_tokens % cache.shape[2] == 0
    )
    if not is_fitting:
        msg = (
            f"KV cache of {name}: found {cache.dtype} {list(cache.shape)}, expected {layers.dtype} "
            f"[blocks, {layers.heads}, {layers.page_tokens} or a divisor, {sum(layers.widths)}]; "
            "this vLLM keeps its KV cache in an order that this version does not know"
        )
        raise LayoutMismatch(msg)
    by_token = cache.permute(0, 2, 1, 3)
    return by_token.split(layers.widths, dim=-1), layers.page_tokens // cache.shape[2]


def _opaque(
    layers: PagedLayers, name: str, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], int]:
    """View ``[pages, slots, states, width]`` as the bytes of each of the engine's blocks."""
    pages = cache.view(torch.uint8) if cache.ndim == 4 and cache.stride(-1) == 1 else None
    width = layers.widths[0]
    if pages is not None:
        size = pages[0].numel()
        split = width // size if size and width % size == 0 else 0
        is_dense = pages[:1].is_contiguous() and (
            split == 1 or (split > 1 and pages.stride(0) == size and pages.shape[0] % split == 0)
        )
        if split and is_dense:
            count = pages.shape[0] // split
            shape, strides = (count, 1, width), (pages.stride(0) * split, width, 1)
            return (pages.as_strided(shape, strides),), 1
    msg = (
        f"KV cache of {name}: found {cache.dtype} {list(cache.shape)} with strides "
        f"{list(cache.stride())}, expected pages of {width} bytes without holes"
    )
    raise LayoutMismatch(msg)
