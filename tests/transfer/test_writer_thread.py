"""The writer thread: how blocks are grouped into commits."""

from __future__ import annotations

import time

import pytest

from kvstore.identity.block import BlockKey
from kvstore.transfer import writer_thread
from kvstore.transfer.writer_thread import QueuedBlock, Writer


@pytest.mark.parametrize(("lingers", "expected"), [(100, [5]), (1, [4, 1])])
def test_a_commit_waits_for_the_next_block_but_not_for_ever(
    lingers: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(writer_thread, "LINGERS", lingers)
    commits: list[int] = []
    writer = Writer[None](
        lambda batch: commits.append(len(batch)), commit_blocks=64, queue_blocks=64
    )
    for number in range(5):  # the last comes 1.2 s after the first
        key = BlockKey(bytes([number]) * 16)
        assert writer.submit(QueuedBlock(key, BlockKey(b""), number, bytearray(1), None))
        time.sleep(0.3)
    writer.close()
    assert commits == expected
