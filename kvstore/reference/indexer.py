"""The indexer: choice of the global entries that a query reads.

A Full layer scores every visible entry and chooses the best. The candidate source also keeps the best
blocks of entries, by their best score, as the candidates of the Reindex layers above it. All of it is
computed for every query and never cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvstore
from kvstore.reference import ops
from kvstore.reference.config import LayerSpec, Mode, ReferenceConfig
from kvstore.reference.entries import GlobalEntries
from kvstore.reference.formats import rounded
from kvstore.reference.layer import Layer, Projected


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen entries of the queries of one pass.

    Shapes:
        picks int64 ``[rows, index_topk]``: entries of the last index source, -1 for none; scores of
        the same shape, arbitrary without a pick; pool int64 ``[rows, n]``: at most
        ``candidate_topk_blocks * candidate_block_size`` candidates, -1 for none.
    """

    picks: Tensor | None = None
    scores: Tensor | None = None
    pool: Tensor | None = None


class Indexer:
    """The indexer of a model's index sources."""

    def __init__(self, config: ReferenceConfig, keys: kvstore.LayerGroup) -> None:
        self._config = config
        self._keys = keys

    def choose(
        self,
        spec: LayerSpec,
        layer: Layer,
        projected: Projected,
        positions: Tensor,
        entries: GlobalEntries,
        before: Selection,
    ) -> Selection:
        """Choose entries for rows of one sequence; ``before`` is the choice of the index source below.

        Visible to a query at p are the groups that end at or before it: ``(p + 1) // ratio`` entries.
        """
        config, weights = self._config, layer.weights.indexer
        assert weights is not None
        assert spec.owner is not None
        # A choice has no gradient. The indexer is trained to predict attention, detached from its inputs.
        latent, inputs = projected.latent.detach(), projected.inputs.detach()
        queries = (latent @ weights.query).reshape(len(positions), config.index_n_heads, -1)
        queries = layer.rotate(layer.norm(queries, None), positions)
        # With both factors on the MXFP4 grid the product is exact, see ops.index_scores.
        queries = rounded(self._keys, queries)
        shares = inputs @ weights.head
        name = f"index_r{spec.ratio}"
        if spec.mode is Mode.REINDEX:
            candidates = before.pool
            assert candidates is not None
            keys = entries.gather(name, spec.owner, candidates)
            # The value for a missing candidate is arbitrary, possibly NaN.
            keys = keys.masked_fill(candidates[..., None] < 0, 0.0)
        else:
            visible = (positions + 1) // spec.ratio
            count = int(visible.max())
            candidates = ops.visible_entries(count, visible)
            keys = entries.scan(name, spec.owner, count)
        scores = ops.index_scores(queries, shares, keys)
        picks = ops.top_entries(scores, candidates, config.index_topk)
        pool = before.pool
        if spec.layer == config.candidate_source_layer_id:
            block, blocks = config.candidate_block_size, config.candidate_topk_blocks
            pool = ops.top_blocks(scores, candidates, block, blocks)
        return Selection(picks, _scores_of(picks, candidates, scores), pool)


def _scores_of(picks: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
    """Return the score of each pick, None without a gradient. Shapes: ``[rows, index_topk]``."""
    if not scores.requires_grad:
        return None
    # Candidates ascend except for gaps; in the search, a gap counts as the entry before it.
    ascending = candidates.cummax(dim=1).values.contiguous()
    columns = torch.searchsorted(ascending, picks.clamp(min=0)).clamp(max=scores.shape[1] - 1)
    return scores.gather(1, columns)


def read_entries(entries: GlobalEntries, spec: LayerSpec, picks: Tensor) -> ops.Keys:
    """Return the chosen main entries. Shapes: picks int64 ``[rows, k]``; ``[rows, k, head_dim]``."""
    assert spec.owner is not None
    values = entries.gather(f"main_r{spec.ratio}", spec.owner, picks)
    # The value for a missing entry is arbitrary, possibly NaN.
    return ops.Keys(values.masked_fill(picks[..., None] < 0, 0.0), picks >= 0)
