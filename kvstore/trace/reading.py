"""Files as traces: the format is recognised, each line is checked, a bad one is named by number.

Formats: Mooncake, Bailian and merged Weka JSONL (``hash_ids``), LMCache lookup-hash logs
(``chunk_hashes``), Weka sessions (JSON, one object a file), Azure CSV (lengths only).
"""

from __future__ import annotations

import csv
import io
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.trace.chained import rekeyed
from kvstore.trace.columns import MILLISECOND, SECOND, UNKNOWN, Trace, dense, ends
from kvstore.trace.source import BROKEN, documents

LARGEST = 2**62
"""Bound of every number in a trace, so that sums of a few stay within 64 bits."""
FITTING = 0.9
"""Share of requests whose lengths must agree with a block size that nobody gave. Lengths that are
estimates agree in 98 % (lmcache_*_bytes64); those of a wrong power of two in under 55 %."""


Form = Literal["auto", "mooncake", "bailian", "lmcache", "weka", "azure"]


class Row(NamedTuple):
    """One request as a format has it."""

    arrival: int
    """Microseconds, of whatever clock the file uses."""
    input_tokens: int
    output_tokens: int
    ids: NDArray[np.int64] | Sequence[str]
    session: str | None


@dataclass(slots=True)
class Columns:
    """Rows on their way to becoming a trace."""

    path: Path
    block_tokens: int = 0
    arrival: array[int] = field(default_factory=lambda: array("q"))
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    sessions: array[int] = field(default_factory=lambda: array("i"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    latest: int = 0
    """Latest time in the present file: each has a clock of its own, as rotated logs and sessions do."""
    late: list[int] = field(default_factory=list)
    """Rows with an earlier time than one before them in their file."""
    ids: list[NDArray[np.integer]] = field(default_factory=list)
    session_numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    """Numbers of ids that are text."""

    def add(self, row: Row, line: int) -> None:
        """Take one more row, found in this line."""
        if row.arrival < self.latest:
            self.late.append(len(self.arrival))
        self.latest = max(self.latest, row.arrival)
        self.arrival.append(row.arrival)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        self.lines.append(line)
        name, numbers = row.session, self.session_numbers
        self.sessions.append(UNKNOWN if name is None else numbers.setdefault(name, len(numbers)))
        ids = row.ids
        if not isinstance(ids, np.ndarray):
            known = self.names
            ids = np.array([known.setdefault(each, len(known)) for each in ids], np.int64)
        small = not len(ids) or int(ids.max()) < 2**31
        self.ids.append(ids.astype(np.int32) if small else ids)

    def trace(self, name: str, options: Options) -> Trace:
        """Return the rows as a trace: sorted, ids dense, block size known."""
        arrival = _column(self.arrival)
        if not len(arrival):
            raise TraceError(self.path, "holds no request")
        order = np.argsort(arrival, kind="stable")
        if self.late and options.unsorted == "refuse":
            line = self.lines[self.late[0]]
            raise TraceError(self.path, "is earlier than a request before it", line)
        paths = [self.ids[i] for i in order]
        offsets = ends(np.array([len(path) for path in paths], np.int64))
        flat = np.concatenate(paths)
        self.ids = paths = []
        blocks, distinct = dense(flat)
        input_tokens = _column(self.input_tokens)[order]
        block_tokens = 0
        if len(blocks):
            lines = _column(self.lines)[order]
            block_tokens = (
                options.block_tokens
                or self.block_tokens
                or _inferred(self.path, input_tokens, np.diff(offsets))
            )
            self._check_lengths(input_tokens, np.diff(offsets), block_tokens, lines)
        if options.unchained == "rekey":
            blocks, distinct = rekeyed(blocks, offsets)
        arrival = arrival[order]
        return Trace(
            name=name,
            block_tokens=block_tokens,
            arrival=arrival - arrival[0],
            input_tokens=input_tokens,
            output_tokens=_column(self.output_tokens)[order],
            sessions=np.array(self.sessions, np.int32)[order],
            offsets=offsets,
            blocks=blocks,
            distinct_blocks=distinct,
            reordered=len(self.late),
        )

    def _check_lengths(
        self,
        tokens: NDArray[np.int64],
        blocks: NDArray[np.int64],
        size: int,
        lines: NDArray[np.int64],
    ) -> None:
        """Refuse a request with more blocks than its tokens fill: the block size is another."""
        bad = np.flatnonzero(blocks > -(-tokens // size))
        if len(bad):
            at = int(bad[0])
            raise TraceError(
                self.path,
                f"{blocks[at]:,} block ids for {tokens[at]:,} tokens, found with blocks of {size} "
                "tokens; give the block size of this trace",
                int(lines[at]),
            )


@dataclass(frozen=True, slots=True)
class Options:
    """What a file may leave open."""

    block_tokens: int = 0
    """Tokens of a block; 0 is what the file says, or else what its lengths agree with."""
    unsorted: Literal["sort", "refuse"] = "sort"
    unchained: Literal["refuse", "rekey"] = "refuse"
    """What to do with ids that name a block alone. They are refused when they are made paths."""
    form: Form = "auto"
    """What it is; ``auto`` is told by how it begins."""
    model: str | None = None
    """Read requests of this model only, where the format names one."""


def read(path: Path | str, options: Options = Options()) -> Trace:
    """Read a trace: a file (plain, gzip, zstd or tar), a directory of files, or ``-``.

    Raises:
        TraceError: naming the file, the line, what was found and what was expected.

    Cost: 0.05 microseconds a block id; 4 bytes an id are kept, 4 more while it is read.
    """
    path = Path(path)
    columns = Columns(path)
    name = path.name.split(".")[0] if str(path) != "-" else "stdin"
    with warnings.catch_warnings():
        # NumPy's of what is no row of numbers: it is seen by its length.
        warnings.simplefilter("ignore", DeprecationWarning)
        for document, stream in documents(path):
            where = path if document == path.name else path / document
            columns.latest = 0
            try:
                _read_document(where, stream, columns, options)
            except BROKEN as error:
                raise TraceError(where, f"cannot be decompressed: {error}") from error
    return columns.trace(name, options)


def _read_document(
    where: Path, stream: io.BufferedReader, columns: Columns, options: Options
) -> None:
    head = stream.peek(1)[:64].lstrip()
    form = options.form
    if form == "azure" or (form == "auto" and head.startswith(b"TIMESTAMP,")):
        rows: Iterable[tuple[int, Row]] = _azure(where, stream)
    elif form == "weka":
        rows = _weka(where, stream.read(), columns)
    elif head.startswith(b"{"):
        rows = _json_rows(where, stream, columns, options)
    elif head:
        raise TraceError(where, f"is of no known format: it begins with {head[:32]!r}", 1)
    else:
        rows = ()
    for line, row in rows:
        columns.add(row, line)


def _json_rows(
    where: Path, stream: io.BufferedReader, columns: Columns, options: Options
) -> Iterator[tuple[int, Row]]:
    first = stream.readline()
    try:
        record, _ = _parsed(first)
    except ValueError:
        record = None
    named = _BY_NAME.get(options.form)
    if named is not None:
        parse = named
    elif record is None or "requests" in record:  # one object that may take many lines
        yield from _weka(where, first + stream.read(), columns)
        return
    else:
        parse = _format_of(where, record)
    for number, line in enumerate(chain([first], stream), 1):
        if not line.strip():
            continue
        try:
            record, ids = _parsed(line)
            if options.model is not None and record.get("model_name") != options.model:
                continue
            row, block_tokens = parse(record, ids)
            if columns.block_tokens not in {0, block_tokens}:
                msg = f"blocks of {block_tokens} tokens after blocks of {columns.block_tokens}"
                raise ValueError(msg)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(where, str(error), number) from error
        columns.block_tokens = block_tokens
        yield number, row


_IDS = b'"hash_ids"'


def _parsed(line: bytes) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
    """Return a line's object, and its ``hash_ids`` apart if they are plain numbers.

    NumPy reads a row of numbers several times faster than a JSON parser makes objects of them.
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
            except ValueError:  # what NumPy warns of in older versions
                return _object(line), None
            if len(ids) == (text.count(b",") + 1 if text.strip() else 0):
                record = _object(line[:start] + line[stop:])
                if record.get("hash_ids") == []:
                    return record, ids
    return _object(line), None


_NONE = np.zeros(0, np.int64)


def _object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        msg = f"is not JSON: {error}"
        raise ValueError(msg) from error
    if not isinstance(record, dict):
        msg = f"expected an object, found {type(record).__name__}"
        raise TypeError(msg)
    return record


Parser = Callable[[Mapping[str, Any], "NDArray[np.int64] | None"], tuple[Row, int]]
"""From an object, and its ids if they are parsed already, to a row and the block size or 0."""


def _format_of(where: Path, record: Mapping[str, Any]) -> Parser:
    for mark, parser in _FORMATS.items():
        if mark in record:
            return parser
    if isinstance(record.get("input"), str) or "messages" in record or "tokens" in record:
        raise TraceError(
            where, "is a log of text or tokens; make a trace of it: kvstore trace anonymise", 1
        )
    known = ", ".join(_FORMATS)
    raise TraceError(where, f"expected one of {known} in each object, found {list(record)}", 1)


def _mooncake(record: Mapping[str, Any], ids: NDArray[np.int64] | None) -> tuple[Row, int]:
    session = record.get("session_id")
    row = Row(
        whole_number(record, "timestamp", MILLISECOND),
        _count(record, "input_length"),
        _count(record, "output_length", 0),
        _ids(record, "hash_ids") if ids is None else ids,
        None if session is None else str(session),
    )
    size = record.get("block_size")
    return row, 0 if size is None else _size(size, "block_size")


def _bailian(record: Mapping[str, Any], ids: NDArray[np.int64] | None) -> tuple[Row, int]:
    row, _ = _mooncake(record, ids)
    # One number a chat is not given, only each turn's own and its parent's: no session is known.
    return row._replace(arrival=whole_number(record, "timestamp", SECOND), session=None), 16


def _lookups(record: Mapping[str, Any], _: NDArray[np.int64] | None) -> tuple[Row, int]:
    row = Row(
        whole_number(record, "timestamp", SECOND),
        _count(record, "seq_len"),
        0,
        _ids(record, "chunk_hashes"),
        None,
    )
    return row, _size(record.get("chunk_size"), "chunk_size")


_FORMATS: dict[str, Parser] = {
    "chat_id": _bailian,
    "hash_ids": _mooncake,
    "chunk_hashes": _lookups,
}
"""By a key that marks a format; the first that an object has decides."""
_BY_NAME: dict[str, Parser] = {"mooncake": _mooncake, "bailian": _bailian, "lmcache": _lookups}


def _weka(where: Path, text: bytes, columns: Columns) -> Iterator[tuple[int, Row]]:
    """Read one session: its ids hold inside it alone, sub-agents start at their parent's time."""
    try:
        session = _object(text)
        if "requests" not in session:
            msg = f"expected lines of objects or one object with requests, found {list(session)}"
            raise ValueError(msg)
        size = _size(session.get("block_size"), "block_size")
        if columns.block_tokens not in {0, size}:
            msg = f"blocks of {size} tokens after blocks of {columns.block_tokens}"
            raise ValueError(msg)
        columns.block_tokens = size
        name = str(session.get("id", where.name))
        is_local = session.get("hash_id_scope") == "local"
        requests = list(_flat(session["requests"], 0))
        requests.sort(key=lambda each: each[0])
        for start, request in requests:
            ids: Sequence[str] | NDArray[np.int64] = _ids(request, "hash_ids")
            scope = f"{name}/" if is_local else ""
            row = Row(
                start,
                _count(request, "in"),
                _count(request, "out", 0),
                [f"{scope}{each}" for each in ids],
                name,
            )
            yield 1, row
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(where, str(error), 1) from error


def _flat(requests: Iterable[Any], start: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each request with its time, sub-agents' at their own time after their parent's."""
    for request in requests:
        if not isinstance(request, dict):
            msg = f"expected an object in requests, found {type(request).__name__}"
            raise TypeError(msg)
        at = start + whole_number(request, "t", SECOND)
        if "requests" in request:
            yield from _flat(request["requests"], at)
        else:
            yield at, request


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _azure(where: Path, stream: io.BufferedReader) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(line.decode() for line in stream)
    try:
        missing = [name for name in _AZURE if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(where, f"has no column {missing[0]}; expected {', '.join(_AZURE)}", 1)
        for record in reader:
            row = Row(
                _date(record["TIMESTAMP"]),
                _count(record, "ContextTokens"),
                _count(record, "GeneratedTokens"),
                _NONE,
                None,
            )
            yield reader.line_num, row
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise TraceError(where, str(error), reader.line_num) from error


def _date(text: str) -> int:
    """Return microseconds since 1970 of a date with up to seven digits of a second."""
    whole, _, fraction = text.partition(".")
    moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return int(moment.timestamp()) * SECOND + int(f"{fraction[:6]:0<6}")


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"expected a number as {name}, found {value!r}"
        raise ValueError(msg)
    if not 0 <= value < LARGEST:  # a NaN is in no range
        msg = f"expected {name} from 0 to below {LARGEST:,}, found {value}"
        raise ValueError(msg)
    return value


def whole_number(record: Mapping[str, Any], name: str, unit: int) -> int:
    """Return a field times a unit, rounded to a whole number.

    Raises:
        ValueError: if it is no number, negative or too large.
    """
    value = _number(record, name)
    time = value * unit if isinstance(value, int) else round(value * unit)
    if time >= LARGEST:
        msg = f"{name} is too large: {value}"
        raise ValueError(msg)
    return time


def _count(record: Mapping[str, Any], name: str, absent: int | None = None) -> int:
    if absent is not None and record.get(name) is None:
        return absent
    value = _number(record, name)
    if value != int(value):
        msg = f"expected a whole number as {name}, found {value}"
        raise ValueError(msg)
    return int(value)


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        msg = f"expected {name} of 1 or more, found {value!r}"
        raise ValueError(msg)
    return value


def _ids(record: Mapping[str, Any], name: str) -> NDArray[np.int64] | list[str]:
    """Return ids as an array if they are numbers of 0 or more, else as text."""
    values = record.get(name)
    if not isinstance(values, list):
        msg = f"expected a list as {name}, found {values!r}"[:200]
        raise ValueError(msg)
    if all(type(each) is int and 0 <= each < LARGEST for each in values):
        return np.array(values, np.int64)
    if not all(isinstance(each, str | int) and not isinstance(each, bool) for each in values):
        wrong = next(each for each in values if not isinstance(each, str | int))
        msg = f"expected numbers or strings in {name}, found {wrong!r}"
        raise ValueError(msg)
    return [str(each) for each in values]


def _column(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)


def _inferred(path: Path, tokens: NDArray[np.int64], blocks: NDArray[np.int64]) -> int:
    """Return the power of two that most lengths agree with, whole blocks or a partial last one."""
    used = blocks > 0
    tokens, blocks = tokens[used], blocks[used]
    best, share = 0, 0.0
    for size in (1 << exponent for exponent in range(13)):
        for filled in (-(-tokens // size), tokens // size):
            agreeing = float((filled == blocks).mean())
            if agreeing > share:
                best, share = size, agreeing
    if share < FITTING:
        raise TraceError(
            path,
            f"does not tell its block size ({best} tokens fits {share:.0%} of it); give it (--block-size)",
        )
    return best
