"""N-grams: their rows, token classes, and tables that stay on disk."""

from __future__ import annotations

import dataclasses
import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engine import ReferenceEngine
from kvstore.reference.engram import (
    Addresses,
    DiskTable,
    Engram,
    addresses,
    fold,
    open_tables,
    token_bytes,
    token_classes,
)
from kvstore.reference.formats import pack_mxfp8, unpack_mxfp8
from tests.reference.support import SYSTEMS, engine_of, prompt_tokens

CONFIG = ReferenceConfig.tiny(sliding_window=8, index_topk=4, **SYSTEMS["n-grams"])


def rows_of(where: Addresses, tokens: list[int], images: set[int] = frozenset()) -> list[list[int]]:  # type: ignore[assignment]
    is_image = torch.tensor([place in images for place in range(len(tokens))])
    found: list[list[int]] = where.rows(
        torch.tensor(tokens), is_image, torch.arange(len(tokens))
    ).tolist()
    return found


def test_the_release_has_its_own_number_of_rows_and_bytes() -> None:
    """Primes that ascend from 16,000,000 add up to what its config names as table sizes."""
    config = ReferenceConfig.release()
    # Its tokenizer is not here; classes do not change where tables end.
    found = addresses(dataclasses.replace(config, vocab_size=256, image_token_id=None))

    assert {layer: where.row_count for layer, where in found.items()} == {
        1: 384_006_168,
        14: 384_016_682,
    }
    assert token_bytes(config) == 2 * 24 * 264


def test_no_two_heads_share_a_prime_and_every_row_lies_in_its_heads_part() -> None:
    found = addresses(CONFIG)
    primes = [int(prime) for where in found.values() for prime in where.primes.ravel()]

    assert len(set(primes)) == len(primes) == 2 * 3 * 2
    assert all(prime >= 500 for prime in primes)
    assert all(math.gcd(prime, divisor) == 1 for prime in primes for divisor in range(2, 32))
    for where in found.values():
        assert bool((where.multipliers % 2 == 1).all())
        rows = np.array(rows_of(where, prompt_tokens(300).tolist()))
        parts = zip(where.offsets.ravel(), where.primes.ravel(), strict=True)
        for column, (start, size) in enumerate(parts):
            assert rows[:, column].min() >= start
            assert rows[:, column].max() < start + size
            assert len(set(rows[:, column].tolist())) > 100


def test_an_n_gram_has_one_place_wherever_it_stands() -> None:
    where = addresses(CONFIG)[1]
    heads = CONFIG.engram_n_heads
    one, other = rows_of(where, [9, 1, 2, 3, 4]), rows_of(where, [7, 7, 9, 1, 2, 3, 4])

    # Orders 2, 3 and 4 of the last token, and what they share at the one after a different start.
    assert one[4] == other[6]
    assert one[2][:heads] == other[4][:heads]
    assert one[3][: 2 * heads] == other[5][: 2 * heads]
    assert one[1][heads:] != other[3][heads:]


def test_a_look_back_ends_at_the_first_token_and_at_an_image() -> None:
    where = addresses(CONFIG)[1]
    pad = CONFIG.engram_pad_token_id

    assert rows_of(where, [5, 6])[1] == rows_of(where, [pad, pad, 5, 6])[3]
    # An image two tokens back hides what lies behind it as well.
    hidden = rows_of(where, [1, 2, 200, 5, 6], images={2})[4]
    assert hidden == rows_of(where, [8, 9, 201, 5, 6], images={2})[4]
    assert hidden == rows_of(where, [pad, pad, pad, 5, 6])[4]
    assert hidden != rows_of(where, [1, 2, 200, 5, 6])[4]


def test_spellings_fold_and_bytes_of_longer_characters_do_not() -> None:
    assert fold("Ａé\t\n b ") == "ae b"
    assert fold(" ") == fold("\n\t") == " "
    assert fold("\u0301") == "\u0301"  # nothing is left of it, so it stays

    classes = token_classes(258)
    for lower, upper in zip(string.ascii_lowercase, string.ascii_uppercase, strict=True):
        assert classes[ord(lower)] == classes[ord(upper)]
    assert classes[ord(" ")] == classes[ord("\n")] == classes[ord("\t")]
    assert len(set(classes.tolist())) == 258 - 26 - 3
    assert classes.max() + 1 == len(set(classes.tolist()))


def test_tables_are_made_once_and_read_back_as_they_were_written(tmp_path: Path) -> None:
    first = open_tables(CONFIG, tmp_path, seed=3, dtype=torch.float64)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = open_tables(CONFIG, tmp_path, seed=3, dtype=torch.float64)

    assert len(written) == 2
    assert written == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for layer, where in addresses(CONFIG).items():
        rows = torch.tensor([[0, 1], [where.row_count - 1, 5]])
        values = first[layer].gather(rows)
        assert values.shape == (2, 2, 32)
        assert torch.equal(values, again[layer].gather(rows))
        assert torch.equal(
            values, torch.from_numpy(unpack_mxfp8(pack_mxfp8(values), torch.float64).numpy())
        )
    other = open_tables(CONFIG, tmp_path, seed=4, dtype=torch.float64)
    assert not torch.equal(other[1].gather(torch.tensor([0])), first[1].gather(torch.tensor([0])))


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    open_tables(CONFIG, tmp_path, seed=3, dtype=torch.float64)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ValueError, match="remove it"):
        open_tables(CONFIG, tmp_path, seed=3, dtype=torch.float64)


def test_rows_that_nobody_asks_for_stay_on_disk(tmp_path: Path) -> None:
    """A sparse table of 512 MiB: afterwards only the read pages are in memory."""
    path, row_bytes = tmp_path / "table", 33
    row_count = (512 << 20) // row_bytes
    with path.open("wb") as file:
        file.truncate(row_count * row_bytes)
    table = DiskTable(path, row_count, row_bytes, torch.float32)
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, row_count, 100))

    table.prefetch(rows)
    values = table.gather(rows)

    assert values.shape == (100, 32)
    assert table.bytes_read == 100 * row_bytes
    assert resident_bytes(path) < 16 << 20


def resident_bytes(path: Path) -> int:
    """Return how much of a mapped file this process has in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
    size = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(size.split()[1]) * 1024


def test_rows_are_asked_for_before_the_first_layer_runs() -> None:
    heard: list[str] = []

    class Spy:
        def __init__(self, layer: int) -> None:
            self.layer = layer

        def prefetch(self, rows: torch.Tensor) -> None:
            heard.append(f"fetch {self.layer}: {rows.numel()}")

        def gather(self, rows: torch.Tensor) -> torch.Tensor:
            heard.append(f"read {self.layer}: {rows.numel()}")
            return torch.zeros(*rows.shape, CONFIG.engram_head_dim, dtype=torch.float64)

    engine = engine_of(CONFIG)
    engine.model._engram = Engram(CONFIG, {layer: Spy(layer) for layer in (1, 4)})
    engine.prefill(prompt_tokens(10))

    assert heard == ["fetch 1: 60", "fetch 4: 60", "read 1: 60", "read 4: 60"]


def test_bytes_are_counted_by_the_rows_that_run() -> None:
    engine = engine_of(CONFIG)

    assert engine.prefill(prompt_tokens(40)).engram_bytes == 40 * token_bytes(CONFIG)
    assert engine.generate(prompt_tokens(40), 5).engram_bytes == 44 * token_bytes(CONFIG)


def test_a_config_with_n_grams_needs_a_folder_for_their_tables() -> None:
    with pytest.raises(ValueError, match="folder"):
        ReferenceEngine(CONFIG)
    with pytest.raises(ValueError, match="table for each"):
        Engram(CONFIG, {})
