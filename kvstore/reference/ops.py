"""Formulas of the model, one function each.

The result for a query row does not depend on other rows of the call: the keys of a row are gathered before
they are multiplied.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale each vector to root mean square 1, then by ``weight``.

    Shapes:
        values ``[..., width]``, weight ``[width]`` or None; returns ``[..., width]``.
    """
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def rotate(
    values: Tensor, positions: Tensor, *, theta: float, dims: int, back: bool = False
) -> Tensor:
    """Rotate the last ``dims`` channels by their row's position (RoPE); ``back`` undoes it.

    Channels 2i and 2i + 1 are one pair, rotated by ``position * theta ** (-2i / dims)``.

    Shapes:
        values ``[rows, ..., width]``, positions int64 ``[rows]``; returns values' shape.
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    angles = angles.reshape(len(positions), *([1] * (values.ndim - 2)), dims // 2)
    cos = angles.cos().to(values.dtype)
    sin = (-angles if back else angles).sin().to(values.dtype)
    even, odd = values[..., -dims::2], values[..., -dims + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((values[..., :-dims], turned), dim=-1)


def swiglu(values: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return ``(silu(values @ gate) * (values @ up)) @ down``.

    Shapes:
        values ``[rows, hidden]``, gate and up ``[hidden, inner]``, down ``[inner, hidden]``;
        returns ``[rows, hidden]``.
    """
    return (functional.silu(values @ gate) * (values @ up)) @ down


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    """Pool the tokens of each group with a softmax over their scores, channel by channel.

    Shapes:
        values and scores ``[groups, ratio, head_dim]``; returns ``[groups, head_dim]``.
    """
    return (scores.softmax(dim=1) * values).sum(dim=1)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Score entries for every query: ``sum over heads of weight * relu(query . key)``.

    Queries and keys are on the MXFP4 grid, so in float64 each dot product is exact in any order of
    addition, and heads are added in order. So equal keys have bit-identical scores, for any number of
    entries and any split of the queries into calls.

    Shapes:
        queries ``[rows, heads, index_dim]``, weights ``[rows, heads]``, keys ``[n, index_dim]``, the
        same for every row, or ``[rows, n, index_dim]``; returns ``[rows, n]``.
    """
    products = functional.relu(queries @ keys.mT)
    shares = weights[..., None].unbind(dim=1)
    parts = [share * one for share, one in zip(shares, products.unbind(dim=1), strict=True)]
    return functools.reduce(torch.add, parts)


def visible_entries(count: int, visible: Tensor) -> Tensor:
    """Return the visible entries of each row, as candidates.

    Shapes:
        visible int64 ``[rows]``: entries ``[0, visible[r])`` are visible to row r; returns int64
        ``[rows, count]``, ascending, -1 for invisible entries.
    """
    entries = torch.arange(count)
    return torch.where(entries < visible[:, None], entries, -1)


def top_entries(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Choose the ``count`` best candidates of each row, the lower entry of a tie.

    Ties are common, because ReLU produces exact zeros. The choice must not depend on the number of
    columns: a stable sort guarantees that, ``torch.topk`` does not.

    Shapes:
        scores ``[rows, n]``, candidates int64 ``[rows, n]``: entries, ascending, with -1 anywhere for
        none; returns int64 ``[rows, count]``, ascending, padded at the end with -1.
    """
    masked = scores.masked_fill(candidates < 0, -math.inf)
    order = masked.sort(dim=-1, descending=True, stable=True).indices
    best = candidates.gather(1, order[:, :count])
    # Ascending, for a fixed order of sums over the chosen entries.
    beyond = torch.iinfo(torch.int64).max
    ascending = best.masked_fill(best < 0, beyond).sort(dim=-1).values
    chosen = ascending.masked_fill(ascending == beyond, -1)
    return functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def top_blocks(scores: Tensor, candidates: Tensor, block: int, count: int) -> Tensor:
    """Choose the candidates of the ``count`` best blocks of each row, by the best score of a block.

    The lower block of a tie is chosen; a row with at most ``count`` visible blocks keeps all.

    Shapes:
        scores and candidates as for ``top_entries``, with entry j in column j; returns int64
        ``[rows, k * block]`` for the k <= count existing blocks, ascending with gaps: -1 for none.
    """
    rows, entries = scores.shape
    short = -entries % block
    masked = scores.masked_fill(candidates < 0, -math.inf)
    scores = functional.pad(masked, (0, short), value=-math.inf)
    best = scores.reshape(rows, -1, block).amax(dim=-1)
    blocks = torch.where(best == -math.inf, -1, torch.arange(best.shape[1]))
    kept = top_entries(best, blocks, min(count, best.shape[1]))
    columns = kept[..., None] * block + torch.arange(block)
    padded = functional.pad(candidates, (0, short), value=-1)
    pool = padded.gather(1, columns.clamp(min=0).flatten(1))
    return pool.masked_fill((kept < 0).repeat_interleave(block, dim=1), -1)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Return positive matrices whose rows and columns sum to about one (Sinkhorn-Knopp).

    Shapes:
        ``[rows, n, n]`` in and out.
    """
    mixed = logits.softmax(dim=-1) + eps
    for _ in range(iterations):
        mixed = mixed / (mixed.sum(dim=-2, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(dim=-1, keepdim=True) + eps)
    return mixed


class _StraightThrough(torch.autograd.Function):
    """Rounded values forward, the gradient of the values backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        """Return ``rounded``."""
        del ctx, values
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient without rounding."""
        del ctx
        return gradients[0], None


def straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded``, with the gradient of ``values``, which has its shape.

    Rounding has no useful gradient. With this one a model is trained on the values that it reads.
    """
    result: Tensor = _StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one source, window or entries, which are also the values.

    Shapes:
        values ``[rows, k, dim]``, readable bool ``[rows, k]``: an unreadable key has any finite value.
    """

    values: Tensor
    readable: Tensor


def attend(queries: Tensor, sources: Sequence[Keys]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attend from each row to its own keys, of all sources at once.

    Shapes:
        queries ``[rows, heads, dim]``; each row has at least one readable key; returns
        ``[rows, heads, dim]``, and the attention weights of each source, ``[rows, heads, k]``.
    """
    products = (torch.einsum("rhd,rkd->rhk", queries, source.values) for source in sources)
    hidden = (~source.readable[:, None] for source in sources)
    scores = [p.masked_fill(h, -math.inf) for p, h in zip(products, hidden, strict=True)]
    weights = (torch.cat(scores, dim=-1) / math.sqrt(queries.shape[-1])).softmax(dim=-1)
    ends = itertools.accumulate(source.values.shape[1] for source in sources[:-1])
    shares = weights.tensor_split(list(ends), dim=-1)
    read = [
        torch.einsum("rhk,rkd->rhd", share, source.values)
        for share, source in zip(shares, sources, strict=True)
    ]
    return torch.stack(read).sum(dim=0), shares


def choice_loss(scores: Tensor, picks: Tensor, shares: Tensor) -> Tensor:
    """Return the KL divergence of scores from attention weights, mean over rows.

    Shapes:
        scores and picks ``[rows, k]``, -1 for no pick; shares ``[rows, heads, k]``: the attention
        weight of each pick, without a gradient; returns a scalar.
    """
    is_missing = picks < 0
    rows = ~is_missing.all(dim=1)
    target = shares.detach().sum(dim=1)[rows]
    target = target / target.sum(dim=1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    logs = scores.masked_fill(is_missing, -math.inf)[rows].log_softmax(dim=1)
    logs = logs.masked_fill(is_missing[rows], 0.0)
    return (torch.xlogy(target, target) - target * logs).sum() / max(1, len(target))
