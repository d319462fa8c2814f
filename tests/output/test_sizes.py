"""Sizes: one parser for all units, one formatter."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvstore import ConfigError
from kvstore.output.sizes import rate_of, seconds_of, size_bytes, size_of, size_or_share, size_text

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("space", ["", " "])
def test_decimal_and_binary_units_are_accepted_everywhere(unit: str, space: str) -> None:
    text, expected = f"1.5{space}{unit}", int(1.5 * UNITS[unit])
    assert size_bytes(text, "size") == expected
    assert size_or_share(text, "size", 10, "whole") == expected
    assert size_of(text, 100, Fraction(1)).blocks == expected
    assert rate_of(f"{text}/s") == 1.5 * UNITS[unit]


@pytest.mark.parametrize("size", [7, np.int64(7), np.uint8(7), "7", " 7 ", "7B", "7.9"])
def test_bytes_are_an_integer_or_text(size: Any) -> None:
    assert size_bytes(size, "size") == 7


@pytest.mark.parametrize("size", ["5%", "5b", "1GB/s", "1gb", "1Gi", "-1", True, 1.0, None, ""])
def test_other_values_are_no_bytes(size: Any) -> None:
    with pytest.raises(
        ConfigError, match="size must be bytes or a size such as '4GiB' or '500MB', f"
    ):
        size_bytes(size, "size")


def test_sizes_are_exact_and_bounded() -> None:
    assert size_bytes("9223372036854775807", "size") == 2**63 - 1
    assert size_bytes("0.1GB", "size") == 10**8
    for size in (2**63, "8388608TiB", 10**400):
        with pytest.raises(ConfigError, match=r"size must be less than 2\*\*63 bytes, found"):
            size_bytes(size, "size")
    with pytest.raises(ConfigError, match="size must not be negative, found -1"):
        size_bytes(-1, "size")


def test_a_share_is_of_the_whole() -> None:
    assert size_or_share("29%", "--to", 100, "ssd_bytes") == 29
    assert size_or_share(" 0.5 % ", "--to", 1000, "ssd_bytes") == 5
    with pytest.raises(ConfigError, match="--to must be at most 100% of ssd_bytes, found '101%'"):
        size_or_share("101%", "--to", 100, "ssd_bytes")
    with pytest.raises(ConfigError, match="or a share of ssd_bytes such as '50%', found 'all'"):
        size_or_share("all", "--to", 100, "ssd_bytes")


@pytest.mark.parametrize("text", ["0s", "5", "5 minutes", "1e3s", "", "9" * 19 + "s"])
def test_other_texts_are_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="expected a time such as 300s, 5m or 100us, found"):
        seconds_of(text)


def test_text_of_a_size_is_read_back() -> None:
    for size in (0, 1, 1 << 20, 3 << 29, 5 << 40):
        assert size_bytes(size_text(size).replace(" bytes", ""), "size") == size
