"""Blocks that are packed at rest: what comes back, what is kept as it is, and what is told of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore import ConfigError, LayerGroup, Layout, LayoutMismatch, PrefixCache, Stored
from kvstore.cli.main import main
from kvstore.codec import quantized
from kvstore.frame.at_rest import AtRestFormat, Packing, frames_of, quantized_layout
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import Header
from kvstore.identity.block import BlockHash, BlockKey
from kvstore.store.metrics import error_bucket
from kvstore.tier.ssd.records import Record
from tests.stores import BLOCK, DENSE, NAMESPACE, inside, tokens_of, writer_of

FORMATS = {"k": "nvfp4", "v": "mxfp4"}
GROUPS = ("k", "v")
BLOCKS = 6
TOKENS = BLOCKS * BLOCK + 1
Entries = dict[str, NDArray[np.uint8]]
HEADER = Header(
    block_tokens=BLOCK,
    number=0,
    namespace_id=1,
    payload_bytes=0,
    block_hash=BlockHash(b"h" * 32),
    parent_hash=BlockHash(b"p" * 32),
    sequence=1,
)


def open_packed(path: Path, **options: Any) -> PrefixCache:
    defaults: dict[str, Any] = {
        "namespace": NAMESPACE,
        "block_tokens": BLOCK,
        "ssd_bytes": "8MiB",
        "device_bytes": "256KiB",
        "ssd_formats": FORMATS,
    }
    return PrefixCache.open(path, layout=DENSE, **{**defaults, **options})


def store(cache: PrefixCache, tokens: NDArray[Any], entries: Entries) -> Stored:
    """Store whole blocks; the last token of a prompt is always computed."""
    return cache.store(tokens[:-1], entries)


def numbers(seed: int = 0, blocks: int = BLOCKS, scale: float = 1.0) -> Entries:
    """Entries of normally distributed numbers."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal((3, blocks * BLOCK, 64)) * scale)
        .astype(ml_dtypes.bfloat16)
        .view(np.uint8)
        for name in GROUPS
    }


def as_packed(entries: Entries) -> Entries:
    """What packing and unpacking leaves of entries."""
    found = {}
    for name, entry_format in FORMATS.items():
        kernel = quantized.Kernel(entry_format, {"nvfp4": "v41", "mxfp4": "floor"}[entry_format])
        planes = quantized.pack(entries[name].view(ml_dtypes.bfloat16), kernel)
        found[name] = quantized.unpack(*planes, kernel, dtype="bfloat16").view(np.uint8)
    return found


def slice_of(entries: Entries, block: int) -> Entries:
    return {name: array[:, block * BLOCK : (block + 1) * BLOCK] for name, array in entries.items()}


def assert_same(found: Entries, expected: Entries) -> None:
    for name in GROUPS:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_what_comes_back_is_what_packing_leaves(tmp_path: Path) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    with open_packed(tmp_path / "s") as cache:
        assert store(cache, tokens, entries).end == BLOCKS * BLOCK
        cache.flush()
        with cache.lookup(tokens) as match:
            assert match.hit_tokens == BLOCKS * BLOCK
            assert_same(cache.read(match), as_packed(entries))
    with open_packed(tmp_path / "s") as cache, cache.lookup(tokens) as match:  # after a restart
        assert_same(cache.read(match), as_packed(entries))
        assert_same(cache.read(match), as_packed(entries))


def test_device_pages_hold_the_engines_form(tmp_path: Path) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    with open_packed(tmp_path / "s") as cache:
        store(cache, tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            pages = cache.load(match)
            rows = cache.device.gather(pages, "v", 1, None, "bfloat16")
            pages.release()
        expected = as_packed(entries)["v"][1].view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(rows[0].float().numpy(), expected)


def test_a_packed_frame_takes_fewer_bytes() -> None:
    sizes = {}
    for formats in (None, FORMATS):
        frames = frames_of(DENSE, BLOCK, Packing(formats) if formats else None)
        frame = frames.encode(HEADER, tokens_of(BLOCK), frames.entries_source(numbers(blocks=1)), 0)
        sizes[formats is not None] = len(frame) - FrameFormat(DENSE, BLOCK).payload_offset
    # 2 groups of 3 layers, 8 entries of 64 values: 2 bytes each, or 4 bits and a scale.
    assert sizes[False] == 2 * 3 * 8 * 128
    assert sizes[True] == 3 * 8 * (32 + 4) + 3 * 8 * (32 + 2)


def test_above_the_budget_a_block_is_lossless(tmp_path: Path) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    # One large number in a block of small ones: FP4 loses all the small ones of its 16 or 32.
    spoiled = entries["v"].view(ml_dtypes.bfloat16)
    spoiled[:, 2 * BLOCK : 3 * BLOCK] = 0.06
    spoiled[:, 2 * BLOCK : 3 * BLOCK, ::32] = 1.0
    expected = as_packed(entries)
    errors = [
        max(
            float(
                np.linalg.norm(wide(slice_of(expected, n)[g]) - wide(slice_of(entries, n)[g]))
                / np.linalg.norm(wide(slice_of(entries, n)[g]))
            )
            for g in GROUPS
        )
        for n in range(BLOCKS)
    ]
    assert errors[2] > 0.2 > 0.15 > max(e for n, e in enumerate(errors) if n != 2)
    with open_packed(tmp_path / "s", error_budget=0.2) as cache:
        store(cache, tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            found = cache.read(match)
        for n in range(BLOCKS):
            assert_same(slice_of(found, n), slice_of(entries if n == 2 else expected, n))
        counters = cache.stats()["counters"]
        assert (counters["packed_blocks"], counters["lossless_blocks"]) == (BLOCKS - 1, 1)
        histogram: dict[str, int] = {}
        for error in errors:
            histogram[error_bucket(error)] = histogram.get(error_bucket(error), 0) + 1
        assert counters["block_errors"] == histogram
        records = {r.number: r for _, r in writer_of(cache).ssd.records()}
        for n, error in enumerate(errors):
            assert records[n].is_packed == (n != 2)
            assert records[n].error == pytest.approx(error, rel=2e-3)  # float16


def wide(entries: NDArray[np.uint8]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (
        np.ascontiguousarray(entries).view(ml_dtypes.bfloat16).astype(np.float32)
    )
    return found


def test_a_budget_of_nothing_keeps_only_what_packs_exactly(tmp_path: Path) -> None:
    tokens = tokens_of(TOKENS)
    entries = numbers()
    for name in GROUPS:  # the first block: numbers that every format has
        entries[name].view(ml_dtypes.bfloat16)[:, :BLOCK] = np.tile([6.0, -3.0, 0.5, 0.0], 16)
    with open_packed(tmp_path / "s", error_budget=0.0) as cache:
        store(cache, tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_same(cache.read(match), entries)
        counters = cache.stats()["counters"]
        assert (counters["packed_blocks"], counters["lossless_blocks"]) == (1, BLOCKS - 1)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_packed(tmp_path: Path, odd: float) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    entries["k"].view(ml_dtypes.bfloat16)[2, 3 * BLOCK + 1, 5] = odd
    with open_packed(tmp_path / "s") as cache:
        store(cache, tokens, entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            found = cache.read(match)
        assert_same(slice_of(found, 3), slice_of(entries, 3))
        counters = cache.stats()["counters"]
        assert (counters["packed_blocks"], counters["lossless_blocks"]) == (BLOCKS - 1, 1)
        assert counters["block_errors"]["nan"] == 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_damaged_block_of_either_form_shortens_the_hit(tmp_path: Path, is_packed: bool) -> None:
    path, tokens, entries = tmp_path / "s", tokens_of(TOKENS), numbers()
    size = TOKENS // 2  # two blocks, each too large to lie inside a page of the tree
    if not is_packed:
        entries["k"].view(ml_dtypes.bfloat16)[0, size, 0] = math.inf
    with open_packed(path, block_tokens=size) as cache:
        store(cache, tokens, entries)
        cache.flush()
        record = writer_of(cache).ssd.record(cache.probe(tokens).prefix.key(1))
        assert record is not None
        assert record.page > 0
        assert record.is_packed == is_packed
    with (path / "data.mdb").open("r+b") as file:
        file.seek(record.page * 4096 + 16 + record.frame_bytes - 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    with open_packed(path, block_tokens=size) as cache, cache.lookup(tokens) as match:
        assert match.hit_tokens == 2 * size
        assert cache.read(match).tokens == size
        assert cache.stats()["counters"]["corrupt_blocks"]["checksum"] == 1


def test_a_store_is_packed_in_one_way_for_good(tmp_path: Path) -> None:
    with open_packed(tmp_path / "s", error_budget=0.2):
        pass
    for formats in (None, {"k": "nvfp4"}, {"k": "fp8", "v": "mxfp4"}):
        with pytest.raises(LayoutMismatch, match="ssd_formats"):
            open_packed(tmp_path / "s", ssd_formats=formats)
    with open_packed(
        tmp_path / "s", error_budget=0.1
    ):  # what may be lost is no property of a store
        pass
    with open_packed(tmp_path / "plain", ssd_formats=None):
        pass
    with pytest.raises(LayoutMismatch, match="ssd_formats"):
        open_packed(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssd_formats": {"q": "nvfp4"}}, "group 'q', expected some of k, v"),
        ({"ssd_formats": {"k": "bf16"}}, "'k' cannot be stored as 'bf16', expected one of nvfp4"),
        ({"ssd_formats": {"k": "zip"}}, "'k' cannot be stored as 'zip', expected .*, zstd"),
        ({"error_budget": -0.1}, "at least 0, found -0.1"),
        ({"error_budget": math.nan}, "at least 0, found nan"),
        ({"error_budget": "much"}, "at least 0, found 'much'"),
        (
            {"ssd_formats": None, "error_budget": 0.1},
            "no format at rest is lossy: name one in ssd_formats",
        ),
    ],
)
def test_options_that_cannot_work_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_packed(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_one_name_packs_every_group(tmp_path: Path) -> None:
    with open_packed(tmp_path / "s", ssd_formats="fp8") as cache:
        assert isinstance(inside(cache).format, AtRestFormat)
    layout = quantized_layout(DENSE, {"k": "fp8", "v": "fp8"})
    assert [g.entry_format for g in layout.groups] == ["fp8", "fp8"]


def test_what_an_engine_packed_is_not_packed_again() -> None:
    group = LayerGroup(name="k", layers=(0,), values=64, entry_format="nvfp4")
    with pytest.raises(ConfigError, match="is cached as nvfp4, expected f32, f16 or bf16"):
        quantized_layout(Layout(model="m", groups=(group,)), {"k": "mxfp4"})


def test_a_flipped_flag_is_a_bad_head() -> None:
    frames = AtRestFormat(DENSE, BLOCK, Packing(FORMATS, 0.2))
    tokens = tokens_of(BLOCK)
    frame = frames.encode(HEADER, tokens, frames.entries_source(numbers(blocks=1)), 0)
    assert frames.form_of(frame).is_packed
    found = frames.form_of(frame).header(memoryview(frame))
    assert found is not None
    assert found.is_packed
    assert 0.08 < found.error < 0.15
    assert (
        frames.form_of(frame).fault(
            memoryview(frame), HEADER.block_hash, HEADER.parent_hash, tokens
        )
        is None
    )
    frame[6] ^= 2
    assert (
        frames.form_of(frame).fault(
            memoryview(frame), HEADER.block_hash, HEADER.parent_hash, tokens
        )
        == "header"
    )
    # Nor does a plain store take a packed frame for its own.
    frame[6] ^= 2
    plain = FrameFormat(quantized_layout(DENSE, FORMATS), BLOCK)
    assert plain.header(memoryview(frame)) is None


@given(
    error=st.floats(0, 60000) | st.just(math.nan), is_packed=st.booleans(), is_pinned=st.booleans()
)
@settings(deadline=None, derandomize=True)
def test_a_record_keeps_what_packing_lost(error: float, is_packed: bool, is_pinned: bool) -> None:
    record = Record(
        parent=BlockKey(b"p" * 16),
        number=1,
        namespace_id=2,
        sequence=3,
        error=error,
        is_packed=is_packed,
        is_pinned=is_pinned,
    )
    found = Record.unpack(record.pack())
    assert found is not None
    assert (found.is_packed, found.is_pinned) == (is_packed, is_pinned)
    assert found.error == pytest.approx(error, rel=1e-3, abs=1e-7, nan_ok=True)


def test_at_the_cap_both_sizes_live_together(tmp_path: Path) -> None:
    """Turnovers of a small store whose blocks are packed or not at random: all reads are right."""
    rng = np.random.default_rng(5)
    cap = 2 << 20
    with open_packed(tmp_path / "s", ssd_bytes=cap, error_budget=0.5, device_bytes=0) as cache:
        for round_ in range(60):
            tokens, entries = tokens_of(TOKENS, round_ + 100), numbers(round_)
            for n in range(BLOCKS):
                if rng.integers(2):
                    entries["k"].view(ml_dtypes.bfloat16)[0, n * BLOCK, 0] = math.nan
            stored = store(cache, tokens, entries)
            assert stored.dropped == 0
            cache.flush()
            with cache.lookup(tokens) as match:
                assert match.hit_tokens == BLOCKS * BLOCK
                found = cache.read(match)
            left = as_packed(entries)
            for n in range(BLOCKS):
                is_odd = np.isnan(wide(slice_of(entries, n)["k"])).any()
                assert_same(slice_of(found, n), slice_of(entries if is_odd else left, n))
            assert (tmp_path / "s" / "data.mdb").stat().st_size <= cap
        counters = cache.stats()["counters"]
        assert counters["evicted_blocks"]["ssd"] > 0
        assert counters["write_errors"] == 0


def test_stats_and_inspect_show_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    entries["k"].view(ml_dtypes.bfloat16)[0, BLOCK, 0] = math.nan
    with open_packed(tmp_path / "s") as cache:
        store(cache, tokens, entries)
        cache.flush()
        key = cache.probe(tokens).prefix.key(1)
    path = str(tmp_path / "s")
    assert main(["stats", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ssd_formats"] == FORMATS
    assert (found["packed_blocks"], found["lossless_blocks"]) == (BLOCKS - 1, 1)
    assert found["block_errors"]["nan"] == 1
    assert sum(found["block_errors"].values()) == BLOCKS
    assert main(["stats", path]) == 0
    assert "lossless blocks" in capsys.readouterr().out
    assert main(["inspect", path, key.hex()]) == 0
    assert "not finite" in capsys.readouterr().out
    assert main(["verify", path]) == 0
