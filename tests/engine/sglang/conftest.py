"""The state of an SGLang scheduler process before it makes a cache: one rank, and its settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def scheduler() -> Iterator[None]:
    from sglang.srt.runtime_context import get_context, get_parallel, reset_context
    from sglang.srt.server_args import ServerArgs

    get_context().set_server_args(ServerArgs(model_path="m"))
    with get_parallel().override(
        attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
    ):
        yield
    reset_context()
