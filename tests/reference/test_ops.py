"""Formulas against their definitions, one number at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.reference import ops


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    # Few distinct scores, as ReLU leaves them: nearly every choice is decided by a tie.
    scores=st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0]), min_size=1, max_size=40),
    visible=st.integers(0, 40),
    count=st.integers(1, 12),
    beyond=st.integers(0, 30),
)
def test_ties_go_to_the_lower_entry_whatever_lies_beyond(
    scores: list[float], visible: int, count: int, beyond: int
) -> None:
    visible = min(visible, len(scores))
    best = sorted(range(visible), key=lambda entry: (-scores[entry], entry))[:count]

    row = torch.tensor([scores + [9.0] * beyond], dtype=torch.float64)
    chosen = ops.top_entries(row, torch.tensor([visible]), count)

    assert chosen.tolist() == [sorted(best) + [-1] * (count - len(best))]


def test_equal_index_keys_score_equal_wherever_they_lie() -> None:
    generator = torch.Generator().manual_seed(3)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

    def on_grid(*shape: int) -> torch.Tensor:
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return grid[torch.randint(0, 8, shape, generator=generator)] * signs

    queries, weights = on_grid(5, 4, 32), torch.randn(5, 4, generator=generator).double()
    key = on_grid(1, 32)
    alone = ops.index_scores(queries, weights, key)
    for count in (2, 3, 7, 64, 129, 1000):
        among = ops.index_scores(queries, weights, key.expand(count, 32))
        assert torch.equal(among, alone.expand(5, count))


def test_index_scores_are_weighted_sums_of_what_relu_leaves() -> None:
    queries = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]], dtype=torch.float64)
    weights = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    keys = torch.tensor([[1.0, 1.0], [-2.0, 0.0], [-1.0, -3.0]], dtype=torch.float64)

    assert ops.index_scores(queries, weights, keys).tolist() == [[6.0, -6.0, 0.0]]


def test_attention_ignores_whatever_is_not_readable() -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(3, 2, 8, generator=generator).double()
    keys = torch.randn(3, 6, 8, generator=generator).double()
    readable = torch.tensor([[True, False, True, True, False, True]] * 3)

    clean = ops.attend(queries, keys, readable)
    for poison in (math.nan, math.inf, 1e300):
        spoiled = keys.masked_fill(~readable[..., None], poison)
        assert torch.equal(ops.attend(queries, spoiled, readable), clean)

    fewer = ops.attend(queries, keys[:, [0, 2, 3, 5]], torch.ones(3, 4, dtype=torch.bool))
    assert torch.allclose(clean, fewer, atol=1e-14, rtol=0)


def test_rotation_depends_on_relative_positions_and_can_be_undone() -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(2, 12, generator=generator).double()

    def product(first: int, second: int) -> float:
        turned = ops.rotate(values, torch.tensor([first, second]), theta=1e4, dims=8)
        return float(turned[0] @ turned[1])

    assert product(3, 10) == pytest.approx(product(103, 110), abs=1e-12)
    assert abs(product(3, 10) - product(3, 11)) > 1e-6
    positions = torch.tensor([5, 900])
    turned = ops.rotate(values, positions, theta=1e4, dims=8)
    assert torch.equal(turned[:, :4], values[:, :4])
    back = ops.rotate(turned, positions, theta=1e4, dims=8, back=True)
    assert torch.allclose(back, values, atol=1e-14, rtol=0)


def test_pooling_weighs_each_channel_by_its_own_scores() -> None:
    values = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]])
    scores = torch.tensor([[[0.0, 1000.0], [0.0, 0.0]]])

    assert ops.pool_groups(values, scores).tolist() == [[2.0, 10.0]]
