"""A server that is stopped as supervisors stop it, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

from bench.engines.vllm_restarts import Asked, restart
from tests.engine.vllm.engine import save_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_server_that_gets_sigterm_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama", "llama")
    asked = Asked()
    rows = [restart(model, tmp_path, asked, timeout=timeout) for timeout in (0, 0, 60)]
    for row in rows:
        assert row.equal
        assert (row.missed_tokens, row.lost_blocks) == (0, 0)
        assert row.committed_blocks
    # vLLM's default kills its engine at once; with a timeout stores are closed.
    assert [row.was_closed for row in rows] == [False, False, True]
