"""Decisions for engines that keep KV in pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import ConfigError
from kvstore.distribution import install_command
from kvstore.engine.paged import (
    Hints,
    Saving,
    WindowPages,
    block_tokens_for,
    images_within,
    longest_pooled,
    pages_of,
    settled_tokens,
    shard_name,
    shard_of,
    window_boundaries,
)
from kvstore.identity.block import BlockHash, ImageSpan
from kvstore.identity.hash import block_hashes

B = 128


def test_a_block_is_a_whole_number_of_every_groups_pages() -> None:
    assert [block_tokens_for({n}) for n in (16, 32, 64, 128, 256, 48)] == [128] * 4 + [256, 384]
    assert block_tokens_for({64, 128, 96}) == 384


@pytest.mark.parametrize(
    ("known", "computed", "scheduled", "settled"),
    [
        (300, 0, 200, 200),  # a chunk of a prompt
        (301, 300, 1, 301),  # a decode
        (301, 300, 5, 301),  # drafts behind it may be rejected
        (301, 303, 1, 301),  # counted ahead of what was accepted
    ],
)
def test_only_accepted_tokens_are_settled(
    known: int, computed: int, scheduled: int, settled: int
) -> None:
    assert settled_tokens(known, computed, scheduled) == settled


class TestSaving:
    def test_a_prompt_in_chunks(self) -> None:
        saving = Saving()
        assert saving.start(127, B, 1) is None
        assert saving.start(200, B, 1) == (0, 128)
        assert saving.start(400, B, 1) is None, "one at a time"
        saving.answer(128)
        assert saving.start(400, B, 1) == (128, 384)

    def test_what_was_dropped_is_offered_again_with_the_next_block_and_at_the_end(self) -> None:
        saving = Saving()
        assert saving.start(512, B, 1) == (0, 512)
        saving.answer(256)
        assert saving.start(513, B, 1) is None, "not in every step"
        assert saving.start(640, B, 1) == (256, 640)
        saving.answer(256)
        assert saving.finish(641, B, 1) == (256, 640)

    def test_every_writer_answers_and_the_least_counts(self) -> None:
        saving = Saving()
        saving.start(512, B, 3)
        saving.answer(512)
        saving.answer(128)
        assert saving.underway == 512
        saving.answer(512)
        assert saving == Saving(saved=128, _offered=512, _least=128)

    def test_the_end_of_a_request_does_not_wait_for_a_save_under_way(self) -> None:
        saving = Saving()
        saving.start(200, B, 2)
        assert saving.finish(300, B, 2) == (128, 256)
        for _ in range(3):
            saving.answer(128)
        assert saving.underway == 256
        saving.answer(256)
        assert saving.underway is None

    def test_a_request_that_ends_with_nothing_left(self) -> None:
        saving = Saving()
        assert saving.finish(100, B, 1) is None
        assert saving.underway is None
        saving.start(128, B, 1)
        assert saving.finish(128, B, 1) is None
        assert saving.underway == 128, "its blocks are still read"

    def test_an_answer_that_nobody_waits_for_changes_nothing(self) -> None:
        saving = Saving(saved=128)
        saving.answer(0)
        assert saving == Saving(saved=128)

    @given(
        st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1000), st.booleans()), max_size=30)
    )
    def test_spans_are_whole_blocks_behind_what_is_saved(
        self, steps: list[tuple[int, int, bool]]
    ) -> None:
        saving, settled = Saving(), 0
        for more, end, answers in steps:
            settled += more
            span = saving.start(settled, B, 1)
            if span is not None:
                assert span[0] == saving.saved
                assert span[0] < span[1] <= settled
                assert span[0] % B == span[1] % B == 0
            if answers:
                saving.answer(min(end // B * B, settled))
            assert saving.saved <= settled


@pytest.mark.parametrize(
    ("before", "settled", "prompt", "stops"),
    [
        (0, 300, 300, (256,)),
        (0, 256, 256, (128, 256)),  # an exact repeat has to compute its last token
        (0, 128, 128, (128,)),
        (0, 100, 100, ()),
        (0, 2048, 2050, (2048,)),  # the last chunk brings no boundary
        (2048, 2050, 2050, ()),
        (0, 1024, 4096, ()),  # a chunk in the middle: nothing continues there
        (383, 384, 300, (384,)),  # decoding
        (384, 385, 300, ()),
        (200, 256, 256, (256,)),  # 128 was taken before, if ever
    ],
)
def test_windows_are_taken_where_a_request_can_continue(
    before: int, settled: int, prompt: int, stops: tuple[int, ...]
) -> None:
    assert window_boundaries(before, settled, prompt, B) == stops


@pytest.mark.parametrize(
    ("stop", "window", "pages", "span", "needed"),
    [
        (256, 128, 128, (128, 256), (1, 2)),
        (256, 130, 128, (0, 256), (0, 2)),  # rows [127, 256): one of them in page 0
        (256, 129, 128, (128, 256), (1, 2)),
        (128, 300, 32, (0, 128), (0, 4)),
        (512, 300, 32, (192, 512), (6, 16)),
    ],
)
def test_the_pages_of_a_window(
    stop: int, window: int, pages: int, span: tuple[int, int], needed: tuple[int, int]
) -> None:
    found = WindowPages.of(stop, window, [pages])
    assert (found.start, found.stop) == span
    assert found.needed(pages) == needed


def test_the_pages_of_a_window_over_groups_of_several_sizes() -> None:
    found = WindowPages.of(512, 100, [32, 128])
    assert (found.start, found.first) == (384, 413)
    assert found.needed(32) == (12, 16)  # tokens 384 on; page 12 is the first with a needed row
    assert found.needed(128) == (3, 4)
    assert WindowPages.of(512, 300, [32]).needed(32, floor=448) == (14, 16)
    assert WindowPages.of(512, 300, [32]).needed(32, floor=512) == (16, 16)


def test_the_pages_of_a_span() -> None:
    ids = [9, 4, 7, 1, 5]
    assert pages_of(ids, 32, 64, 128) == [7, 1]
    assert pages_of(ids, 32, 64, 129) == [7, 1, 5]
    assert pages_of(ids, 128, 128, 256) == [4]


def test_images_of_the_first_tokens_make_the_same_blocks() -> None:
    images = (ImageSpan(10, 300, b"a"), ImageSpan(400, 500, b"b"))
    assert images_within(images, 257) == (ImageSpan(10, 257, b"a"),)
    assert images_within(images, 600) == images
    assert images_within(images, 10) == ()
    ids, root = np.arange(600, dtype=np.uint32), BlockHash(b"r" * 32)
    whole = block_hashes(root, ids, B, images)
    assert block_hashes(root, ids[:257], B, images_within(images, 257)) == whole[:2]


def test_a_window_has_to_be_in_every_ranks_pool() -> None:
    hashes = [b"a", b"b", b"c"]
    other = [name.upper() for name in hashes]  # of a store with a secret of its own
    assert longest_pooled([(hashes, {b"a", b"b"})], 3) == 2
    assert longest_pooled([(hashes, {b"a", b"b"}), (other, {b"A"})], 3) == 1
    assert longest_pooled([(hashes, {b"a", b"b"}), (other, {b"a"})], 3) == 0
    assert longest_pooled([(hashes, {b"a", b"b"})], 1) == 1
    assert longest_pooled([(hashes, set())], 3) == 0


def test_ranks_that_hold_the_same_share_a_folder() -> None:
    assert [shard_of(rank, 1) for rank in range(3)] == [0, 1, 2]
    assert [shard_of(rank, 4) for rank in range(4)] == [0] * 4
    assert [shard_of(rank, 2) for rank in range(4)] == [0, 0, 2, 2]
    assert shard_name(2, 4) == "rank-2-of-4"


class TestHints:
    def test_in_a_requests_words(self) -> None:
        assert Hints.of(None) == Hints()
        assert Hints.of({"store": False}) == Hints(store=False)
        assert Hints.of({"pin": True, "ttl": 60}) == Hints(pin=True, ttl=60)

    @pytest.mark.parametrize(
        "wishes",
        [
            *(["pin"], {"forever": True}, {"pin": 1}),
            *({"ttl": ttl} for ttl in (0, True, float("nan"), float("inf"), 10**400)),
        ],
        ids=lambda wishes: str(wishes)[:20],
    )
    def test_anything_else_says_what_was_expected(self, wishes: object) -> None:
        with pytest.raises(ConfigError, match="expected|must be"):
            Hints.of(wishes)


def test_without_vllm_an_import_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vllm here')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvstore.engine.vllm"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert install_command("vllm") in done.stderr
