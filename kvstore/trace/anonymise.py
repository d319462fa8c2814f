"""Logs of text or tokens as traces that hold nothing of them but which prefixes are equal."""

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
from kvstore.trace.chained import parents
from kvstore.trace.columns import MILLISECOND, SECOND, Trace
from kvstore.trace.fields import json_object, label, size, whole_number
from kvstore.trace.reading import Columns, Options, Row
from kvstore.trace.source import documents

T = TypeVar("T")

BYTES_PER_TOKEN = 4
"""Bytes of text that count as a token, where no tokens are logged: about what English takes."""
KEY_BYTES, DIGEST_BYTES = 32, 16
UNITS = {"us": 1, "ms": MILLISECOND, "s": SECOND}
"""In microseconds. LMCache logs count microseconds."""


def anonymise(path: Path | str, key: bytes, block_size: int, unit: str = "us") -> Trace:
    """Return a log as a trace. ``block_size`` is in bytes of text, or in tokens where they are logged.

    Each line is an object with ``timestamp``, and ``input`` (text) or ``tokens``; ``output`` and
    ``session_id`` may be absent. A block's id stands for a keyed digest of it and all before it, and
    is a plain number in the result; so are sessions. What is left over after the last whole block is
    in no id.

    Raises:
        TraceError: naming the file, the line, what was found and what was expected.
        ValueError: if the block size or the unit is impossible.
    """
    if unit not in UNITS:
        msg = f"no unit of time named {unit!r}; expected one of {', '.join(UNITS)}"
        raise ValueError(msg)
    size(block_size, "a block size")
    path = Path(path)
    columns = Columns(path)
    for document, stream in documents(path):
        where = path if document == path.name else path / document
        columns.latest = 0
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row, block_tokens = _row(line, key, block_size, UNITS[unit])
                if columns.block_tokens not in {0, block_tokens}:
                    msg = "a log of both text and tokens"
                    raise ValueError(msg)
            except ValueError as error:
                raise TraceError(where, str(error), number) from error
            columns.block_tokens = block_tokens
            columns.add(row, number)
    trace = columns.trace(path.name.split(".")[0], Options())
    if trace.references:
        parents(trace)  # that ids still name prefixes is what the trace is for
    return trace


def _row(line: bytes, key: bytes, block_size: int, unit: int) -> tuple[Row, int]:
    record = json_object(line)
    text, tokens = record.get("input"), record.get("tokens")
    if isinstance(text, str):
        if block_size % BYTES_PER_TOKEN:
            msg = f"{block_size} bytes are no whole number of tokens of {BYTES_PER_TOKEN} bytes"
            raise ValueError(msg)
        content, width, block_tokens = (
            text.encode(errors="surrogatepass"),
            block_size,
            block_size // BYTES_PER_TOKEN,
        )
        length = -(-len(content) // BYTES_PER_TOKEN)
    elif _are_tokens(tokens):
        content, width, block_tokens = np.array(tokens, "<i8").tobytes(), 8 * block_size, block_size
        length = len(tokens)
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
    return Row(arrival, length, -(-answer // BYTES_PER_TOKEN), ids, session), block_tokens


def _unseen(parse: Callable[[], T], record: Mapping[str, Any], name: str) -> T:
    """Return a field; a message about it has its type, and nothing of what the log has there."""
    try:
        return parse()
    except ValueError:
        msg = f"has a {name} that cannot be used, of type {type(record.get(name)).__name__}"
        raise ValueError(msg) from None


def _are_tokens(value: Any) -> TypeGuard[list[int]]:
    """Say whether a value is a list of token ids, which are numbers of 32 bits."""
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each < 2**32 for each in value
    )


def read_key(path: Path) -> bytes | None:
    """Return the key in a file, None if there is no file.

    Raises:
        ValueError: if others may read it, or it is not a key.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None
    if mode & 0o077:
        msg = f"{path} may be read by others (mode {mode:o}); expected 600"
        raise ValueError(msg)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if len(text) != 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
        msg = f"{path} is not a key: expected {2 * KEY_BYTES} hex digits"
        raise ValueError(msg)
    return bytes.fromhex(text)


def new_key() -> bytes:
    """Return a key that nobody has."""
    return secrets.token_bytes(KEY_BYTES)


def keep_key(path: Path, key: bytes) -> None:
    """Write a key to a file that is not there yet, for its owner alone.

    Raises:
        FileExistsError: if there is one by now.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.hex() + "\n")
