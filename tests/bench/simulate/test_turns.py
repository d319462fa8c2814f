"""Turns are counted by their new tokens, and mixes give the stated savings."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

import kvstore
from bench.simulate.turns import BEFORE, HERE, Row, measure, mixes, new_tokens
from kvstore.footprint.cost import persistent_bytes
from kvstore.trace.reading import read

# The second request brings two blocks, the third none, the fourth half a one.
ROWS = """\
{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1, "input_length": 2048, "output_length": 5, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 2, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3, "input_length": 256, "output_length": 5, "hash_ids": [4]}
"""


def test_a_turn_has_the_tokens_that_it_is_the_first_to_bring(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROWS)

    assert new_tokens(read(path)).tolist() == [1024, 1024, 0, 256]
    row = measure(path, 1000)
    assert (row.turns, row.mean, row.median) == (3, 768, 1024)
    assert row.short_share == pytest.approx(1 / 3)


def test_a_trace_of_lengths_has_turns_of_prompt_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")

    assert new_tokens(read(path)).tolist() == [418]


def test_a_mix_of_turns_saves_seven_eighths() -> None:
    rows = [Row(name, 1, mean, mean, mean, 0, 1, 1, 1) for name, mean in (("a", 400), ("b", 6000))]
    ((short, long, share),) = mixes(rows, 1783)

    assert (short, long) == ("a", "b")
    mean = share * 400 + (1 - share) * 6000
    here, before = kvstore.layout(HERE), kvstore.layout(BEFORE)
    saved = 1 - here.bytes_per_token / persistent_bytes(before, Fraction(mean))
    assert float(saved) == pytest.approx(0.875, abs=1e-4)
