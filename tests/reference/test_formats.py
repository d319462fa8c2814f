"""Bytes of window rows and of global entries."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.formats import pack, unpack

CONFIG = ReferenceConfig.tiny()
MXFP8 = dataclasses.replace(CONFIG, window_format="mxfp8")


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    group = CONFIG.layout(dtype).group("window")
    rows = random_rows(3, 5, CONFIG.head_dim).to(dtype)

    stored = pack(group, rows)

    assert stored.shape == (3, 5, group.entry_bytes)
    assert torch.equal(unpack(group, stored, dtype), rows)


def test_mxfp8_rows_are_near_and_pass_a_second_time_unchanged() -> None:
    group = MXFP8.layout().group("window")
    rows = random_rows(3, 5, MXFP8.head_dim) * 10 ** random_rows(3, 5, 1)

    once = pack(group, rows)
    near = unpack(group, once, torch.float64)

    assert once.shape == (3, 5, group.entry_bytes)
    # E4M3 keeps 4 significant bits; below its least normal number the step is 2**-9 of the scale.
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((near - rows).abs() <= rows.abs() / 16 + largest * 2**-17).all()
    # Not the bytes: a largest value that was rounded down may fit the next smaller scale.
    assert torch.equal(unpack(group, pack(group, near), torch.float64), near)


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 127), (448.1, 128), (224.0, 126), (0.0, 127)]
)
def test_mxfp8_scale_is_the_least_power_of_two_that_does_not_saturate(
    largest: float, scale: int
) -> None:
    rows = torch.zeros(1, 32, dtype=torch.float64)
    rows[0, 3] = largest

    assert pack(MXFP8.layout().group("window"), rows)[0, 32] == scale


@pytest.mark.parametrize("name", ["main_r1", "main_r2", "index_r1", "index_r2"])
def test_entries_pass_a_second_time_unchanged(name: str) -> None:
    group = CONFIG.layout().group(name)
    values = random_rows(7, group.values)

    once = pack(group, values)
    near = unpack(group, once, torch.float64)

    assert once.shape == (7, group.entry_bytes)
    # The coarsest step of E2M1 is 2 of 6: no value is off by more than a sixth of the largest, or
    # a little more where the scale was rounded down.
    assert ((near - values).abs() <= values.abs().amax(-1, keepdim=True) * 0.2).all()
    again = unpack(group, pack(group, near), torch.float64)
    assert torch.equal(again, near)


def test_entries_in_bf16_are_rounded_to_eight_bits() -> None:
    group = ReferenceConfig.tiny(global_format="bf16").layout().group("main_r1")
    values = random_rows(7, group.values)

    stored = pack(group, values)

    assert stored.shape == (7, group.entry_bytes)
    assert torch.equal(unpack(group, stored, torch.float64), values.bfloat16().double())
