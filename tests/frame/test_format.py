"""Frames: what goes in comes out, lies where the format says, and damage is seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import kvstore
from kvstore.codec import codec_for
from kvstore.codec.arrays import FLOATS, numpy_dtype
from kvstore.frame.at_rest import Packing, frames_of
from kvstore.frame.format import FrameFormat
from kvstore.frame.geometry import RESERVED_BYTES
from kvstore.frame.header import FORMAT_VERSION, HEADER_BYTES, Header
from kvstore.identity.block import BlockHash
from kvstore.layout import Layout, Lifetime
from tests.builders import layouts, mixed_layout, random_entries, random_tokens, tiny_layout

V41 = kvstore.layout("deepseek-v4.1-flash")
SMOLLM2 = kvstore.layout("smollm2-135m")
BLOCK = BlockHash(bytes(range(32)))
PARENT = BlockHash(bytes(range(100, 132)))
GOLDEN = Path(__file__).parents[1] / "golden"

Entries = Mapping[str, NDArray[np.uint8]]


def header_of(frames: FrameFormat, number: int = 5) -> Header:
    return Header(
        block_tokens=frames.block_tokens,
        number=number,
        namespace_id=7,
        payload_bytes=frames.payload_bytes,
        block_hash=BLOCK,
        parent_hash=PARENT,
        sequence=2**40 + 3,
    )


def made_frame(
    layout: Layout, block_tokens: int, seed: int = 0
) -> tuple[FrameFormat, bytearray, NDArray[np.uint32], dict[str, NDArray[np.uint8]]]:
    rng = np.random.default_rng(seed)
    frames = FrameFormat(layout, block_tokens)
    tokens = random_tokens(block_tokens, rng)
    entries = random_entries(layout, block_tokens, rng)
    frame = frames.encode(header_of(frames), tokens, frames.entries_source(entries), 0)
    return frames, frame, tokens, entries


def fault(frames: FrameFormat, frame: bytearray, tokens: NDArray[np.uint32]) -> str | None:
    return frames.fault(memoryview(frame), BLOCK, PARENT, tokens)


# ---- where bytes lie: an independent reading of the format ------------------------------------

PLANES = {  # bits of a value, and how many values share a scale
    "u8": (8, 0),
    "f16": (16, 0),
    "bf16": (16, 0),
    "f32": (32, 0),
    "nvfp4": (4, 16),
    "mxfp4": (4, 32),
    "mxfp8": (8, 32),
    "fp8": (8, 0),
}
ROW_SCALE = {"fp8": 4}
"""Bytes of the one scale of an entry, in formats that have one."""


def slow_payload(layout: Layout, block_tokens: int, entries: Entries, block: int) -> bytes:
    """The payload of a block, one entry and one plane at a time.

    Owner by owner; the entries of one ratio together; planar per 64 entries, or over the whole
    block where its entries are no multiple of 64.
    """
    kept = [group for group in layout.groups if group.lifetime is Lifetime.GLOBAL]
    out = bytearray()
    for owner in sorted({layer for group in kept for layer in group.layers}):
        owned = [group for group in kept if owner in group.layers]
        ratios = []
        for group in owned:
            if group.tokens_per_entry not in ratios:
                ratios.append(group.tokens_per_entry)
        for ratio in ratios:
            count = block_tokens // ratio
            unit = 64 if count % 64 == 0 else count
            for first in range(block * count, (block + 1) * count, unit):
                for group in owned:
                    if group.tokens_per_entry != ratio:
                        continue
                    rows = entries[group.name][group.layers.index(owner), first : first + unit]
                    bits, shared = PLANES[group.entry_format]
                    packed = group.values * bits // 8
                    for row in rows:
                        out += row[:packed].tobytes()
                    scales = group.values // shared if shared else ROW_SCALE.get(group.entry_format)
                    if scales:
                        for row in rows:
                            out += row[packed : packed + scales].tobytes()
    return bytes(out)


def test_a_v41_block_lies_owner_by_owner_and_planar_per_64_records() -> None:
    frames, frame, _, entries = made_frame(V41, 128)
    part = {owner: bytearray() for owner in (2, 8, 14, 20)}
    for position, owner in enumerate((2, 8, 14)):  # one unit of 64 pairs each
        main, index = entries["main_r2"][position], entries["index_r2"][position]
        part[owner] += main[:, :256].tobytes() + main[:, 256:].tobytes()
        part[owner] += index[:, :64].tobytes() + index[:, 64:].tobytes()
    for unit in (slice(0, 64), slice(64, 128)):  # owner 20 has two
        main, index = entries["main_r1"][0][unit], entries["index_r1"][0][unit]
        part[20] += main[:, :256].tobytes() + main[:, 256:].tobytes()
        part[20] += index[:, :64].tobytes() + index[:, 64:].tobytes()
    assert [len(piece) for piece in part.values()] == [22_784, 22_784, 22_784, 45_568]
    assert frame[frames.payload_offset :] == b"".join(part.values())


@pytest.mark.parametrize(
    ("layout", "block_tokens"),
    [
        (V41, 2),
        (V41, 32),
        (V41, 128),
        (V41, 130),
        (V41, 256),
        (SMOLLM2, 1),
        (SMOLLM2, 64),
        (SMOLLM2, 96),
        (mixed_layout(), 4),
        (mixed_layout(), 132),
        (mixed_layout(), 256),
        (tiny_layout(), 1),
        (tiny_layout(), 192),
    ],
    ids=lambda value: value.model if isinstance(value, Layout) else str(value),
)
def test_a_payload_is_what_a_slow_reading_of_the_format_gives(
    layout: Layout, block_tokens: int
) -> None:
    rng = np.random.default_rng(block_tokens)
    frames = FrameFormat(layout, block_tokens)
    entries = random_entries(layout, 3 * block_tokens, rng)
    tokens = random_tokens(block_tokens, rng)
    frame = frames.encode(header_of(frames), tokens, frames.entries_source(entries), 1)
    assert frame[frames.payload_offset :] == slow_payload(layout, block_tokens, entries, 1)


@given(layout=layouts(), multiple=st.integers(1, 40), blocks=st.integers(1, 3), data=st.data())
@settings(max_examples=150)
def test_any_layout_round_trips_and_lies_as_the_format_says(
    layout: Layout, multiple: int, blocks: int, data: st.DataObject
) -> None:
    block_tokens = layout.alignment * multiple
    block = data.draw(st.integers(0, blocks - 1))
    rng = np.random.default_rng(multiple)
    frames = FrameFormat(layout, block_tokens)
    entries = random_entries(layout, blocks * block_tokens, rng)
    tokens = random_tokens(block_tokens, rng)
    frame = frames.encode(header_of(frames), tokens, frames.entries_source(entries), block)
    assert frame[frames.payload_offset :] == slow_payload(layout, block_tokens, entries, block)
    assert frames.payload_bytes == layout.bytes_per_token * block_tokens
    assert fault(frames, frame, tokens) is None
    back = frames.empty(blocks)
    for array in back.values():
        array[...] = 0
    assert frames.scatter(memoryview(frame), frames.entries_target(back), block) is None
    for name, array in entries.items():
        count = frames.entries[name]
        mine = slice(block * count, (block + 1) * count)
        assert np.array_equal(back[name][:, mine], array[:, mine])
        others = np.delete(back[name], np.arange(mine.start, mine.stop), axis=1)
        assert not others.any(), "scatter wrote outside its block"


@pytest.mark.parametrize("block_tokens", [2, 32, 128, 130, 256])
def test_v41_blocks_of_any_even_size_round_trip(block_tokens: int) -> None:
    frames, frame, tokens, entries = made_frame(V41, block_tokens)
    assert frames.payload_bytes == 890 * block_tokens
    assert fault(frames, frame, tokens) is None
    back = frames.empty(1)
    assert frames.scatter(memoryview(frame), frames.entries_target(back), 0) is None
    assert all(np.array_equal(back[name], array) for name, array in entries.items())
    assert frames.header(memoryview(frame)) == header_of(frames)
    assert np.array_equal(frames.tokens(memoryview(frame)), tokens)


@pytest.mark.parametrize("block_tokens", [0, -2, 1, 129])
def test_v41_blocks_of_any_other_size_are_refused(block_tokens: int) -> None:
    with pytest.raises(kvstore.ConfigError, match=f"found {block_tokens}$"):
        FrameFormat(V41, block_tokens)


def test_entries_may_be_a_slice_of_a_larger_array() -> None:
    rng = np.random.default_rng(1)
    frames = FrameFormat(mixed_layout(), 8)
    tokens = random_tokens(8, rng)
    larger = random_entries(mixed_layout(), 32, rng)
    view = {name: array[:, frames.entries[name] :] for name, array in larger.items()}
    frame = frames.encode(header_of(frames), tokens, frames.entries_source(view), 1)
    assert frame == frames.encode(header_of(frames), tokens, frames.entries_source(larger), 2)


def test_a_v41_frame_needs_no_page_more_than_its_payload() -> None:
    frames = FrameFormat(V41, 128)
    assert frames.payload_bytes == 113_920
    assert -(-113_920 // 4096) == 28
    assert frames.frame_bytes <= 28 * 4096 - 16  # LMDB's own header on the first overflow page


def test_the_head_of_a_v41_frame_has_the_promised_sizes() -> None:
    frames, frame, tokens, _ = made_frame(V41, 128)
    assert HEADER_BYTES == 112
    assert frames.part_count == 4
    assert frames.payload_offset == 112 + 512 + 4 * 8 + RESERVED_BYTES
    assert frame[:4] == b"KVSB"
    assert frame[112 : 112 + 512] == tokens.astype("<u4").tobytes()
    assert frame[frames.payload_offset - RESERVED_BYTES : frames.payload_offset] == bytes(32)
    assert frames.part_bounds[0][0] == frames.payload_offset
    assert frames.part_bounds[-1][1] == frames.frame_bytes
    ends = [stop for _, stop in frames.part_bounds[:-1]]
    assert ends == [start for start, _ in frames.part_bounds[1:]]


# ---- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "block_tokens"), [(tiny_layout(), 2), (mixed_layout(), 4)], ids=["tiny", "mixed"]
)
def test_every_flipped_bit_of_a_frame_is_seen(layout: Layout, block_tokens: int) -> None:
    frames, frame, tokens, _ = made_frame(layout, block_tokens)
    seen = {"header": 0, "checksum": 0}
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        found = fault(frames, frame, tokens)
        assert found is not None, f"bit {bit} of {8 * len(frame)} went unseen"
        assert (found == "header") == (bit < 8 * frames.payload_offset)
        seen[found] += 1
        frame[bit // 8] ^= 1 << bit % 8
    assert seen == {"header": 8 * frames.payload_offset, "checksum": 8 * frames.payload_bytes}
    assert fault(frames, frame, tokens) is None


@pytest.mark.parametrize(
    ("layout", "block_tokens"), [(tiny_layout(), 2), (mixed_layout(), 4)], ids=["tiny", "mixed"]
)
def test_every_flipped_bit_of_a_payload_is_seen_as_it_is_handed_out(
    layout: Layout, block_tokens: int
) -> None:
    frames, frame, _, entries = made_frame(layout, block_tokens)
    back = frames.empty(3)
    for array in back.values():
        array[...] = 0xA5
    target = frames.entries_target(back)
    for bit in range(8 * frames.payload_offset, 8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        found = frames.scatter(memoryview(frame), target, 1)
        assert found == "checksum", f"bit {bit} of {8 * len(frame)} went unseen"
        frame[bit // 8] ^= 1 << bit % 8
    assert frames.scatter(memoryview(frame), target, 1) is None
    for name, array in back.items():
        count = frames.entries[name]
        assert np.array_equal(array[:, count : 2 * count], entries[name])
        assert (array[:, :count] == 0xA5).all()
        assert (array[:, 2 * count :] == 0xA5).all()


def test_a_wrong_checksum_of_any_part_is_seen_as_it_is_handed_out() -> None:
    frames, frame, _, _ = made_frame(V41, 2)
    target = frames.entries_target(frames.empty(1))
    for part in range(frames.part_count):
        at = frames.payload_offset - RESERVED_BYTES - 8 * (frames.part_count - part)
        frame[at] ^= 1
        assert frames.scatter(memoryview(frame), target, 0) == "checksum"
        frame[at] ^= 1
    assert frames.scatter(memoryview(frame), target, 0) is None


def test_swapped_parts_of_equal_size_are_seen() -> None:
    frames, frame, tokens, _ = made_frame(V41, 2)
    (a, b), (c, d) = frames.part_bounds[0], frames.part_bounds[1]
    frame[a:b], frame[c:d] = frame[c:d], frame[a:b]
    assert fault(frames, frame, tokens) == "checksum"


def test_a_frame_of_another_length_is_no_frame() -> None:
    frames, frame, tokens, _ = made_frame(mixed_layout(), 8)
    for wrong in (frame[:-1], frame + b"\0", bytearray(), frame[:HEADER_BYTES], frame + frame):
        assert fault(frames, wrong, tokens) == "header"
        assert frames.header(memoryview(wrong)) is None


@given(noise=st.binary(min_size=170, max_size=170))
def test_noise_is_no_frame(noise: bytes) -> None:
    frames = FrameFormat(tiny_layout(), 3)
    assert frames.frame_bytes == 112 + 12 + 8 + 32 + 3
    padded = bytearray((noise * 2)[: frames.frame_bytes])
    assert fault(frames, padded, np.zeros(3, np.uint32)) == "header"


def test_zeros_are_no_frame() -> None:
    frames = FrameFormat(tiny_layout(), 3)
    assert fault(frames, bytearray(frames.frame_bytes), np.zeros(3, np.uint32)) == "header"


def test_a_frame_of_another_format_version_is_no_frame() -> None:
    frames, frame, tokens, _ = made_frame(tiny_layout(), 2)
    frame[4:6] = (FORMAT_VERSION + 1).to_bytes(2, "little")
    frame[104:112] = frames.sum_head(frame).to_bytes(8, "little")
    assert fault(frames, frame, tokens) == "header"


def test_a_frame_with_unknown_flags_is_no_frame() -> None:
    frames, frame, tokens, _ = made_frame(tiny_layout(), 2)
    frame[6] = 2
    frame[104:112] = frames.sum_head(frame).to_bytes(8, "little")
    assert fault(frames, frame, tokens) == "header"


def test_whether_an_image_touches_the_block_is_part_of_the_header() -> None:
    frames, frame, tokens, _ = made_frame(tiny_layout(), 2)
    seen = replace(header_of(frames), has_images=True)
    plain = bytes(frame)
    frames.seal(frame, seen)
    assert fault(frames, frame, tokens) is None
    assert frames.header(memoryview(frame)) == seen
    differing = [at for at, (a, b) in enumerate(zip(plain, frame, strict=True)) if a != b]
    assert differing[0] == 6
    assert all(104 <= at < 112 for at in differing[1:]), "only the flag and the head checksum"


def test_a_frame_of_equal_size_and_another_block_size_is_no_frame() -> None:
    frames, frame, tokens, _ = made_frame(tiny_layout(), 2)
    frames.seal(frame, replace(header_of(frames), block_tokens=3))
    assert fault(frames, frame, tokens) == "header"


def test_another_blocks_frame_is_a_miss_by_identity() -> None:
    frames, frame, tokens, _ = made_frame(mixed_layout(), 4)
    view = memoryview(frame)
    other = BlockHash(bytes(32))
    assert frames.fault(view, other, PARENT, tokens) == "identity"
    assert frames.fault(view, BLOCK, other, tokens) == "identity"
    close = BlockHash(BLOCK[:31] + b"\xff")
    assert frames.fault(view, close, PARENT, tokens) == "identity"


def test_a_hash_collision_is_a_miss_because_token_ids_are_compared() -> None:
    frames, frame, tokens, _ = made_frame(mixed_layout(), 4)
    for place in range(4):
        wrong = tokens.copy()
        wrong[place] ^= 1
        assert fault(frames, frame, wrong) == "tokens"
    assert fault(frames, frame, tokens[:3]) == "tokens"


def test_checksums_cannot_see_a_payload_that_was_sealed_again() -> None:
    """What they protect against is damage. Whoever can write the store can forge it."""
    frames, frame, tokens, _ = made_frame(mixed_layout(), 4, seed=1)
    _, other, _, _ = made_frame(mixed_layout(), 4, seed=2)
    frame[frames.payload_offset :] = other[frames.payload_offset :]
    assert fault(frames, frame, tokens) == "checksum"
    frames.seal(frame, header_of(frames))
    assert fault(frames, frame, tokens) is None


def test_the_same_block_makes_the_same_frame() -> None:
    assert made_frame(mixed_layout(), 8)[1] == made_frame(mixed_layout(), 8)[1]


# ---- targets -----------------------------------------------------------------------------------

DTYPES = {"u8": "uint8", "f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@given(layout=layouts(), multiple=st.integers(1, 70), wide=st.sampled_from(FLOATS))
@settings(max_examples=60)
def test_numbers_of_any_layout_are_those_of_its_codecs(
    layout: Layout, multiple: int, wide: str
) -> None:
    block_tokens = layout.alignment * multiple
    frames, frame, _, entries = made_frame(layout, block_tokens)
    values, expected = {}, {}
    for group in layout.global_groups:
        dtype = DTYPES.get(group.entry_format, wide)
        shape = (len(group.layers), 2 * frames.entries[group.name], group.values)
        values[group.name] = np.zeros(shape, numpy_dtype(dtype))
        expected[group.name] = codec_for(group).decode(entries[group.name], dtype)
    target = frames.mixed_target({}, values)
    assert target.blocks == 2
    assert frames.scatter(memoryview(frame), target, 1) is None
    for name, array in values.items():
        count = frames.entries[name]
        assert array[:, count:].tobytes() == expected[name].tobytes()
        assert not array[:, :count].view(np.uint8).any()


def test_blocks_may_be_pages() -> None:
    frames, frame, _, entries = made_frame(V41, 128)
    pages = {
        name: np.zeros((3, array.shape[0], 2, *array.shape[1:]), np.uint8)[:, :, 1]
        for name, array in entries.items()
    }
    target = frames.entries_target(pages)
    assert target.blocks == 3
    assert frames.scatter(memoryview(frame), target, 2) is None
    for name, array in pages.items():
        assert np.array_equal(array[2], entries[name])
        assert not array[:2].any()


def test_a_target_has_room_for_whole_blocks_only() -> None:
    frames, frame, _, _ = made_frame(mixed_layout(), 4)
    entries = {name: array[:, :-1] for name, array in frames.empty(3).items()}
    target = frames.entries_target(entries)
    assert target.blocks == 2
    for block in (-1, 2):
        with pytest.raises(ValueError, match=rf"in \[0, 2\), found number {block}"):
            frames.scatter(memoryview(frame), target, block)


def test_a_frame_that_is_cut_short_is_not_read_beyond() -> None:
    frames, frame, _, _ = made_frame(mixed_layout(), 4)
    target = frames.entries_target(frames.empty(1))
    with pytest.raises(ValueError, match="lies outside"):
        frames.scatter(memoryview(frame)[:-1], target, 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda array: array[:, :, :-1], "must have shape"),
        (lambda array: array[:0], "must have shape"),
        (lambda array: array[0], "must have shape"),
        (lambda array: array.view(np.int8), "must have dtype uint8"),
        (np.asfortranarray, "contiguous along its last axis"),
        (lambda array: np.broadcast_to(array[:, :1], array.shape), "writable"),
        (lambda array: as_strided(array, array.shape, (1, 1, 1)), "overlaps itself"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused(
    spoil: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], message: str
) -> None:
    frames = FrameFormat(V41, 128)
    entries = frames.empty(2)
    entries["main_r2"] = spoil(entries["main_r2"])
    with pytest.raises(ValueError, match=message):
        frames.entries_target(entries)


def test_groups_of_a_target_may_not_share_memory() -> None:
    frames = FrameFormat(V41, 128)
    entries = frames.empty(1)
    entries["main_r1"] = np.zeros((1, 192, 288), np.uint8)[:, 64:]
    entries["index_r1"] = as_strided(entries["main_r1"], (1, 128, 68), (0, 68, 1))
    with pytest.raises(ValueError, match="main_r1 and index_r1 overlap in memory"):
        frames.entries_target(entries)


def test_numbers_have_a_dtype_that_their_format_unpacks_to() -> None:
    frames = FrameFormat(V41, 128)
    values = {
        group.name: np.zeros((len(group.layers), frames.entries[group.name], group.values), "f8")
        for group in V41.global_groups
    }
    with pytest.raises(ValueError, match="float32 or float16 or bfloat16, found float64"):
        frames.mixed_target({}, values)
    frames = FrameFormat(SMOLLM2, 1)
    own = SMOLLM2.global_groups[0].entry_format
    other = {
        group.name: np.zeros((len(group.layers), 1, group.values), np.float64)
        for group in SMOLLM2.global_groups
    }
    with pytest.raises(ValueError, match=f"dtype {DTYPES[own]}, found float64"):
        frames.mixed_target({}, other)


# ---- golden frames -----------------------------------------------------------------------------


def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("frame-*.json"))


def test_there_are_golden_frames_and_each_has_both_files() -> None:
    assert len(golden_names()) >= 4
    assert golden_names() == sorted(path.stem for path in GOLDEN.glob("frame-*.bin"))


@pytest.mark.parametrize("name", golden_names())
def test_a_golden_frame_decodes_to_the_values_it_was_made_of(name: str) -> None:
    known = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    frame = bytearray((GOLDEN / f"{name}.bin").read_bytes())
    assert hashlib.sha256(frame).hexdigest() == known["sha256"], "a golden file was edited"
    groups = [kvstore.LayerGroup(**{**g, "layers": tuple(g["layers"])}) for g in known["groups"]]
    layout = Layout(model="golden", groups=tuple(groups))
    assert layout.fingerprint == known["fingerprint"]
    if known["preset"]:
        assert kvstore.layout(known["preset"]).fingerprint == known["fingerprint"]
    at_rest = known.get("ssd_formats")
    frames = frames_of(
        layout, known["header"]["block_tokens"], Packing(at_rest) if at_rest else None
    )
    view = memoryview(frame)
    form = frames.form_of(frame)
    header = form.header(view)
    assert header is not None
    fields = {k: v.hex() if isinstance(v, bytes) else v for k, v in asdict(header).items()}
    # What was not there yet when the file was made: it has the value of what is not used.
    later = {"has_images": False, "is_packed": False, "error": 0.0, "is_compressed": False}
    assert fields == later | known["header"]
    tokens = np.array(known["tokens"], np.uint32)
    assert np.array_equal(form.tokens(view), tokens)
    assert form.fault(view, header.block_hash, header.parent_hash, tokens) is None
    entries = frames.empty(1)
    assert frames.scatter(view, frames.entries_target(entries), 0) is None
    for group, facts in known["entries"].items():
        array = entries[group]
        assert list(array.shape) == facts["shape"]
        assert array[0, 0].tobytes().hex() == facts["first"]
        assert array[-1, -1].tobytes().hex() == facts["last"]
        assert hashlib.sha256(array.tobytes()).hexdigest() == facts["sha256"]
    if not form.is_compressed:  # what zstd writes is up to its version, what it reads is not
        assert frames.encode(header, tokens, frames.entries_source(entries), 0) == frame


# ---- many at once --------------------------------------------------------------------------------

CHAIN = [bytes([number]) * 32 for number in range(7)]
"""Hashes of a root and six blocks."""


def chain_of_frames(frames: FrameFormat, directory: Path) -> tuple[Path, Any, Any]:
    """Write six frames of a chain to a file, with gaps; return it, the entries and the token ids."""
    rng = np.random.default_rng(3)
    entries = random_entries(frames.layout, 6 * frames.block_tokens, rng)
    tokens = random_tokens(6 * frames.block_tokens, rng)
    source, path = frames.entries_source(entries), directory / "frames"
    with path.open("wb") as file:
        for n in range(6):
            header = replace(
                header_of(frames),
                number=n,
                has_images=n == 3,
                parent_hash=BlockHash(CHAIN[n]),
                block_hash=BlockHash(CHAIN[n + 1]),
            )
            ids = tokens[n * frames.block_tokens : (n + 1) * frames.block_tokens]
            file.write(b"gap" + frames.encode(header, ids, source, n))
    return path, entries, tokens


def read_many(frames: FrameFormat, path: Path, tokens: Any, room: Any) -> int:
    reader = frames.reader(frames.entries_target(room))
    assert reader is not None
    offsets = 3 + np.arange(6, dtype=np.int64) * (frames.frame_bytes + 3)
    with path.open("rb") as file:
        return reader.read(file.fileno(), offsets, b"".join(CHAIN), tokens, 0)


@pytest.mark.parametrize(
    ("layout", "block_tokens"), [(V41, 128), (mixed_layout(), 8), (mixed_layout(), 256)]
)
def test_frames_read_together_are_those_read_one_by_one(
    tmp_path: Path, layout: Layout, block_tokens: int
) -> None:
    frames = FrameFormat(layout, block_tokens)
    path, entries, tokens = chain_of_frames(frames, tmp_path)
    room = frames.empty(6)
    assert read_many(frames, path, tokens, room) == 6
    for name, array in entries.items():
        np.testing.assert_array_equal(room[name], array)


def test_reading_together_stops_at_what_reading_one_by_one_refuses(tmp_path: Path) -> None:
    """Every byte of a frame, flipped: neither way of reading takes it, and none before suffers."""
    frames = FrameFormat(mixed_layout(), 8)
    path, entries, tokens = chain_of_frames(frames, tmp_path)
    data = path.read_bytes()
    at = 2 * (frames.frame_bytes + 3) + 3
    for byte in range(frames.frame_bytes):
        bad = bytearray(data)
        bad[at + byte] ^= 1 << byte % 8
        path.write_bytes(bad)
        room = frames.empty(6)
        assert read_many(frames, path, tokens, room) == 2, byte
        frame = memoryview(bad)[at : at + frames.frame_bytes]
        ids = tokens[16:24]
        assert frames.fault(frame, BlockHash(CHAIN[3]), BlockHash(CHAIN[2]), ids) is not None
        for name, array in entries.items():
            good = 2 * frames.entries[name]
            np.testing.assert_array_equal(room[name][:, :good], array[:, :good])


@pytest.mark.parametrize("size", [0, 1, 3])
def test_reading_together_stops_where_the_file_ends(tmp_path: Path, size: int) -> None:
    frames = FrameFormat(mixed_layout(), 8)
    path, _, tokens = chain_of_frames(frames, tmp_path)
    path.write_bytes(path.read_bytes()[: size * (frames.frame_bytes + 3) + 2])
    assert read_many(frames, path, tokens, frames.empty(6)) == size


def test_other_hashes_ids_and_formats_are_not_taken(tmp_path: Path) -> None:
    frames = FrameFormat(mixed_layout(), 8)
    path, _, tokens = chain_of_frames(frames, tmp_path)
    for place in (0, 17, 47):
        other = tokens.copy()
        other[place] ^= 1
        assert read_many(frames, path, other, frames.empty(6)) == place // 8
    marked = FrameFormat(mixed_layout(), 8, is_packed=True)
    assert read_many(marked, path, tokens, marked.empty(6)) == 0
    reader = frames.reader(frames.entries_target(frames.empty(6)))
    assert reader is not None
    with path.open("rb") as file, pytest.raises(ValueError, match="of hashes and 40 ids for 6"):
        reader.read(file.fileno(), np.zeros(6, np.int64), b"".join(CHAIN), tokens[:40], 0)


@pytest.mark.parametrize(
    ("layout", "block_tokens"), [(V41, 128), (mixed_layout(), 8), (mixed_layout(), 256)]
)
def test_waves_together_are_the_whole_and_each_is_read_alone(
    tmp_path: Path, layout: Layout, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of other part_batches are neither read nor missed: they may be damaged."""
    monkeypatch.setattr("kvstore.frame.geometry.PART_BATCH_BLOCK_BYTES", 1)
    frames = FrameFormat(layout, block_tokens)
    path, entries, tokens = chain_of_frames(frames, tmp_path)
    part_batches = frames.part_batches(1 << 30)
    assert len(part_batches) == frames.part_count > 1
    assert [layer for batch in part_batches for layer in batch.layers] == list(frames.whole.layers)
    assert frames.part_batches(0) == (frames.whole,)
    data = path.read_bytes()
    for batch in part_batches:
        other = bytearray(data)
        for number in range(6):
            at = 3 + number * (frames.frame_bytes + 3)
            for place in range(at + frames.payload_offset, at + frames.frame_bytes):
                if not batch.bounds[0] <= place - at < batch.bounds[1]:
                    other[place] ^= 0x55
        path.write_bytes(other)
        room = frames.empty(6, batch)
        reader = frames.reader(frames.entries_target(room, batch))
        assert reader is not None
        offsets = 3 + np.arange(6, dtype=np.int64) * (frames.frame_bytes + 3)
        with path.open("rb") as file:
            assert reader.read(file.fileno(), offsets, b"".join(CHAIN), tokens, 0) == 6
        again = frames.empty(6, batch)
        for number in range(6):
            frame = memoryview(other)[offsets[number] : offsets[number] + frames.frame_bytes]
            assert frames.scatter(frame, frames.entries_target(again, batch), number) is None
        for group in frames.layout.global_groups:
            rows = [at for at, layer in enumerate(group.layers) if layer in batch.layers]
            np.testing.assert_array_equal(room[group.name], entries[group.name][rows])
            np.testing.assert_array_equal(again[group.name], entries[group.name][rows])
        for place in {batch.bounds[0], batch.bounds[1] - 1}:
            bad = bytearray(other)
            bad[offsets[4] + place] ^= 1
            path.write_bytes(bad)
            with path.open("rb") as file:
                assert reader.read(file.fileno(), offsets, b"".join(CHAIN), tokens, 0) == 4
    path.write_bytes(data)


def test_blocks_lie_apart_and_a_bad_one_leaves_its_place_alone(tmp_path: Path) -> None:
    """Every byte of a frame, flipped; only the parent is any, where it is not asked for."""
    group = kvstore.LayerGroup(name="b", layers=(0,), values=257, entry_format="u8")
    layout = Layout(model="keyed", groups=(group,))
    frames = FrameFormat(layout, 3)
    path, entries, tokens = chain_of_frames(frames, tmp_path)
    blocks = list(entries["b"][0].reshape(6, -1))
    source = frames.apart_source([block.copy() for block in blocks])
    data = path.read_bytes()
    offsets = 3 + np.arange(6, dtype=np.int64) * (frames.frame_bytes + 3)
    for number in range(6):
        frame = memoryview(data)[offsets[number] : offsets[number] + frames.frame_bytes]
        header = frames.header(frame)
        assert header is not None
        again = frames.encode(header, tokens[3 * number : 3 * number + 3], source, number)
        assert bytes(again) == bytes(frame)
    memory = np.full((13, frames.payload_bytes), 0xA5, np.uint8)
    order = [7, 1, 11, 3, 5, 9]
    reader = frames.reader(
        frames.apart_target([memory[n] for n in order]), any_parent=True, checks_first=True
    )
    assert reader is not None
    hashes = b"any".ljust(32) + b"".join(CHAIN[1:])
    with path.open("rb") as file:
        assert reader.read(file.fileno(), offsets, hashes, tokens, 0) == 6
        for number, place in enumerate(order):
            np.testing.assert_array_equal(memory[place], blocks[number])
        assert (np.delete(memory, order, axis=0) == 0xA5).all()
        with pytest.raises(ValueError, match="room for 6 blocks, found 6 from 1 on"):
            reader.read(file.fileno(), offsets, hashes, tokens, 1)
        parent = range(64, 96)
        for byte in range(frames.frame_bytes):
            bad = bytearray(data)
            bad[offsets[2] + byte] ^= 0x10
            path.write_bytes(bad)
            memory[:] = 0xA5
            assert reader.read(file.fileno(), offsets, hashes, tokens, 0) == 2, byte
            assert (memory[order[2:]] == 0xA5).all(), byte
        for byte in parent:  # another parent, in an intact frame
            bad = bytearray(data[offsets[2] : offsets[2] + frames.frame_bytes])
            bad[byte] ^= 0x10
            frames.renumber(bad, 0)
            path.write_bytes(data[: offsets[2]] + bad + data[offsets[2] + frames.frame_bytes :])
            assert reader.read(file.fileno(), offsets, hashes, tokens, 0) == 6
    with pytest.raises(ValueError, match="block 1"):
        frames.apart_target([memory[0], memory[1, :-1]])


def test_places_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    frames = FrameFormat(mixed_layout(), 8)
    path, _, tokens = chain_of_frames(frames, tmp_path)
    reader = frames.reader(frames.entries_target(frames.empty(5)))
    assert reader is not None
    with path.open("rb") as file, pytest.raises(ValueError, match="for 5 blocks, found 6 from 0"):
        reader.read(file.fileno(), np.zeros(6, np.int64), b"".join(CHAIN), tokens, 0)
