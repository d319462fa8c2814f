"""Weights as plain tensors by name. Random weights depend on the seed only, not on the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvstore.reference.config import LayerSpec, Mode, ReferenceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWeights:
    """Weights for the global entries of a KV source.

    Shapes:
        values and gate (None at ratio 1) ``[hidden, head_dim]``, norm ``[head_dim]``,
        index_key ``[head_dim, index_dim]``, index_norm ``[index_dim]``.
    """

    values: Tensor
    gate: Tensor | None
    norm: Tensor
    index_key: Tensor
    index_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """Weights for the choice of global entries in an index source.

    Shapes:
        query ``[q_lora_rank, index_heads * index_dim]``, head ``[hidden, index_heads]``.
    """

    query: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixWeights:
    """Weights for mixing the n streams of a residual at one sub-layer.

    Shapes:
        project ``[n * hidden, 2 n + n * n]`` and bias ``[2 n + n * n]``: for A, C and B in this order.
    """

    project: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramWeights:
    """Weights for the gated addition of table rows to each of n streams.

    Shapes:
        keys ``[columns * engram_dim, n * hidden]``, values ``[columns * engram_dim, hidden]``,
        query_norm and key_norm ``[n, hidden]``; columns is orders times heads.
    """

    keys: Tensor
    values: Tensor
    query_norm: Tensor
    key_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer.

    Shapes:
        norm ``[hidden]``, query_down ``[hidden, q_lora_rank]``, query_norm ``[q_lora_rank]``, query_up
        ``[q_lora_rank, heads * head_dim]``, window ``[hidden, head_dim]``, window_norm ``[head_dim]``,
        output ``[heads * head_dim, hidden]``, ffn_norm ``[hidden]``, gate and up ``[hidden, inner]``,
        down ``[inner, hidden]``.
    """

    norm: Tensor
    query_down: Tensor
    query_norm: Tensor
    query_up: Tensor
    window: Tensor
    window_norm: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    owner: OwnerWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None
    attention_mix: MixWeights | None = None
    ffn_mix: MixWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Weights of the drafter: layers, input projection and heads. Embedding and head are the model's.

    Shapes:
        project ``[targets * hidden, hidden]``, project_norm and norm ``[hidden]``, markov_in
        ``[vocab, rank]``, markov_out ``[rank, vocab]``, confidence ``[hidden + rank, 1]``.
    """

    project: Tensor
    project_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    markov_in: Tensor
    markov_out: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWeights:
    """Weights for the embedding of an image's patch features.

    Shapes:
        project ``[ratio * ratio * vision_hidden, hidden]``, start, newline and end ``[hidden]``.
    """

    project: Tensor
    start: Tensor
    newline: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the whole model.

    Shapes:
        embedding ``[vocab, hidden]``, norm ``[hidden]``, head ``[hidden, vocab]``.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    draft: DraftWeights | None = None
    vision: VisionWeights | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, as in a checkpoint."""
        return dict(_named(self, ""))

    def replaced(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Return weights of these shapes with the values of ``tensors``, which has all by name."""
        return _rebuilt(self, "", tensors)


_Node = TypeVar("_Node")


def _named(node: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, tuple):
        for number, item in enumerate(node):
            yield from _named(item, f"{name}.{number}")
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _named(getattr(node, field.name), f"{name}.{field.name}".lstrip("."))


def _rebuilt(node: _Node, name: str, tensors: Mapping[str, Tensor]) -> _Node:
    found: object = node
    if isinstance(node, Tensor):
        found = tensors[name]
        if found.shape != node.shape:
            msg = f"tensor {name} has shape {list(found.shape)}, expected {list(node.shape)}"
            raise ValueError(msg)
    elif isinstance(node, tuple):
        found = tuple(_rebuilt(item, f"{name}.{n}", tensors) for n, item in enumerate(node))
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        changes = {}
        for field in dataclasses.fields(node):
            key = f"{name}.{field.name}".lstrip(".")
            changes[field.name] = _rebuilt(getattr(node, field.name), key, tensors)
        found = dataclasses.replace(node, **changes)
    return found  # type: ignore[return-value]


class _Source:
    """Random matrices in a fixed order, from NumPy's platform-independent generator."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = dtype

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return ``[rows, columns]`` with variance ``1 / rows``, so that products keep their variance."""
        values = self._rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return torch.from_numpy(values).to(self._dtype)

    def norm(self, width: int) -> Tensor:
        """Return ``[width]`` near but not at one, so that tests detect a missing norm."""
        return torch.from_numpy(1.0 + 0.2 * self._rng.standard_normal(width)).to(self._dtype)


def random_weights(config: ReferenceConfig, seed: int, dtype: torch.dtype) -> Weights:
    """Return the weights of ``seed``."""
    source = _Source(seed, dtype)
    hidden, vocab = config.hidden_size, config.vocab_size
    return Weights(
        embedding=source.matrix(hidden, vocab).T.contiguous() * hidden**0.5,
        layers=tuple(_layer(config, spec, source) for spec in config.layers),
        norm=source.norm(hidden),
        head=source.matrix(hidden, vocab),
        draft=_draft(config, source) if config.num_nextn_predict_layers else None,
        vision=_vision(config, source) if config.image_token_id is not None else None,
    )


def _layer(config: ReferenceConfig, spec: LayerSpec | None, source: _Source) -> LayerWeights:
    """Return a layer of the layer table, or a draft layer without ``spec``."""
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.q_lora_rank
    width = config.num_attention_heads * config.head_dim
    is_source = spec is not None and spec.index_source == spec.layer
    has_engram = spec is not None and spec.layer in config.engram_layer_ids
    return LayerWeights(
        norm=source.norm(hidden),
        query_down=source.matrix(hidden, rank),
        query_norm=source.norm(rank),
        query_up=source.matrix(rank, width),
        window=source.matrix(hidden, config.head_dim),
        window_norm=source.norm(config.head_dim),
        output=source.matrix(width, hidden),
        ffn_norm=source.norm(hidden),
        gate=source.matrix(hidden, inner),
        up=source.matrix(hidden, inner),
        down=source.matrix(inner, hidden),
        owner=_owner(config, spec, source) if spec and spec.mode is Mode.FULL else None,
        indexer=_indexer(config, source) if is_source else None,
        engram=_engram(config, source) if has_engram else None,
        attention_mix=_mix(config, source) if config.hc_mult > 1 else None,
        ffn_mix=_mix(config, source) if config.hc_mult > 1 else None,
    )


def _mix(config: ReferenceConfig, source: _Source) -> MixWeights:
    streams = config.hc_mult
    outputs = 2 * streams + streams * streams
    project = source.matrix(streams * config.hidden_size, outputs)
    return MixWeights(project=project, bias=source.matrix(1, outputs)[0])


def _engram(config: ReferenceConfig, source: _Source) -> EngramWeights:
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    inputs, streams = columns * config.engram_head_dim, config.hc_mult
    return EngramWeights(
        keys=source.matrix(inputs, streams * config.hidden_size),
        values=source.matrix(inputs, config.hidden_size),
        query_norm=source.norm(streams * config.hidden_size).reshape(streams, -1),
        key_norm=source.norm(streams * config.hidden_size).reshape(streams, -1),
    )


def _draft(config: ReferenceConfig, source: _Source) -> DraftWeights:
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    return DraftWeights(
        project=source.matrix(len(config.dspark_target_layer_ids) * hidden, hidden),
        project_norm=source.norm(hidden),
        layers=tuple(_layer(config, None, source) for _ in config.draft_layers),
        norm=source.norm(hidden),
        markov_in=source.matrix(rank, config.vocab_size).T.contiguous(),
        markov_out=source.matrix(rank, config.vocab_size),
        confidence=source.matrix(hidden + rank, 1),
    )


def _vision(config: ReferenceConfig, source: _Source) -> VisionWeights:
    inputs = config.downsample_ratio**2 * config.vision_hidden_size
    start, newline, end = (row.clone() for row in source.matrix(3, config.hidden_size) * 3**0.5)
    project = source.matrix(inputs, config.hidden_size)
    return VisionWeights(project=project, start=start, newline=newline, end=end)


def _owner(config: ReferenceConfig, spec: LayerSpec, source: _Source) -> OwnerWeights:
    hidden, width = config.hidden_size, config.head_dim
    return OwnerWeights(
        values=source.matrix(hidden, width),
        gate=source.matrix(hidden, width) if spec.ratio > 1 else None,
        norm=source.norm(width),
        index_key=source.matrix(width, config.index_head_dim),
        index_norm=source.norm(config.index_head_dim),
    )


def _indexer(config: ReferenceConfig, source: _Source) -> IndexerWeights:
    return IndexerWeights(
        query=source.matrix(config.q_lora_rank, config.index_n_heads * config.index_head_dim),
        head=source.matrix(config.hidden_size, config.index_n_heads),
    )
