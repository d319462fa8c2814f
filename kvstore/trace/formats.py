"""Formats of traces: Mooncake, Bailian and LMCache lines, Weka sessions, CSV of lengths."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import TraceError
from kvstore.trace import fields
from kvstore.trace.builder import Options, Request, TraceBuilder
from kvstore.trace.columns import MILLISECOND, SECOND, Ints
from kvstore.trace.fields import LARGEST, json_object, shown

ADVICE = (
    "; write lines with timestamp, and tokens (ids of the prompt as the model sees it) or input (its "
    "text), and convert them with kvstore trace anonymise"
)
"""Advice for a log of unknown format."""
Rows = Iterator[tuple[int, Request]]
"""Line numbers and requests."""


def json_rows(
    where: Path,
    start: int,
    first: bytes,
    stream: io.BufferedReader,
    builder: TraceBuilder,
    options: Options,
) -> Rows:
    """Read JSON lines, from ``first``, which is line ``start``; or one object of many lines."""
    try:
        record, _ = _parsed(first)
    except ValueError:
        record = None
    named = _BY_NAME.get(options.form)
    if named is not None:
        parse = named
    elif record is None or "requests" in record:  # one object, which may span lines
        yield from weka(where, first + stream.read(), builder, start)
        return
    else:
        parse = _format_of(where, record, start)
    for number, line in enumerate(chain([first], stream), start):
        if not line.strip():
            continue
        try:
            record, ids = _parsed(line)
            if options.model is not None and record.get("model_name") != options.model:
                continue
            row, block_tokens = parse(record, ids)
            builder.set_block_tokens(block_tokens)
        except ValueError as error:
            raise TraceError(where, str(error), number) from error
        yield number, row


_IDS = b'"hash_ids"'


def _parsed(line: bytes) -> tuple[dict[str, Any], Ints | None]:
    """Return a line's object, and separately its ``hash_ids`` if they are plain numbers below 2**62.

    NumPy parses a list of numbers several times faster than a JSON parser.
    """
    at = line.find(_IDS)
    start = line.find(b"[", at) + 1
    stop = line.find(b"]", start)
    between = line[at + len(_IDS) : start].strip()
    if at >= 0 and stop >= 0 < start and between.replace(b" ", b"") == b":[":
        text = line[start:stop]
        if not text.translate(None, b"0123456789, "):
            try:
                ids = np.fromstring(text, np.int64, sep=",") if text.strip() else _NONE
            except ValueError:  # a warning in older versions of NumPy
                return json_object(line), None
            # NumPy replaces a number above 64 bits by the largest one.
            is_held = not len(ids) or int(ids.max()) < LARGEST
            if is_held and len(ids) == (text.count(b",") + 1 if text.strip() else 0):
                record = json_object(line[:start] + line[stop:])
                if record.get("hash_ids") == []:
                    return record, ids
    return json_object(line), None


_NONE = np.zeros(0, np.int64)


Parser = Callable[[Mapping[str, Any], "Ints | None"], tuple[Request, int]]
"""Maps an object, and its ids if they are parsed already, to a request and the block size or 0."""


def _format_of(where: Path, record: Mapping[str, Any], line: int) -> Parser:
    for mark, parser in _FORMATS.items():
        if mark in record:
            return parser
    if isinstance(record.get("input"), str) or "tokens" in record:
        fault = "is a log of text or tokens; convert it with kvstore trace anonymise"
        raise TraceError(where, fault, line)
    if "prompt_token_ids" in record:
        fault = (
            "is a log of tokens with the field names of vLLM; rename prompt_token_ids to tokens and arrival_time "
            "to timestamp, then convert it with kvstore trace anonymise"
        )
        raise TraceError(where, fault, line)
    known = ", ".join(_FORMATS)
    fault = f"expected one of {known} in each object, found {shown(list(record))}{ADVICE}"
    raise TraceError(where, fault, line)


def _mooncake(record: Mapping[str, Any], ids: Ints | None) -> tuple[Request, int]:
    row = Request(
        fields.whole_number(record, "timestamp", MILLISECOND),
        fields.count(record, "input_length"),
        fields.count(record, "output_length", 0),
        fields.ids(record, "hash_ids") if ids is None else ids,
        fields.label(record, "session_id"),
    )
    given = record.get("block_size")
    return row, 0 if given is None else fields.size(given, "block_size")


def _bailian(record: Mapping[str, Any], ids: Ints | None) -> tuple[Request, int]:
    row, _ = _mooncake(record, ids)
    # Sessions are unknown: the format numbers turns and their parents, not chats.
    return row._replace(arrival=fields.whole_number(record, "timestamp", SECOND), session=None), 16


def _lookups(record: Mapping[str, Any], _: Ints | None) -> tuple[Request, int]:
    row = Request(
        fields.whole_number(record, "timestamp", SECOND),
        fields.count(record, "seq_len"),
        0,
        fields.ids(record, "chunk_hashes"),
        None,
    )
    return row, fields.size(record.get("chunk_size"), "chunk_size")


_FORMATS: dict[str, Parser] = {"chat_id": _bailian, "hash_ids": _mooncake, "chunk_hashes": _lookups}
"""Parsers by a key that only this format has; the first key found decides."""
_BY_NAME: dict[str, Parser] = {"mooncake": _mooncake, "bailian": _bailian, "lmcache": _lookups}


def weka(where: Path, text: bytes, builder: TraceBuilder, line: int) -> Rows:
    """Read one session. Local ids are unique to it; times of sub-agents are relative to their parent's."""
    try:
        session = json_object(text)
        if "requests" not in session:
            msg = f"expected lines of objects or one object with requests, found {shown(list(session))}{ADVICE}"
            raise ValueError(msg)
        tokens = fields.size(session.get("block_size"), "block_size")
        builder.set_block_tokens(tokens)
        name = fields.label(session, "id") or where.name
        scope = session.get("hash_id_scope")
        if scope not in (None, "local", "global"):
            raise ValueError(f"expected local or global as hash_id_scope, found {shown(scope)}")
        prefix = f"{name}/" if scope == "local" else ""
        requests = list(_flat(session["requests"], 0))
        requests.sort(key=lambda each: each[0])
        for start, request in requests:
            row = Request(
                start,
                fields.count(request, "in"),
                fields.count(request, "out", 0),
                [f"{prefix}{each}" for each in fields.ids(request, "hash_ids")],
                name,
            )
            yield line, row
    except RecursionError:
        raise TraceError(where, "has too deeply nested requests", line) from None
    except ValueError as error:
        raise TraceError(where, str(error), line) from error


def _flat(requests: Any, start: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each request with its absolute time."""
    if not isinstance(requests, list):
        raise ValueError(f"expected a list as requests, found {shown(requests)}")
    for request in requests:
        if not isinstance(request, dict):
            raise ValueError(f"expected an object in requests, found {shown(request)}")
        at = start + fields.whole_number(request, "t", SECOND)
        if at >= LARGEST:
            raise ValueError(f"t is too large: {shown(request['t'])} in a nested request")
        if "requests" in request:
            yield from _flat(request["requests"], at)
        else:
            yield at, request


@dataclass(frozen=True, slots=True)
class Table:
    """Column names of a CSV of lengths."""

    time: str
    input_tokens: str
    output_tokens: str
    has_dates: bool
    """Otherwise times are seconds."""


TABLES: dict[str, Table] = {
    "azure": Table("TIMESTAMP", "ContextTokens", "GeneratedTokens", has_dates=True),
    "burstgpt": Table("Timestamp", "Request tokens", "Response tokens", has_dates=False),
}
"""By format. Source: the headers of AzurePublicDataset and of BurstGPT."""


def lengths(where: Path, lines: Iterable[bytes], table: Table, start: int) -> Rows:
    """Read a CSV whose header is line ``start``."""
    expected = (table.time, table.input_tokens, table.output_tokens)
    reader = csv.DictReader(line.decode() for line in lines)
    try:
        missing = [name for name in expected if name not in (reader.fieldnames or ())]
        if missing:
            fault = f"has no column {missing[0]}; expected {', '.join(expected)}"
            raise TraceError(where, fault, start)
        for record in reader:
            text = record[table.time]
            if table.has_dates:
                arrival = _date(text)
            else:
                arrival = fields.whole_number({table.time: _float(text)}, table.time, SECOND)
            tokens = fields.count(record, table.input_tokens)
            answer = fields.count(record, table.output_tokens)
            yield reader.line_num + start - 1, Request(arrival, tokens, answer, (), None)
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 at byte {error.start + 1:,} of the line"
        raise TraceError(where, fault, reader.line_num + start) from None
    except (ValueError, csv.Error) as error:
        raise TraceError(where, str(error), reader.line_num + start - 1) from error


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _date(text: str | None) -> int:
    """Return a date as microseconds since 1970; a date without a time zone is in UTC."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        msg = f"expected a date such as 2024-05-10 00:00:00.009930, found {shown(text)}"
        raise ValueError(msg) from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def _float(text: str | None) -> float | str | None:
    """Return a text as a number if it is one."""
    try:
        return float(text or "")
    except ValueError:
        return text
