"""Anonymised traces of logs of text or tokens: equal prefixes, lengths and times, without content."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from kvstore.errors import TraceError
from kvstore.trace.builder import Options, Request, TraceBuilder
from kvstore.trace.chained import parents
from kvstore.trace.columns import MILLISECOND, SECOND, Trace
from kvstore.trace.fields import json_object, label, size, whole_number
from kvstore.trace.source import documents

T = TypeVar("T")

BYTES_PER_TOKEN = 4
"""Bytes of text per token where tokens are not logged: about the average of English."""
KEY_BYTES, DIGEST_BYTES = 32, 16
UNITS = {"us": 1, "ms": MILLISECOND, "s": SECOND}
"""In microseconds, the unit of LMCache logs."""


def anonymise(path: Path | str, key: bytes, block_size: int, unit: str = "us") -> Trace:
    """Return a log as a trace. ``block_size`` is in bytes of text, or in tokens where they are logged.

    A line is an object with ``timestamp``, and ``input`` (text) or ``tokens``; ``output`` and ``session_id``
    are optional. Ids number the keyed digests of blocks, each chained to the digest before it; sessions
    are numbered too. A partial last block has no id.

    Raises:
        TraceError: with the file, the line, the value found and the value expected.
        ValueError: for an impossible block size or unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unknown unit of time {unit!r}; expected one of {', '.join(UNITS)}")
    size(block_size, "a block size")
    path = Path(path)
    builder = TraceBuilder(path)
    for document, stream in documents(path):
        where = path if document == path.name else path / document
        builder.latest = 0
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row, block_tokens = _row(line, key, block_size, UNITS[unit])
                if builder.block_tokens not in {0, block_tokens}:
                    raise ValueError("has both text and tokens; expected one of them in all lines")
            except ValueError as error:
                raise TraceError(where, str(error), number) from error
            builder.block_tokens = block_tokens
            builder.add(row, number)
    trace = builder.trace(path.name.split(".")[0], Options())
    if trace.references:
        parents(trace)  # checks that ids name prefixes
    return trace


def _row(line: bytes, key: bytes, block_size: int, unit: int) -> tuple[Request, int]:
    record = json_object(line)
    text, tokens = record.get("input"), record.get("tokens")
    if isinstance(text, str):
        if block_size % BYTES_PER_TOKEN:
            msg = f"a block of {block_size} bytes is not a multiple of {BYTES_PER_TOKEN}, the bytes of a token"
            raise ValueError(msg)
        content, width = text.encode(errors="surrogatepass"), block_size
        block_tokens = block_size // BYTES_PER_TOKEN
        length = -(-len(content) // BYTES_PER_TOKEN)
    elif _are_tokens(tokens):
        content, width, block_tokens = np.array(tokens, "<i8").tobytes(), 8 * block_size, block_size
        length = len(tokens)
    elif "hash_ids" in record:
        raise ValueError(
            "is a line of a trace, whose prompts are block ids already; expected a log of prompts"
        )
    else:
        msg = (
            "expected input as text, or tokens as whole numbers from 0 to below 2**32, of the prompt as "
            f"the model sees it; found the keys {sorted(record)}"
        )
        raise ValueError(msg)
    output = record.get("output")
    if output is None:
        answer = 0
    elif isinstance(output, str):
        answer = len(output.encode(errors="surrogatepass"))
    elif _are_tokens(output):
        answer = BYTES_PER_TOKEN * len(output)
    else:
        msg = f"expected output as text or a list of token ids, found {type(output).__name__}"
        raise ValueError(msg)
    ids = []
    above = b"\0" * DIGEST_BYTES
    for at in range(0, len(content) - width + 1, width):
        block = above + content[at : at + width]
        above = blake2b(block, key=key, digest_size=DIGEST_BYTES).digest()
        ids.append(above.hex())
    arrival = _unseen(lambda: whole_number(record, "timestamp", unit), record, "timestamp")
    session = _unseen(lambda: label(record, "session_id"), record, "session_id")
    return Request(arrival, length, -(-answer // BYTES_PER_TOKEN), ids, session), block_tokens


def _unseen(parse: Callable[[], T], record: Mapping[str, Any], name: str) -> T:
    """Return a parsed field; an error has its type but no text of the log."""
    try:
        return parse()
    except ValueError:
        msg = f"has an invalid {name} of type {type(record.get(name)).__name__}"
        raise ValueError(msg) from None


def _are_tokens(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of token ids, numbers of 32 bits."""
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each < 2**32 for each in value
    )


def read_key(path: Path) -> bytes | None:
    """Return the key in a file; None if there is none. Raises ``ValueError`` if it is public or invalid."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None
    if mode & 0o077:
        raise ValueError(f"{path} can be read by other users (mode {mode:o}); expected mode 600")
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if len(text) != 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{path} is not a key: expected {2 * KEY_BYTES} hex digits")
    return bytes.fromhex(text)


def new_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(KEY_BYTES)


def keep_key(path: Path, key: bytes) -> None:
    """Write a key to a new file that only its owner can read.

    Raises:
        FileExistsError: if the file exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.hex() + "\n")
