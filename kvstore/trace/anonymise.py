"""Logs of text or tokens as traces that hold nothing of them but which prefixes are equal."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import TraceError
from kvstore.trace.chained import parents
from kvstore.trace.columns import MILLISECOND, SECOND, Trace
from kvstore.trace.reading import Columns, Options, Row, whole_number
from kvstore.trace.source import documents

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
    if block_size < 1:
        msg = f"expected a block size of 1 or more, found {block_size}"
        raise ValueError(msg)
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
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise TraceError(where, str(error), number) from error
            columns.block_tokens = block_tokens
            columns.add(row, number)
    trace = columns.trace(path.name.split(".")[0], Options())
    if trace.references:
        parents(trace)  # that ids still name prefixes is what the trace is for
    return trace


def _row(line: bytes, key: bytes, block_size: int, unit: int) -> tuple[Row, int]:
    try:
        record: Mapping[str, Any] = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        msg = f"is not JSON: {error.args[0].split(':')[0]}"  # and nothing of what it is
        raise ValueError(msg) from None
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
    elif isinstance(tokens, list) and all(type(each) is int for each in tokens):
        content, width, block_tokens = np.array(tokens, "<i8").tobytes(), 8 * block_size, block_size
        length = len(tokens)
    else:
        msg = f"expected input as text or tokens as whole numbers, found the keys {sorted(record)}"
        raise ValueError(msg)
    output = record.get("output", "")
    answer = (
        len(output.encode(errors="surrogatepass"))
        if isinstance(output, str)
        else BYTES_PER_TOKEN * len(output)
    )
    session = record.get("session_id")
    ids = []
    above = b"\0" * DIGEST_BYTES
    for at in range(0, len(content) - width + 1, width):
        block = above + content[at : at + width]
        above = blake2b(block, key=key, digest_size=DIGEST_BYTES).digest()
        ids.append(above.hex())
    arrival = whole_number(record, "timestamp", unit)
    name = None if session is None else str(session)
    return Row(arrival, length, -(-answer // BYTES_PER_TOKEN), ids, name), block_tokens


def load_key(path: Path) -> bytes:
    """Return the key in a file, which is made if there is none, for its owner alone.

    Raises:
        ValueError: if others may read it, or it is not a key.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            msg = f"{path} may be read by others (mode {mode:o}); expected 600"
            raise ValueError(msg) from None
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if len(text) != 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
            msg = f"{path} is not a key: expected {2 * KEY_BYTES} hex digits"
            raise ValueError(msg) from None
        return bytes.fromhex(text)
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.hex() + "\n")
    return key
