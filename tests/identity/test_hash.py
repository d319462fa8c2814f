"""Identity: what must agree before a block is reused, and that it always spells the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from _kvstore_native import lib
from hypothesis import given
from hypothesis import strategies as st

from kvstore import ImageSpan
from kvstore.errors import ConfigError
from kvstore.identity.block import KEY_BYTES, BlockHash, block_key
from kvstore.identity.hash import (
    HashRun,
    _plain_hashes,
    as_tokens,
    block_hashes,
    identify,
    namespace_digest,
)
from kvstore.identity.namespace import Namespace
from tests.builders import ROOT, hashes_of

NAMESPACE = Namespace(model="m", weights="w", tokenizer="t", adapter="a", tenant="s", generation=1)
FINGERPRINT = "f" * 64


def root_of(namespace: Namespace, fingerprint: str = FINGERPRINT, block_tokens: int = 128) -> bytes:
    return namespace_digest(fingerprint, block_tokens, namespace)


def with_images(*images: ImageSpan, tokens: int = 24, block_tokens: int = 8) -> list[BlockHash]:
    return list(block_hashes(ROOT, as_tokens([7] * tokens), block_tokens, images))


# ---- namespaces --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, model="m2"),
        replace(NAMESPACE, weights="w2"),
        replace(NAMESPACE, tokenizer="t2"),
        replace(NAMESPACE, adapter="a2"),
        replace(NAMESPACE, adapter=None),
        replace(NAMESPACE, adapter=""),
        replace(NAMESPACE, tenant="s2"),
        replace(NAMESPACE, generation=2),
        replace(NAMESPACE, generation=2**32 + 1),
        replace(NAMESPACE, generation=2**64 - 1),
    ],
    ids=str,
)
def test_every_field_of_a_namespace_changes_the_root(other: Namespace) -> None:
    assert root_of(other) != root_of(NAMESPACE)


def test_layout_and_block_size_change_the_root() -> None:
    roots = {
        root_of(NAMESPACE),
        root_of(NAMESPACE, fingerprint="e" * 64),
        root_of(NAMESPACE, block_tokens=129),
        root_of(NAMESPACE, block_tokens=128 + 2**32),
    }
    assert len(roots) == 4


def test_no_adapter_an_empty_adapter_and_one_called_none_are_three() -> None:
    adapters = [None, "", "None", "n", "s", "\0"]
    roots = {root_of(replace(NAMESPACE, adapter=adapter)) for adapter in adapters}
    assert len(roots) == len(adapters)


def test_text_never_moves_from_one_field_to_the_next() -> None:
    shifted = [
        Namespace(model="ab", weights="c"),
        Namespace(model="a", weights="bc"),
        Namespace(model="abc"),
        Namespace(model="", weights="abc"),
        Namespace(model="", tokenizer="abc"),
        Namespace(model="", adapter="abc"),
        Namespace(model="", tenant="abc"),
        Namespace(model="ab", tokenizer="c"),
        Namespace(model="aWsb"),
        Namespace(model="a", weights="b"),
        Namespace(model="a\0\0\0\0\0\0\0", weights="b"),
    ]
    assert len({root_of(namespace) for namespace in shifted}) == len(shifted)


names = st.text("ab\0Wsn", max_size=4)
namespaces = st.builds(
    Namespace,
    model=names,
    weights=names,
    tokenizer=names,
    adapter=st.none() | names,
    tenant=names,
    generation=st.integers(0, 3),
)


@given(namespaces, namespaces)
def test_two_namespaces_share_a_root_only_if_they_are_equal(a: Namespace, b: Namespace) -> None:
    assert (root_of(a) == root_of(b)) == (a == b)


def test_text_that_differs_only_in_unicode_form_is_different() -> None:
    forms = ["é", "e\u0301", "\udce9", "\ud83d\ude00", "\U0001f600"]
    assert len({root_of(replace(NAMESPACE, model=form)) for form in forms}) == len(forms)


@pytest.mark.parametrize("name", ["model", "weights", "tokenizer", "tenant", "adapter"])
@pytest.mark.parametrize("value", [b"x", 5, ("x",)])
def test_a_namespace_field_that_is_no_text_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be text, found "):
        replace(NAMESPACE, **{name: value})


@pytest.mark.parametrize("name", ["model", "weights", "tokenizer", "tenant"])
def test_only_the_adapter_may_be_none(name: str) -> None:
    absent: Any = None
    with pytest.raises(ConfigError, match=f"{name} must be text, found None"):
        replace(NAMESPACE, **{name: absent})


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 2**64, 2**100])
def test_a_generation_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"found {value!r}")):
        replace(NAMESPACE, generation=value)


# ---- chains ------------------------------------------------------------------------------------


def slow_hashes(tokens: list[int], block_tokens: int) -> list[bytes]:
    """The chain, from the written format."""
    parent: bytes = ROOT
    chain = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = b"".join(struct.pack("<I", token) for token in tokens[at : at + block_tokens])
        images = struct.pack("<I", 0)
        text = b"kvb1" + struct.pack("<I", block_tokens) + parent + ids + images
        parent = hashlib.sha256(text).digest()
        chain.append(parent)
    return chain


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
)
def test_a_chain_is_what_the_written_format_says(tokens: list[int], block_tokens: int) -> None:
    assert hashes_of(tokens, block_tokens) == slow_hashes(tokens, block_tokens)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.data())
def test_a_changed_token_changes_its_block_and_all_after_and_none_before(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    before = hashes_of(tokens, block_tokens)
    changed = [*tokens[:place], tokens[place] + 4, *tokens[place + 1 :]]
    after = hashes_of(changed, block_tokens)
    first = place // block_tokens
    assert before[:first] == after[:first]
    assert all(a != b for a, b in zip(before[first:], after[first:], strict=True))


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 9))
def test_a_longer_prompt_starts_with_the_chain_of_a_shorter_one(
    tokens: list[int], block_tokens: int
) -> None:
    whole = hashes_of(tokens, block_tokens)
    assert len(whole) == len(tokens) // block_tokens
    for stop in range(len(tokens)):
        assert hashes_of(tokens[:stop], block_tokens) == whole[: stop // block_tokens]


def test_equal_blocks_at_different_places_have_different_hashes() -> None:
    chain = hashes_of([5] * 64, 4)
    assert len(set(chain)) == 16
    assert len({block_key(block_hash) for block_hash in chain}) == 16


def test_another_root_shares_nothing() -> None:
    tokens = as_tokens(range(32))
    other = BlockHash(bytes(32))
    assert not set(block_hashes(ROOT, tokens, 4)) & set(block_hashes(other, tokens, 4))


def test_block_size_is_part_of_every_hash() -> None:
    assert not set(hashes_of([0] * 64, 4)) & set(hashes_of([0] * 64, 8))


def test_a_key_is_the_first_16_bytes_of_a_hash() -> None:
    assert KEY_BYTES == 16
    assert block_key(BlockHash(bytes(range(32)))) == bytes(range(16))


# ---- images ------------------------------------------------------------------------------------


def test_an_image_changes_the_blocks_from_its_first_token_on() -> None:
    plain, seen = with_images(), with_images(ImageSpan(9, 12, b"cat"))
    assert plain[0] == seen[0]
    assert plain[1] != seen[1]
    assert plain[2] != seen[2], "an image must stay in the chain behind it"


def test_digest_place_length_and_offset_of_an_image_all_count() -> None:
    variants = [
        with_images(ImageSpan(8, 16, b"cat")),
        with_images(ImageSpan(8, 16, b"dog")),
        with_images(ImageSpan(8, 16, b"cat\0")),
        with_images(ImageSpan(9, 16, b"cat")),  # starts later
        with_images(ImageSpan(8, 15, b"cat")),  # ends earlier
        with_images(ImageSpan(8, 12, b"cat"), ImageSpan(12, 16, b"cat")),  # two of them
        with_images(ImageSpan(7, 16, b"cat")),  # the same tokens of block 1, one further inside
    ]
    assert len({chain[1] for chain in variants}) == len(variants)


def test_the_offset_inside_an_image_tells_its_later_blocks_apart() -> None:
    """A block in the middle of an image that began elsewhere is another block."""
    tokens = as_tokens([7] * 8)
    roots = BlockHash(bytes(32))
    early = block_hashes(roots, tokens, 8, [ImageSpan(0, 24, b"cat")])
    assert early == block_hashes(roots, tokens, 8, [ImageSpan(0, 16, b"cat")])
    spans = [with_images(ImageSpan(start, 24, b"cat")) for start in range(8)]
    assert len({chain[2] for chain in spans}) == 8


def test_the_order_in_which_images_are_given_does_not_count() -> None:
    a, b = ImageSpan(1, 3, b"cat"), ImageSpan(4, 20, b"dog")
    assert with_images(a, b) == with_images(b, a)
    swapped = with_images(ImageSpan(1, 3, b"dog"), ImageSpan(4, 20, b"cat"))
    assert swapped != with_images(a, b)


def test_image_digests_never_run_into_each_other() -> None:
    one = with_images(ImageSpan(0, 1, b"ab"), ImageSpan(1, 2, b"c"))
    two = with_images(ImageSpan(0, 1, b"a"), ImageSpan(1, 2, b"bc"))
    assert one[0] != two[0]


def test_images_that_touch_are_fine_and_images_that_overlap_are_refused() -> None:
    with_images(ImageSpan(0, 4, b"a"), ImageSpan(4, 8, b"b"))
    with pytest.raises(ValueError, match="overlap at token 3"):
        with_images(ImageSpan(3, 8, b"b"), ImageSpan(0, 4, b"a"))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3)])
def test_an_empty_or_negative_image_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"found {start if start < 0 else stop}$"):
        ImageSpan(start, stop, b"x")


@pytest.mark.parametrize("digest", [b"", "text", None, 5])
def test_an_image_digest_must_be_bytes(digest: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"found {digest!r}")):
        ImageSpan(0, 1, digest)


@pytest.mark.parametrize(("start", "stop"), [(0.0, 2), (0, 2.5), ("0", "2"), (True, 2), (None, 2)])
def test_an_image_span_that_is_not_integers_is_refused(start: Any, stop: Any) -> None:
    with pytest.raises(ValueError, match="must be an? (positive )?integer"):
        ImageSpan(start, stop, b"x")


def test_an_image_span_may_be_made_of_numpy_integers() -> None:
    first, last = np.int64(3), np.uint16(9)
    span = ImageSpan(first, last, b"x")  # type: ignore[arg-type]
    assert with_images(span) == with_images(ImageSpan(3, 9, b"x"))
    far = ImageSpan(np.uint8(3), 700, b"x")  # type: ignore[arg-type]
    assert with_images(far, tokens=800) == with_images(ImageSpan(3, 700, b"x"), tokens=800)


# ---- tokens ------------------------------------------------------------------------------------

IDS = [0, 1, 5, 40_000, 65_535, 7, 7, 9]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, ">u4"),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.repeat(np.array(ids, np.uint32), 3)[::3],
        lambda ids: np.array(ids[::-1], np.int32)[::-1],
        lambda ids: np.array([ids, ids], np.uint32, order="F")[1],
    ],
)
def test_tokens_hash_alike_whatever_holds_them(make: Callable[[list[int]], Any]) -> None:
    ids = as_tokens(make(IDS))
    assert ids.dtype == np.dtype("=u4")
    assert ids.flags.c_contiguous
    assert ids.tolist() == IDS
    assert block_hashes(ROOT, ids, 4) == hashes_of(IDS, 4)
    array = make(IDS)
    own, hashes = identify(ROOT, array, 3)
    assert own.dtype == np.dtype("=u4")
    assert own.tolist() == IDS
    assert hashes == hashes_of(IDS, 3)
    assert not isinstance(array, np.ndarray) or not np.shares_memory(own, array)


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 500])
def test_ids_are_checked_and_copied_on_their_way_to_the_hash(kind: type, count: int) -> None:
    """Wherever they lie in memory, and wherever a bad one is: in a block or behind the last."""
    rng = np.random.default_rng(count)
    top = min(2**32, int(np.iinfo(kind).max) + 1)
    tokens: Any = rng.integers(0, top, count, np.uint64).astype(kind)
    tokens[-1:] = top - 1
    moved: Any = np.frombuffer(b"x" + tokens.tobytes(), kind, offset=1)
    for array in (tokens, moved):
        for block_tokens in (1, 7, 64, 1000):
            ids, hashes = identify(ROOT, array, block_tokens)
            assert ids.tolist() == tokens.tolist()
            assert hashes == block_hashes(ROOT, as_tokens(tokens), block_tokens)
    bad = [n for n in (-1, 2**32, 2**63) if np.iinfo(kind).min <= n <= np.iinfo(kind).max]
    for place in {0, count // 2, count - 1} if count else ():
        for wrong in bad:
            tokens_with = tokens.copy()
            tokens_with[place] = wrong
            with pytest.raises(ValueError, match=rf"\[0, 2\*\*32\), found {wrong}"):
                identify(ROOT, tokens_with, 7)


def test_images_are_part_of_an_identity() -> None:
    image = ImageSpan(3, 9, b"cat")
    ids, hashes = identify(ROOT, IDS * 2, 4, [image])
    assert ids.tolist() == IDS * 2
    assert hashes == block_hashes(ROOT, as_tokens(IDS * 2), 4, [image])
    assert hashes != identify(ROOT, IDS * 2, 4)[1]


def test_the_largest_token_id_is_accepted() -> None:
    assert as_tokens([2**32 - 1]).tolist() == [2**32 - 1]


@pytest.mark.parametrize("empty", [[], (), np.array([], np.float64), np.array([], np.int32)])
def test_no_tokens_are_fine_and_have_no_blocks(empty: Any) -> None:
    ids = as_tokens(empty)
    assert ids.dtype == np.uint32
    assert block_hashes(ROOT, ids, 4) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], r"\[0, 2\*\*32\), found -1"),
        (np.array([-5], np.int64), "found -5"),
        ([2**32], "found 4294967296"),
        ([2**63], "found 9223372036854775808"),
        ([2**64], "integers, found dtype object"),
        ([1.0], "integers, found dtype float64"),
        (np.array([1], np.float32), "integers, found dtype float32"),
        ([True, False], "integers, found dtype bool"),
        (np.array([1, 0], np.bool_), "integers, found dtype bool"),
        (["a"], "integers, found dtype <U1"),
        (b"abc", "one-dimensional, found shape"),
        ("abc", "one-dimensional, found shape"),
        ([None], "integers, found dtype object"),
        ([[1, 2], [3, 4]], r"one-dimensional, found shape \[2, 2\]"),
        (5, r"one-dimensional, found shape \[\]"),
        (np.zeros((0, 3), np.int32), r"one-dimensional, found shape \[0, 3\]"),
        ([[1, 2], [3]], "shape"),
    ],
)
def test_what_is_no_list_of_token_ids_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_tokens(tokens)
    with pytest.raises(ValueError, match=message):
        identify(ROOT, tokens, 4)


# ---- the same everywhere and for ever ----------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
from kvstore import ImageSpan
from kvstore.identity.hash import _plain_hashes, as_tokens, block_hashes, namespace_digest
from kvstore.identity.namespace import Namespace
namespace = Namespace(model="m", weights="w", tokenizer="t", adapter="a", tenant="s", generation=1)
root = namespace_digest("f" * 64, 128, namespace)
spans = [ImageSpan(2, 9, b"cat"), ImageSpan(9, 11, b"dog")]
chain = block_hashes(root, as_tokens(range(12)), 4, spans)
print(root.hex(), *(block_hash.hex() for block_hash in chain))
assert "torch" not in sys.modules
"""


def test_every_process_computes_the_same_hashes() -> None:
    root = BlockHash(root_of(NAMESPACE))
    spans = [ImageSpan(2, 9, b"cat"), ImageSpan(9, 11, b"dog")]
    chain = block_hashes(root, as_tokens(range(12)), 4, spans)
    expected = " ".join(digest.hex() for digest in [root, *chain])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "random")
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert outputs == [expected] * 3


def test_the_encoding_of_a_namespace_never_drifts() -> None:
    assert (
        root_of(NAMESPACE).hex()
        == "1fa86240e4a440ca7a11f5189b4cfa3c69e4b9f9f550decf8dc5c9ef59e820a6"
    )
    assert (
        root_of(Namespace(model="")).hex()
        == "6ee8e29b5165766270c611816ea82e6505cb56b8b2173cdc5f9dfb8fe659f7dd"
    )
    plain = b"".join(
        [
            b"kvstore.namespace.1",
            b"Ls" + struct.pack("<Q", 64) + b"f" * 64,
            b"B" + struct.pack("<Q", 128),
            b"Ms" + struct.pack("<Q", 1) + b"m",
            b"Ws" + struct.pack("<Q", 1) + b"w",
            b"Ts" + struct.pack("<Q", 1) + b"t",
            b"An",
            b"Ss" + struct.pack("<Q", 1) + b"s",
            b"G" + struct.pack("<Q", 1),
        ]
    )
    assert root_of(replace(NAMESPACE, adapter=None)) == hashlib.sha256(plain).digest()


def test_the_encoding_of_blocks_never_drifts() -> None:
    assert ROOT.hex() == "730837bc0b8e06f4eec7e1bbfaa373072c41a4665d2d0f6d5f93d4a88cd1eba3"
    assert [block_hash.hex() for block_hash in hashes_of(range(8), 4)] == [
        "01a3f231c45e1a9124d11934f9c5fa750107f309e24712cafd57f868e5bd514f",
        "aeeefe7551780609321008134be0f5978fe1a4be09cfd608e86053ed2b1efc45",
    ]
    chain = with_images(ImageSpan(6, 20, b"cat"), ImageSpan(20, 21, b"dog"))
    assert [block_hash.hex() for block_hash in chain] == [
        "cedec946de5862a14b507346eb4d5fcf85b4341dc53929ff7f17405a2dc99789",
        "5e16ddc3671ab298fd6c3495f2fb744d0595c048fbdae3cb5f4369f5704ddd48",
        "a68ed187f63d126d8835728dea9e5bb7a8851c66dd3faba0d81b644cc968544d",
    ]


def test_the_encoding_of_images_is_what_the_written_format_says() -> None:
    chain = with_images(ImageSpan(6, 20, b"cat"), ImageSpan(20, 21, b"dog"))
    ids = struct.pack("<8I", *[7] * 8)
    head = b"kvb1" + struct.pack("<I", 8)
    cat, dog = struct.pack("<Q", 3) + b"cat", struct.pack("<Q", 3) + b"dog"
    parent: bytes = ROOT
    for found, images in zip(
        chain,
        [  # number of images, then of each: place in the block, tokens of it, offset inside it
            struct.pack("<I", 1) + b"I" + struct.pack("<QQQ", 6, 2, 0) + cat,
            struct.pack("<I", 1) + b"I" + struct.pack("<QQQ", 0, 8, 2) + cat,
            struct.pack("<I", 2)
            + (b"I" + struct.pack("<QQQ", 0, 4, 10) + cat)
            + (b"I" + struct.pack("<QQQ", 4, 1, 0) + dog),
        ],
        strict=True,
    ):
        parent = hashlib.sha256(head + parent + ids + images).digest()
        assert found == parent


@pytest.mark.parametrize("level", range(lib.kvstore_level() + 1))
@pytest.mark.parametrize("block_tokens", [*range(1, 45), 127, 128, 129, 1000])
def test_the_c_chain_is_sha256_at_every_level_and_length(level: int, block_tokens: int) -> None:
    tokens = np.random.default_rng(block_tokens).integers(0, 2**32, 5 * block_tokens, np.uint32)
    head = b"kvb1" + struct.pack("<I", block_tokens)
    parent, expected = bytes(ROOT), []
    for block in tokens.reshape(5, block_tokens):
        parent = hashlib.sha256(head + parent + block.tobytes() + bytes(4)).digest()
        expected.append(parent)
    assert _plain_hashes(ROOT, tokens, 0, 5, block_tokens, level) == b"".join(expected)
    middle = _plain_hashes(BlockHash(expected[1]), tokens, 2, 4, block_tokens, level)
    assert middle == expected[2] + expected[3]
    assert _plain_hashes(ROOT, tokens, 3, 3, block_tokens, level) == b""


def test_a_run_of_hashes_is_the_sequence_of_them() -> None:
    hashes = [BlockHash(bytes([n]) * 32) for n in range(5)]
    run = HashRun(b"".join(hashes))
    assert run == hashes
    assert [run[n] for n in range(-5, 5)] == hashes * 2
    assert run != hashes[:4]
    for part in (slice(None), slice(1, 4), slice(3, 1), slice(-2, None), slice(None, None, -2)):
        assert run[part] == hashes[part]
    assert run.prefixes(16) == b"".join(one[:16] for one in hashes)
    assert HashRun(b"") == []
    assert HashRun(b"").prefixes(16) == b""
    with pytest.raises(IndexError):
        run[5]


def test_tokens_that_are_not_contiguous_hash_as_if_they_were() -> None:
    tokens = as_tokens(range(64))
    assert block_hashes(ROOT, tokens[::2], 8) == block_hashes(ROOT, tokens[::2].copy(), 8)
