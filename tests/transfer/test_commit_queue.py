"""The commit queue: how blocks are grouped into commits."""

from __future__ import annotations

import time

import pytest

from kvstore.identity.block import BlockKey
from kvstore.transfer import commit_queue
from kvstore.transfer.commit_queue import CommitQueue, QueuedBlock


@pytest.mark.parametrize(("lingers", "expected"), [(100, [5]), (1, [4, 1])])
def test_a_commit_waits_for_the_next_block_but_not_for_ever(
    lingers: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_queue, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(commit_queue, "LINGERS", lingers)
    commits: list[int] = []
    queue = CommitQueue[None](
        lambda batch: commits.append(len(batch)), commit_blocks=64, queue_blocks=64
    )
    for number in range(5):  # the last comes 1.2 s after the first
        key = BlockKey(bytes([number]) * 16)
        assert queue.submit(QueuedBlock(key, BlockKey(b""), number, bytearray(1), None))
        time.sleep(0.3)
    queue.close()
    assert commits == expected
