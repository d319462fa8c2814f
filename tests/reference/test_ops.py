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
    candidates = ops.visible_entries(row.shape[1], torch.tensor([visible]))
    chosen = ops.top_entries(row, candidates, count)

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
        gathered = ops.index_scores(queries, weights, key.expand(5, count, 32))
        assert torch.equal(gathered, among)


def test_index_scores_are_weighted_sums_of_what_relu_leaves() -> None:
    queries = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]], dtype=torch.float64)
    weights = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    keys = torch.tensor([[1.0, 1.0], [-2.0, 0.0], [-1.0, -3.0]], dtype=torch.float64)

    assert ops.index_scores(queries, weights, keys).tolist() == [[6.0, -6.0, 0.0]]


def test_attention_ignores_whatever_is_not_readable() -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(3, 2, 8, generator=generator).double()
    values = torch.randn(3, 6, 8, generator=generator).double()
    readable = torch.tensor([[True, False, True, True, False, True]] * 3)

    clean, _ = ops.attend(queries, [ops.Keys(values, readable)])
    spoiled = values.masked_fill(~readable[..., None], 1e300)
    assert torch.equal(ops.attend(queries, [ops.Keys(spoiled, readable)])[0], clean)

    every = torch.ones(3, 4, dtype=torch.bool)
    fewer, _ = ops.attend(queries, [ops.Keys(values[:, [0, 2, 3, 5]], every)])
    assert torch.allclose(clean, fewer, atol=1e-14, rtol=0)


def test_attention_to_two_places_is_attention_to_all_their_keys() -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(3, 2, 8, generator=generator).double()
    values = torch.randn(3, 6, 8, generator=generator).double()
    readable = torch.tensor([[True, False, True, True, False, True]] * 3)

    together, (shares,) = ops.attend(queries, [ops.Keys(values, readable)])
    places = [ops.Keys(values[:, part], readable[:, part]) for part in (slice(2), slice(2, 6))]
    apart, parts = ops.attend(queries, places)
    assert torch.allclose(apart, together, atol=1e-14, rtol=0)
    assert torch.allclose(torch.cat(parts, dim=-1), shares, atol=1e-14, rtol=0)


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


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40),
    visible=st.integers(0, 40),
    block=st.sampled_from([1, 3, 8]),
    count=st.integers(1, 6),
    beyond=st.integers(0, 30),
)
def test_the_best_blocks_are_those_with_the_best_visible_entry(
    scores: list[float], visible: int, block: int, count: int, beyond: int
) -> None:
    visible = min(visible, len(scores))
    blocks = [range(at, min(at + block, visible)) for at in range(0, visible, block)]
    best = sorted(blocks, key=lambda entries: (-max(scores[e] for e in entries), entries[0]))
    expected = sorted(entry for entries in best[:count] for entry in entries)

    row = torch.tensor([scores + [9.0] * beyond], dtype=torch.float64)
    candidates = ops.visible_entries(row.shape[1], torch.tensor([visible]))
    pool = ops.top_blocks(row, candidates, block, count)

    # No wider than there are blocks: a short prompt does not pay for all that a long one may keep.
    assert pool.shape == (1, block * min(count, math.ceil(row.shape[1] / block)))
    assert [entry for entry in pool[0].tolist() if entry >= 0] == expected


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    generator = torch.Generator().manual_seed(9)
    mixed = ops.sinkhorn(torch.randn(5, 4, 4, generator=generator).double(), 20, 1e-6)

    ones = torch.ones(5, 4, dtype=torch.float64)
    assert bool((mixed > 0).all())
    assert torch.allclose(mixed.sum(dim=-1), ones, atol=1e-4)
    assert torch.allclose(mixed.sum(dim=-2), ones, atol=1e-4)


def test_a_gradient_passes_rounding_unchanged() -> None:
    values = torch.tensor([0.3, -1.2], requires_grad=True)
    rounded = ops.straight_through(values, torch.tensor([0.5, -1.0]))
    (gradient,) = torch.autograd.grad((rounded * torch.tensor([3.0, 5.0])).sum(), values)

    assert rounded.tolist() == [0.5, -1.0]
    assert gradient.tolist() == [3.0, 5.0]


def test_a_choice_is_right_when_scores_say_where_attention_went() -> None:
    shares = torch.tensor([[[0.1, 0.3, 0.0]], [[0.2, 0.6, 0.2]], [[0.0, 0.0, 0.0]]])
    picks = torch.tensor([[4, 7, -1], [1, 2, 3], [-1, -1, -1]])
    scores = torch.tensor([[0.0, math.log(3), math.nan], [0.0, math.log(3), 0.0], [1.0, 1.0, 1.0]])

    assert float(ops.choice_loss(scores, picks, shares)) == pytest.approx(0, abs=1e-6)
    worse = scores.clone()
    worse[0, 1] = 0.0
    expected = (0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)) / 2
    assert float(ops.choice_loss(worse, picks, shares)) == pytest.approx(expected, rel=1e-5)
