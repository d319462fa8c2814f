"""Random weights, the same in every process for one seed. They know shapes and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.reference.config import LayerSpec, Mode, ReferenceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWeights:
    """What makes the global entries of a KV source.

    Shapes:
        values and gate ``[hidden, head_dim]`` (gate is None at ratio 1: nothing to weigh), norm
        ``[head_dim]``, index_key ``[head_dim, index_dim]``, index_norm ``[index_dim]``.
    """

    values: Tensor
    gate: Tensor | None
    norm: Tensor
    index_key: Tensor
    index_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """What chooses global entries in an index source.

    Shapes:
        query ``[q_lora_rank, index_heads * index_dim]``, head ``[hidden, index_heads]``.
    """

    query: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer.

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
    owner: OwnerWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The whole model.

    Shapes:
        embedding ``[vocab, hidden]``, norm ``[hidden]``, head ``[hidden, vocab]``.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


class _Source:
    """Random matrices in a fixed order. NumPy's generator: its stream is the same everywhere."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = dtype

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Keep the size of what passes: variance one over ``rows``. Returns ``[rows, columns]``."""
        values = self._rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return torch.from_numpy(values).to(self._dtype)

    def norm(self, width: int) -> Tensor:
        """Near one, not equal to it: an unapplied norm must show. Returns ``[width]``."""
        return torch.from_numpy(1.0 + 0.2 * self._rng.standard_normal(width)).to(self._dtype)


def random_weights(config: ReferenceConfig, seed: int, dtype: torch.dtype) -> Weights:
    """Return the weights that belong to ``seed``."""
    source = _Source(seed, dtype)
    hidden, vocab = config.hidden_size, config.vocab_size
    return Weights(
        embedding=source.matrix(hidden, vocab).T.contiguous() * hidden**0.5,
        layers=tuple(_layer(config, spec, source) for spec in config.layers),
        norm=source.norm(hidden),
        head=source.matrix(hidden, vocab),
    )


def _layer(config: ReferenceConfig, spec: LayerSpec, source: _Source) -> LayerWeights:
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.q_lora_rank
    width = config.num_attention_heads * config.head_dim
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
        owner=_owner(config, spec, source) if spec.mode is Mode.FULL else None,
        indexer=_indexer(config, source) if spec.index_source == spec.layer else None,
    )


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
