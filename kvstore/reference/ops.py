"""The formulas of the model, one function each. They know no layer, no cache and no sequence.

Every function treats each query row by itself, and gathers the keys of a row before it multiplies:
a row's result does not depend on which other rows are computed in the same call.
"""

from __future__ import annotations

import math

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

    Channels 2i and 2i + 1 are one pair, turned by ``position * theta ** (-2i / dims)``.

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
    """Score every entry for every query: ``sum over heads of weight * relu(query . key)``.

    Queries and keys are both on the MXFP4 grid, so in float64 each dot product is exact in any
    order of addition, and heads are added one by one. Equal keys therefore get equal scores, bit
    for bit, however many entries there are and however the queries are split into calls.

    Shapes:
        queries ``[rows, heads, index_dim]``, weights ``[rows, heads]``, keys ``[n, index_dim]``;
        returns ``[rows, n]``.
    """
    total = queries.new_zeros(len(queries), len(keys))
    for head in range(queries.shape[1]):
        total += weights[:, head, None] * functional.relu(queries[:, head] @ keys.T)
    return total


def top_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Choose the ``count`` best visible entries of each row; a tie goes to the lower index.

    Exact ties are common, because ReLU makes exact zeros. The choice must not depend on how many
    entries there are beyond the visible ones: a stable sort guarantees that, ``torch.topk`` does not.

    Shapes:
        scores ``[rows, n]``, visible int64 ``[rows]``: row r sees entries ``[0, visible[r])``;
        returns int64 ``[rows, count]``, ascending, padded at the end with -1.
    """
    entries = scores.shape[1]
    hidden = torch.arange(entries) >= visible[:, None]
    ranked = scores.masked_fill(hidden, -math.inf).sort(dim=-1, descending=True, stable=True)
    best = ranked.indices[:, :count]
    # In ascending order the sum over the chosen entries is always taken in the same order.
    ascending = best.masked_fill(best >= visible[:, None], entries).sort(dim=-1).values
    chosen = ascending.masked_fill(ascending == entries, -1)
    return functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def attend(queries: Tensor, keys: Tensor, readable: Tensor) -> Tensor:
    """Attend from each row to its own gathered keys, which are the values as well.

    What is not readable may hold anything, NaN included: it is cleared before any product.

    Shapes:
        queries ``[rows, heads, dim]``, keys ``[rows, k, dim]``, readable bool ``[rows, k]`` with at
        least one True a row; returns ``[rows, heads, dim]``.
    """
    keys = keys.masked_fill(~readable[..., None], 0.0)
    scores = torch.einsum("rhd,rkd->rhk", queries, keys) / math.sqrt(queries.shape[-1])
    weights = scores.masked_fill(~readable[:, None], -math.inf).softmax(dim=-1)
    return torch.einsum("rhk,rkd->rhd", weights, keys)
