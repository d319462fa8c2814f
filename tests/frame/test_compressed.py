"""Blocks that are compressed at rest: nothing is lost, damage is a miss, and other forms live beside."""

from __future__ import annotations

import json
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore import ConfigError, LayerGroup, Layout, LayoutMismatch, PrefixCache, StoreError
from kvstore.admin import inspect as admin
from kvstore.admin import upkeep as upkeep_of
from kvstore.admin.archive import export_store, import_store
from kvstore.cli.main import main
from kvstore.codec import native
from kvstore.frame.at_rest import AtRestFormat, CompressedFormat, Packing
from kvstore.frame.format import FrameFormat, Frames
from kvstore.frame.header import Header
from kvstore.identity.block import BlockHash, BlockKey
from kvstore.store.integrity import frame_fault
from tests.stores import DENSE, NAMESPACE, tokens_of, writer_of

BLOCK = 64
"""Tokens of a block here: 48 KiB of numbers, so that there are pages to save."""
BLOCKS = 6
TOKENS = BLOCKS * BLOCK + 1
PAGE = 4096
ZSTD = {"k": "zstd", "v": "zstd"}
HEADER = Header(
    block_tokens=BLOCK,
    number=0,
    namespace_id=1,
    payload_bytes=0,
    block_hash=BlockHash(b"h" * 32),
    parent_hash=BlockHash(b"p" * 32),
    sequence=1,
)
WIDTHS = {"f32": 4, "f16": 2, "bf16": 2}
Entries = dict[str, NDArray[np.uint8]]


def nothing(_done: int, _total: int) -> None:
    pass


def open_compressed(path: Path, **options: Any) -> PrefixCache:
    defaults: dict[str, Any] = {
        "namespace": NAMESPACE,
        "block_tokens": BLOCK,
        "ssd_bytes": "8MiB",
        "device_bytes": 0,
        "ssd_formats": ZSTD,
    }
    return PrefixCache.open(path, layout=DENSE, **{**defaults, **options})


def numbers(seed: int = 0, blocks: int = BLOCKS) -> Entries:
    """Normally distributed numbers: their exponents compress."""
    rng = np.random.default_rng(seed)
    shape = (3, blocks * BLOCK, 64)
    return {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16).view(np.uint8) for name in "kv"
    }


def noise(seed: int = 0, blocks: int = BLOCKS) -> Entries:
    """Every bit pattern alike: nothing compresses."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, (3, blocks * BLOCK, 128), np.uint8) for name in "kv"}


def assert_same(found: Entries, expected: Entries) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def encoded(frames: Frames, entries: Entries, tokens: NDArray[np.uint32]) -> bytearray:
    header = replace(HEADER, block_tokens=frames.block_tokens)
    return frames.encode(header, tokens, frames.entries_source(entries), 0)


def decoded(frames: Frames, frame: bytearray, tokens: NDArray[np.uint32]) -> Entries | str:
    """The entries of a frame, or why it is none."""
    view, out = memoryview(frame), frames.empty(1)
    fault = frames.form_of(frame).head_fault(view, HEADER.block_hash, HEADER.parent_hash, tokens)
    fault = fault or frames.scatter(view, frames.entries_target(out), 0)
    return fault or out


# ---- a frame -------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, dict[str, str]]:
    """Groups of every float, compressed or not, beside ones that are packed already."""
    groups, formats = [], {}
    for number in range(draw(st.integers(1, 4))):
        entry_format = draw(st.sampled_from(["bf16", "f16", "f32", "u8", "nvfp4"]))
        group = LayerGroup(
            name=f"g{number}",
            layers=tuple(sorted(draw(st.sets(st.integers(0, 4), min_size=1)))),
            values=16 * draw(st.integers(1, 4)),
            entry_format=entry_format,
            tokens_per_entry=draw(st.sampled_from([1, 2])),
        )
        groups.append(group)
        if entry_format in WIDTHS and draw(st.booleans()):
            formats[group.name] = "zstd"
    if not formats:
        groups.append(LayerGroup(name="z", layers=(1,), values=16, entry_format="bf16"))
        formats["z"] = "zstd"
    return Layout(model="drawn", groups=tuple(groups)), formats


ODD = {
    "bf16": [0x7FC1, 0xFFFF, 0x7F81, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80],
    "f16": [0x7E01, 0xFFFF, 0x7C01, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00],
    "f32": [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000],
}
"""NaNs with payloads, signalling ones too, -0, subnormals and infinities, as bits."""


def filled(layout: Layout, frames: Frames, content: str, seed: int) -> Entries:
    rng = np.random.default_rng(seed)
    found = frames.empty(1)
    for group in layout.global_groups:
        array = found[group.name]
        if content == "noise" or group.entry_format not in WIDTHS:
            array[...] = rng.integers(0, 256, array.shape, np.uint8)
            continue
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
        values = array.view(dtype[group.entry_format])
        values[...] = 0 if content == "zeros" else rng.standard_normal(values.shape)
        bits = array.view(f"u{WIDTHS[group.entry_format]}")
        if content == "odd":
            spots = rng.random(bits.shape) < 0.3
            bits[spots] = rng.choice(np.array(ODD[group.entry_format], bits.dtype), spots.sum())
    return found


@given(
    drawn=layouts(),
    block=st.sampled_from([2, 48, 64, 128, 192]),
    content=st.sampled_from(["normal", "odd", "zeros", "noise"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, derandomize=True, max_examples=120)
def test_every_bit_comes_back(
    drawn: tuple[Layout, dict[str, str]], block: int, content: str, seed: int
) -> None:
    layout, formats = drawn
    frames = AtRestFormat(layout, block, Packing(formats))
    entries, tokens = filled(layout, frames, content, seed), tokens_of(block, seed)
    frame = encoded(frames, entries, tokens)
    found = decoded(frames, frame, tokens)
    assert not isinstance(found, str), found
    assert_same(found, entries)
    form = frames.form_of(frame)
    header = form.header(memoryview(frame))
    assert header is not None
    assert header.is_compressed == form.is_compressed == (len(frame) < frames.frame_bytes)
    assert not header.is_packed
    assert header.error == 0
    if form.is_compressed:  # else it is the frame of a store without options
        assert len(frame) <= frames.frame_bytes - PAGE
    else:
        plain = FrameFormat(layout, block)
        assert frame == encoded(plain, entries, tokens)
    if content == "noise":
        assert not form.is_compressed


def test_what_is_left_is_what_the_entropy_of_the_exponents_says() -> None:
    frames = AtRestFormat(DENSE, BLOCK, Packing(ZSTD))
    entries = numbers(blocks=1)
    frame = encoded(frames, entries, tokens_of(BLOCK))
    tops = np.concatenate([array.reshape(-1)[1::2] for array in entries.values()])
    shares = np.bincount(tops, minlength=256) / len(tops)
    entropy = -float(np.sum(shares[shares > 0] * np.log2(shares[shares > 0]))) / 8
    bound = len(tops) * (1 + entropy)
    assert bound < len(frame) - frames.lossless.payload_offset < 1.05 * bound


def test_a_page_must_be_saved() -> None:
    """From one compressible token to the next a block is plain until it saves 4096 bytes."""
    frames = AtRestFormat(DENSE, BLOCK, Packing(ZSTD))
    sizes = set()
    for tokens in range(0, BLOCK + 1, 2):
        entries = noise(blocks=1)
        for name, array in numbers(blocks=1).items():
            entries[name][:, :tokens] = array[:, :tokens]
        frame = encoded(frames, entries, tokens_of(BLOCK))
        found = decoded(frames, frame, tokens_of(BLOCK))
        assert not isinstance(found, str)
        assert_same(found, entries)
        sizes.add(frames.frame_bytes - len(frame))
    assert 0 in sizes
    assert min(sizes - {0}) < 1.2 * PAGE
    assert min(sizes - {0}) >= PAGE


def test_what_is_compressed_is_exact_beside_what_is_packed() -> None:
    formats = {"k": "zstd", "v": "nvfp4"}
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(formats, 0.3)), tokens_of(BLOCK)
    entries = numbers(blocks=1)
    frame = encoded(frames, entries, tokens)
    form = frames.form_of(frame)
    assert (form.is_packed, form.is_compressed) == (True, True)
    assert 0.05 < form.error_of(frame) < 0.15
    found = decoded(frames, frame, tokens)
    assert not isinstance(found, str)
    assert_same({"k": found["k"]}, {"k": entries["k"]})
    whole = AtRestFormat(DENSE, BLOCK, Packing({"v": "nvfp4"}, 0.3))
    packed = decoded(whole, encoded(whole, entries, tokens), tokens)
    assert not isinstance(packed, str)
    assert_same({"v": found["v"]}, {"v": packed["v"]})
    # Above the budget the block is lossless, and K is compressed all the same.
    entries["v"].view(ml_dtypes.bfloat16)[0, 0, 0] = np.nan
    frame = encoded(frames, entries, tokens)
    form = frames.form_of(frame)
    assert (form.is_packed, form.is_compressed) == (False, True)
    found = decoded(frames, frame, tokens)
    assert not isinstance(found, str)
    assert_same(found, entries)


# ---- damage and hostile bytes --------------------------------------------------------------------


@pytest.mark.parametrize("formats", [ZSTD, {"k": "zstd", "v": "nvfp4"}])
def test_a_flipped_bit_anywhere_is_seen(formats: dict[str, str]) -> None:
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(formats)), tokens_of(BLOCK)
    good = encoded(frames, numbers(blocks=1), tokens)
    assert frames.form_of(good).is_compressed
    head = frames.form_of(good).payload_offset
    spots = {*range(head + 16), *range(head, len(good), 97), *range(len(good) - 16, len(good))}
    seen = set()
    for at in sorted(spots):
        frame = bytearray(good)
        frame[at] ^= 1 << at % 8
        found = decoded(frames, frame, tokens)
        assert isinstance(found, str), at
        seen.add((at >= head, found))
        assert not frames.form_of(frame).is_payload_intact(memoryview(frame)) or at < head
    assert seen == {(False, "header"), (True, "checksum")}


def test_a_frame_cut_anywhere_is_seen() -> None:
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(ZSTD)), tokens_of(BLOCK)
    good = encoded(frames, numbers(blocks=1), tokens)
    for size in [0, 1, 111, 112, 400, *range(len(good) - 20_000, len(good), 511)]:
        assert isinstance(decoded(frames, good[:size], tokens), str), size
    assert isinstance(decoded(frames, good + b"\0" * PAGE, tokens), str)


def hostile(frames: AtRestFormat, good: bytearray, stream: bytes) -> bytearray:
    """A frame with other compressed bytes whose own checksum is right."""
    count = frames.payload_bytes // 2
    frame = bytearray(good[: frames.lossless.payload_offset + 8 + count]) + stream
    start = frames.lossless.payload_offset
    struct.pack_into("<Q", frame, start, xxhash.xxh3_64_intdigest(frame[start + 8 :]))
    return frame


def window_of(size: int, log: int) -> bytes:
    """A stream of zeros that asks for a window, as one who writes in pieces makes it."""
    asked = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=asked).compressobj()
    return packer.compress(bytes(size)) + packer.flush()


def streams(tops: bytes) -> dict[str, bytes]:
    made = zstandard.ZstdCompressor().compress
    dictionary = zstandard.ZstdCompressionDict(bytes(range(256)) * 8, dict_type=0)
    trained = zstandard.train_dictionary(
        2048, [bytes([n % 7, n % 5, n % 3] * 50) for n in range(300)]
    )
    right = made(tops)
    return {
        "empty": b"",
        "no zstd": bytes(range(64)),
        "only its magic": right[:4],
        "cut short": right[:-1],
        "too short": made(tops[:-1]),
        "of nothing": made(b""),
        "too long": made(tops + b"\0"),
        "other bytes": made(bytes(len(tops))),
        "a bomb": made(bytes(1 << 26)),
        "a bomb in pieces": window_of(1 << 26, 17),
        "a window of 128 MiB": window_of(1 << 20, 27),
        "a skippable frame": struct.pack("<II", 0x184D2A50, 16) + bytes(16),
        "a dictionary's": zstandard.ZstdCompressor(dict_data=trained).compress(tops),
        "a raw dictionary's": zstandard.ZstdCompressor(dict_data=dictionary).compress(
            bytes(range(256)) * 96
        ),
        "two halves": made(tops[: len(tops) // 2]) + made(tops[len(tops) // 2 :]),
    }


NAMES = list(streams(bytes(3 * 1024)))


@pytest.mark.parametrize("name", NAMES)
def test_hostile_bytes_with_right_checksums_are_a_miss(name: str) -> None:
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(ZSTD)), tokens_of(BLOCK)
    entries = numbers(blocks=1)
    good = encoded(frames, entries, tokens)
    tops = numbers_tops(frames, entries)
    frame = hostile(frames, good, streams(tops)[name])
    form = frames.form_of(frame)
    assert isinstance(form, CompressedFormat)
    assert form.head_fault(memoryview(frame), HEADER.block_hash, HEADER.parent_hash, tokens) is None
    assert decoded(frames, frame, tokens) == "checksum"
    assert not form.is_payload_intact(memoryview(frame))
    # What zstd holds on to is a context and a window, and not what a stream asks for.
    assert form._tops._buffers.decompressor.memory_size() < 1 << 20


def numbers_tops(frames: AtRestFormat, entries: Entries) -> bytes:
    """The highest bytes of a block's payload, in its order."""
    plain = encoded(frames.lossless, entries, tokens_of(BLOCK))
    return bytes(plain[frames.lossless.payload_offset + 1 :: 2])


@pytest.mark.parametrize("level", [-1, 1, 9, 19])
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_another_writer_compresses_is_read(level: int, is_whole: bool) -> None:
    """Any zstd stream of the right content whose window is at most 128 KiB will do."""
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(ZSTD)), tokens_of(BLOCK)
    entries = numbers(blocks=1)
    tops = numbers_tops(frames, entries)
    asked = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=17, write_checksum=True, write_content_size=is_whole
    )
    packer = zstandard.ZstdCompressor(compression_params=asked)
    if is_whole:
        stream = packer.compress(tops)
    else:
        pieces = packer.compressobj()
        stream = b"".join(
            pieces.compress(tops[at : at + 1000]) + pieces.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            for at in range(0, len(tops), 1000)
        )
        stream += pieces.flush()
    good = encoded(frames, entries, tokens)
    found = decoded(frames, hostile(frames, good, stream), tokens)
    assert not isinstance(found, str), found
    assert_same(found, entries)


def test_nothing_is_decompressed_before_its_checksum_held(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, tokens = AtRestFormat(DENSE, BLOCK, Packing(ZSTD)), tokens_of(BLOCK)
    frame = encoded(frames, numbers(blocks=1), tokens)
    form = frames.form_of(frame)
    assert isinstance(form, CompressedFormat)
    calls = []

    class Watched:
        def stream_reader(self, source: memoryview) -> Any:
            calls.append(len(source))
            return zstandard.ZstdDecompressor().stream_reader(source)

    monkeypatch.setattr(form._tops._buffers, "decompressor", Watched())
    assert not isinstance(decoded(frames, frame, tokens), str)
    assert len(calls) == 1
    frame[-1] ^= 1
    assert decoded(frames, frame, tokens) == "checksum"
    assert len(calls) == 1


def test_a_frame_says_its_form_and_no_other_form_takes_it() -> None:
    tokens, entries = tokens_of(BLOCK), numbers(blocks=1)
    frames = AtRestFormat(DENSE, BLOCK, Packing(ZSTD))
    frame = encoded(frames, entries, tokens)
    assert frame[6] == 4
    for flags in range(256):
        other = bytearray(frame)
        other[6] = flags
        found = decoded(frames, other, tokens)
        assert isinstance(found, str) == (flags != 4), flags
    for stranger in (FrameFormat(DENSE, BLOCK), AtRestFormat(DENSE, BLOCK, Packing({"k": "fp8"}))):
        assert decoded(stranger, frame, tokens) == "header"
    # A store for other groups has the same flag; it splits elsewhere, and the sums do not agree.
    half = AtRestFormat(DENSE, BLOCK, Packing({"k": "zstd"}))
    assert decoded(half, frame, tokens) == "checksum"


def test_threads_do_not_share_their_room() -> None:
    frames = AtRestFormat(DENSE, BLOCK, Packing(ZSTD))
    blocks = [numbers(seed, 1) for seed in range(4)]
    made: list[bytearray] = []
    wrong: list[str] = []

    def work(seed: int) -> None:
        tokens = tokens_of(BLOCK, seed)
        for _ in range(60):
            frame = encoded(frames, blocks[seed], tokens)
            made.append(frame)
            found = decoded(frames, frame, tokens)
            if isinstance(found, str) or any((found[g] != blocks[seed][g]).any() for g in "kv"):
                wrong.append(f"{seed}: {found if isinstance(found, str) else 'other entries'}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), wrong) == (240, [])


# ---- a store -------------------------------------------------------------------------------------


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    for name, array in noise().items():  # blocks 1 and 4 do not compress
        for n in (1, 4):
            entries[name][:, n * BLOCK : (n + 1) * BLOCK] = array[:, n * BLOCK : (n + 1) * BLOCK]
    with open_compressed(tmp_path / "s", device_bytes="1MiB") as cache:
        assert cache.store(tokens[:-1], entries).end == BLOCKS * BLOCK
        cache.flush()
        with cache.lookup(tokens) as match:
            assert_same(dict(cache.read(match)), entries)
        counters = cache.stats()["counters"]
        assert (counters["compressed_blocks"], counters["packed_blocks"]) == (4, 0)
        records = {r.number: r for _, r in writer_of(cache).ssd.records()}
        assert {n for n, r in records.items() if not r.is_compressed} == {1, 4}
        assert records[0].frame_bytes < 0.75 * records[1].frame_bytes
    with open_compressed(tmp_path / "s", device_bytes="1MiB") as cache:  # after a restart
        with cache.lookup(tokens) as match:
            assert_same(dict(cache.read(match)), entries)
            pages = cache.load(match)
            rows = cache.device.gather(pages, "v", 1, None, "bfloat16")
            pages.release()
        bits = rows[0].contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(bits, entries["v"][1])
    with open_compressed(tmp_path / "s", role="reader") as cache, cache.lookup(tokens) as match:
        assert_same(dict(cache.read(match)), entries)


def test_a_damaged_block_shortens_the_hit(tmp_path: Path) -> None:
    path, tokens = tmp_path / "s", tokens_of(TOKENS)
    with open_compressed(path) as cache:
        cache.store(tokens[:-1], numbers())
        cache.flush()
        record = writer_of(cache).ssd.record(cache.probe(tokens).prefix.key(3))
        assert record is not None
        assert record.is_compressed
    with (path / "data.mdb").open("r+b") as file:
        file.seek(record.page * PAGE + 16 + record.frame_bytes - 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    assert admin.verify_store(path, nothing)["bad_blocks"] == 1
    with open_compressed(path) as cache, cache.lookup(tokens) as match:
        assert match.hit_tokens == BLOCKS * BLOCK
        found = cache.read(match)
        assert found.tokens == 3 * BLOCK
        assert_same(dict(found), {g: a[:, : 3 * BLOCK] for g, a in numbers().items()})
        assert cache.stats()["counters"]["corrupt_blocks"]["checksum"] == 1


def test_a_check_sees_what_a_read_would() -> None:
    frames = AtRestFormat(DENSE, BLOCK, Packing(ZSTD))
    tokens, entries = tokens_of(BLOCK), numbers(blocks=1)
    good = encoded(frames, entries, tokens)
    key = BlockKey(b"h" * 16)
    assert frame_fault(frames, memoryview(good), key, keys_root=None) == "identity"  # of no tokens
    bad = hostile(frames, good, streams(numbers_tops(frames, entries))["other bytes"])
    assert frame_fault(frames, memoryview(bad), key, keys_root=None) == "checksum"


def test_a_mixed_store_moves_and_is_compacted(tmp_path: Path) -> None:
    path, target, file = tmp_path / "s", tmp_path / "t", tmp_path / "a.tar.zst"
    formats: dict[str, Any] = {"ssd_formats": {"k": "zstd", "v": "nvfp4"}, "error_budget": 0.3}
    prompts = [tokens_of(TOKENS, seed) for seed in range(3)]
    contents = [numbers(1), noise(2), numbers(3)]
    contents[2]["v"].view(ml_dtypes.bfloat16)[:, :, 0] = np.inf  # lossless, with K compressed
    with open_compressed(path, **formats) as cache:
        for tokens, entries in zip(prompts, contents, strict=True):
            cache.store(tokens[:-1], entries)
        cache.flush()
        before = [dict(cache.read(cache.lookup(tokens))) for tokens in prompts]
        assert_same({"k": before[0]["k"]}, {"k": contents[0]["k"]})
        assert_same(before[1], contents[1])
        assert_same(before[2], contents[2])
    found = admin.store_stats(path)
    assert (found["packed_blocks"], found["lossless_blocks"]) == (6, 12)
    assert found["compressed_blocks"] == 12
    assert found["ssd_formats"] == formats["ssd_formats"]
    upkeep_of.compact(path)
    assert export_store(path, file, (), nothing)["bad_blocks"] == 0
    assert import_store(file, target, "8MiB", nothing)["imported_blocks"] == 18
    for place in (path, target):
        assert admin.verify_store(place, nothing)["bad_blocks"] == 0
        assert admin.store_stats(place)["compressed_blocks"] == 12
        with open_compressed(place, **formats) as cache:
            for tokens, old in zip(prompts, before, strict=True):
                assert_same(dict(cache.read(cache.lookup(tokens))), old)


def test_at_the_cap_all_sizes_live_together(tmp_path: Path) -> None:
    rng, cap = np.random.default_rng(5), 2 << 20
    with open_compressed(tmp_path / "s", ssd_bytes=cap) as cache:
        for round_ in range(20):
            tokens, entries = tokens_of(TOKENS, round_ + 100), numbers(round_)
            for n in np.flatnonzero(rng.integers(0, 2, BLOCKS)):
                for name, array in noise(round_, 1).items():
                    entries[name][:, n * BLOCK : (n + 1) * BLOCK] = array
            assert cache.store(tokens[:-1], entries, wait=60).dropped == 0
            cache.flush()
            with cache.lookup(tokens) as match:
                assert_same(dict(cache.read(match)), entries)
            assert (tmp_path / "s" / "data.mdb").stat().st_size <= cap
        counters = cache.stats()["counters"]
        assert counters["evicted_blocks"]["ssd"] > 0
        assert counters["write_errors"] == 0


def test_a_store_is_compressed_in_one_way_for_good(tmp_path: Path) -> None:
    with open_compressed(tmp_path / "s"):
        pass
    text = (tmp_path / "s" / "VERSION").read_text(encoding="utf-8")
    assert json.loads(text.splitlines()[1])["ssd_formats"] == ZSTD
    for formats in (None, {"k": "zstd"}, {"k": "zstd", "v": "nvfp4"}):
        with pytest.raises(LayoutMismatch, match="ssd_formats"):
            open_compressed(tmp_path / "s", ssd_formats=formats)
    with open_compressed(tmp_path / "s", ssd_formats="zstd"):  # one name for every group
        pass


def test_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """What a kvstore of before does with such a store, and this one with those to come."""
    with open_compressed(tmp_path / "s"):
        pass
    version = tmp_path / "s" / "VERSION"
    version.write_text(version.read_text(encoding="utf-8").replace("zstd", "zst9"))
    with pytest.raises(LayoutMismatch, match="zst9"):
        open_compressed(tmp_path / "s")
    with pytest.raises(StoreError, match="'k' cannot be stored as 'zst9', expected one of .*zstd"):
        admin.store_stats(tmp_path / "s")


@pytest.mark.parametrize("entry_format", ["u8", "nvfp4", "fp8"])
def test_only_floats_are_compressed(entry_format: str) -> None:
    group = LayerGroup(name="k", layers=(0,), values=64, entry_format=entry_format)
    with pytest.raises(
        ConfigError, match=f"is cached as {entry_format}, expected f32, f16 or bf16"
    ):
        AtRestFormat(Layout(model="m", groups=(group,)), BLOCK, Packing({"k": "zstd"}))


def test_stats_and_inspect_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, tokens = str(tmp_path / "s"), tokens_of(TOKENS)
    with open_compressed(tmp_path / "s") as cache:
        cache.store(tokens[:-1], numbers())
        cache.flush()
        key = cache.probe(tokens).prefix.key(1).hex()
    assert main(["stats", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compressed_blocks"] == BLOCKS
    assert found["ssd_bytes_per_token"] < 0.85 * found["bytes_per_token"]
    assert main(["stats", path]) == 0
    assert "compressed blocks" in capsys.readouterr().out
    assert main(["inspect", path, key, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_compressed"]
    assert found["fault"] is None
    assert main(["verify", path]) == 0


# ---- runs of frames ------------------------------------------------------------------------------


def runs_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames each call of C took, from here on."""
    taken: list[int] = []
    read = native.FrameReader.read

    def counted(self: native.FrameReader, *args: Any) -> int:
        taken.append(read(self, *args))
        return taken[-1]

    monkeypatch.setattr(native.FrameReader, "read", counted)
    return taken


def test_runs_of_packed_and_of_lossless_frames_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = 20
    tokens, entries = tokens_of(blocks * BLOCK + 1), numbers(blocks=blocks)
    wild = entries["k"].view(ml_dtypes.bfloat16)
    wild[0, [n * BLOCK for n in range(5, 12)] + [15 * BLOCK], 0] = np.nan  # lossless
    with open_compressed(tmp_path / "s", ssd_formats={"k": "nvfp4", "v": "mxfp4"}) as cache:
        cache.store(tokens[:-1], entries)
        cache.flush()
        with cache.lookup(tokens) as match:
            taken = runs_read(monkeypatch)
            found = dict(cache.read(match))
            assert taken == [5, 7, 3, 1, 4], "packed, lossless, packed, lossless, packed"
            monkeypatch.setattr(AtRestFormat, "readers", lambda *_: {})
            assert_same(found, dict(cache.read(match)))
            assert len(taken) == 5
        np.testing.assert_array_equal(
            found["k"][:, 5 * BLOCK : 12 * BLOCK], entries["k"][:, 5 * BLOCK : 12 * BLOCK]
        )


def test_a_bad_frame_in_a_run_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, entries = tokens_of(TOKENS), numbers()
    with open_compressed(tmp_path / "s", ssd_formats="fp8") as cache:
        cache.store(tokens[:-1], entries)
        cache.flush()
        record = writer_of(cache).ssd.record(cache.probe(tokens).prefix.key(4))
        assert record is not None
        assert record.is_packed
        with cache.lookup(tokens) as match:
            whole = dict(cache.read(match))
            with (tmp_path / "s" / "data.mdb").open("r+b") as file:
                file.seek(record.page * PAGE + 16 + record.frame_bytes - 1)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
            taken = runs_read(monkeypatch)
            found = cache.read(match)
            assert found.tokens == 4 * BLOCK
            assert taken == [4]
            assert_same(dict(found), {g: a[:, : 4 * BLOCK] for g, a in whole.items()})
        assert cache.stats()["counters"]["corrupt_blocks"]["checksum"] == 1
