"""Writing of traces as JSON lines in the Mooncake or Bailian format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstore.trace.columns import MILLISECOND, SECOND, UNKNOWN, Trace
from kvstore.trace.source import created

BAILIAN_TOKENS = 16
"""Tokens of a block in the Bailian format, which has no field for it."""


def write(trace: Trace, path: Path, form: str = "mooncake") -> None:
    """Write a trace, compressed if the name ends in .gz or .zst; ``-`` is standard output.

    The same trace gives the same bytes. Only numbers are written. Raises ``ValueError`` for an
    unknown format, or one that cannot hold the trace.
    """
    if form not in WRITERS:
        raise ValueError(f"unknown output format {form!r}; expected one of {', '.join(WRITERS)}")
    lines = WRITERS[form](trace)
    with created(path) as stream:
        for line in lines:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _mooncake(trace: Trace) -> Iterator[dict[str, Any]]:
    for request in range(len(trace)):
        line = {
            "timestamp": _in_units(int(trace.arrival[request]), MILLISECOND),
            "input_length": int(trace.input_tokens[request]),
            "output_length": int(trace.output_tokens[request]),
            "hash_ids": trace.chain(request).tolist(),
        }
        if trace.block_tokens:
            line["block_size"] = trace.block_tokens
        session = int(trace.sessions[request])
        if session != UNKNOWN:
            line["session_id"] = str(session)
        yield line


def _bailian(trace: Trace) -> Iterator[dict[str, Any]]:
    if trace.block_tokens != BAILIAN_TOKENS:
        msg = (
            f"the Bailian format has blocks of {BAILIAN_TOKENS} tokens, found {trace.block_tokens}"
        )
        raise ValueError(msg)
    return _chats(trace)


def _chats(trace: Trace) -> Iterator[dict[str, Any]]:
    newest: dict[int, tuple[int, int]] = {}
    for request, line in enumerate(_mooncake(trace)):
        session = int(trace.sessions[request])
        parent, turn = newest.get(session, (-1, 0)) if session != UNKNOWN else (-1, 0)
        newest[session] = request, turn + 1
        yield {
            "chat_id": request,
            "parent_chat_id": parent,
            "timestamp": _in_units(int(trace.arrival[request]), SECOND),
            "input_length": line["input_length"],
            "output_length": line["output_length"],
            "type": "text",
            "turn": turn + 1,
            "hash_ids": line["hash_ids"],
        }


def _in_units(time: int, unit: int) -> int | float:
    return time // unit if time % unit == 0 else time / unit


WRITERS: Mapping[str, Callable[[Trace], Iterator[dict[str, Any]]]] = {
    "mooncake": _mooncake,
    "bailian": _bailian,
}
