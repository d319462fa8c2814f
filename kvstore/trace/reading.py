"""Files as traces: the format is recognised, each line is checked, a bad one is named by number.

Formats: Mooncake, Bailian and merged Weka JSONL (``hash_ids``), LMCache lookup-hash logs
(``chunk_hashes``), Weka sessions (JSON, one object a file), Azure and BurstGPT CSV (lengths only).
"""

from __future__ import annotations

import csv
import io
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.trace import fields
from kvstore.trace.chained import rekeyed
from kvstore.trace.columns import MILLISECOND, SECOND, UNKNOWN, Trace, dense, ends
from kvstore.trace.fields import LARGEST, json_object, shown
from kvstore.trace.source import BROKEN, documents

FITTING = 0.9
"""Share of requests whose lengths must agree with the block size. Lengths that are estimates agree with
the one that nobody gave in 90 to 97 % (lmcache_*_bytes64); with a wrong power of two in under 55 %."""
NAMED = -(2**31)
"""Number of the first id that is none itself: below all that are, and within 32 bits."""


Form = Literal["auto", "mooncake", "bailian", "lmcache", "weka", "azure", "burstgpt"]


class Row(NamedTuple):
    """One request as a format has it."""

    arrival: int
    """Microseconds, of whatever clock the file uses."""
    input_tokens: int
    output_tokens: int
    ids: NDArray[np.int64] | Sequence[str | int]
    session: str | None


@dataclass(slots=True)
class Columns:
    """ChainLists on their way to becoming a trace."""

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
    """ChainLists with an earlier time than one before them in their file."""
    ids: list[NDArray[np.integer]] = field(default_factory=list)
    session_numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str | int, int] = field(default_factory=dict)
    """Numbers of ids that are text, or whole numbers beyond those that are kept: from ``NAMED`` on."""

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
            ids = np.array([self._number(each) for each in ids], np.int64)
        small = not len(ids) or int(ids.max()) < 2**31
        self.ids.append(ids.astype(np.int32) if small else ids)

    def _number(self, name: str | int) -> int:
        """Return the number of an id: its own, or one that nothing else has."""
        if isinstance(name, int) and 0 <= name < LARGEST:
            return name
        return self.names.setdefault(name, NAMED + len(self.names))

    def trace(self, name: str, options: Options) -> Trace:
        """Return the rows as a trace: sorted, ids dense, block size known."""
        arrival = _column(self.arrival)
        if not len(arrival):
            raise TraceError(self.path, "holds no request", int(not self.path.is_dir()))
        order = np.argsort(arrival, kind="stable")
        if self.late and options.unsorted == "refuse":
            line = self.lines[self.late[0]]
            raise TraceError(self.path, "is earlier than a request before it", line)
        paths = [self.ids[i] for i in order]
        offsets = ends(np.array([len(path) for path in paths], np.int64))
        flat = np.concatenate(paths)
        self.ids = paths = []
        if self.names:
            flat = flat.astype(np.int64) - int(flat.min())
        blocks, distinct = dense(flat)
        input_tokens = _column(self.input_tokens)[order]
        output_tokens = _column(self.output_tokens)[order]
        if (
            max(float(input_tokens.sum(dtype=float)), float(output_tokens.sum(dtype=float)))
            > LARGEST
        ):
            raise TraceError(self.path, f"has lengths that add up to more than {LARGEST:,} tokens")
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
            output_tokens=output_tokens,
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
        """Refuse lengths that contradict the block size: it is another, or the format is.

        A prompt may lack the ids of a last partial block, and of one more where its length was
        estimated. No request may have more ids than its tokens fill, and few may have fewer.
        """
        more = blocks > -(-tokens // size)
        fewer = (blocks > 0) & (tokens // size > blocks + 1)
        bad = np.flatnonzero(more)
        if not len(bad) and fewer.sum() > (1 - FITTING) * (blocks > 0).sum():
            bad = np.flatnonzero(fewer)
        if len(bad):
            at = int(bad[0])
            best, share = _best_size(tokens, blocks)
            hint = f" ({best} tokens fits {share:.0%} of the requests)" if share >= FITTING else ""
            raise TraceError(
                self.path,
                f"{blocks[at]:,} block ids for {tokens[at]:,} tokens contradict blocks of {size} tokens, "
                f"as do {len(bad):,} of {len(blocks):,} requests; give the block size of this trace"
                f"{hint} or another format",
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

    def __post_init__(self) -> None:
        """Refuse a block size that no trace can have."""
        if self.block_tokens:
            fields.size(self.block_tokens, "a block size")


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
    number, first = 1, stream.readline()
    while first and not first.strip():
        number, first = number + 1, stream.readline()
    head, form = first[:64].lstrip(), options.form
    named = [name for name, table in TABLES.items() if head.startswith(table.time.encode() + b",")]
    if form in TABLES or (form == "auto" and named):
        table = TABLES[form if form in TABLES else named[0]]
        rows: Iterable[tuple[int, Row]] = _lengths(where, chain([first], stream), table, number)
    elif form == "weka":
        rows = _weka(where, first + stream.read(), columns, number)
    elif head.startswith(b"{"):
        rows = _json_rows(where, number, first, stream, columns, options)
    elif head:
        raise TraceError(
            where, f"is of no known format: it begins with {head[:32]!r}{_ADVICE}", number
        )
    else:
        rows = ()
    for line, row in rows:
        columns.add(row, line)


_ADVICE = (
    "; make lines of it with timestamp, and tokens (ids of the prompt as the model sees it) or input "
    "(its text), then a trace of them: kvstore trace anonymise"
)
"""What to do with a log that is no trace."""


def _json_rows(
    where: Path,
    start: int,
    first: bytes,
    stream: io.BufferedReader,
    columns: Columns,
    options: Options,
) -> Iterator[tuple[int, Row]]:
    """Read lines of objects, of which ``first`` is line ``start``, or one object of many lines."""
    try:
        record, _ = _parsed(first)
    except ValueError:
        record = None
    named = _BY_NAME.get(options.form)
    if named is not None:
        parse = named
    elif record is None or "requests" in record:  # one object that may take many lines
        yield from _weka(where, first + stream.read(), columns, start)
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
            if columns.block_tokens not in {0, block_tokens}:
                size = f"{block_tokens} tokens" if block_tokens else "a size that it does not tell"
                msg = f"has blocks of {size} after blocks of {columns.block_tokens} tokens"
                raise ValueError(msg)
        except ValueError as error:
            raise TraceError(where, str(error), number) from error
        columns.block_tokens = block_tokens
        yield number, row


_IDS = b'"hash_ids"'


def _parsed(line: bytes) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
    """Return a line's object, and its ``hash_ids`` apart if they are plain numbers below 2**62.

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
                return json_object(line), None
            # NumPy makes what 64 bits do not hold the largest that they do.
            is_held = not len(ids) or int(ids.max()) < LARGEST
            if is_held and len(ids) == (text.count(b",") + 1 if text.strip() else 0):
                record = json_object(line[:start] + line[stop:])
                if record.get("hash_ids") == []:
                    return record, ids
    return json_object(line), None


_NONE = np.zeros(0, np.int64)


Parser = Callable[[Mapping[str, Any], "NDArray[np.int64] | None"], tuple[Row, int]]
"""From an object, and its ids if they are parsed already, to a row and the block size or 0."""


def _format_of(where: Path, record: Mapping[str, Any], line: int) -> Parser:
    for mark, parser in _FORMATS.items():
        if mark in record:
            return parser
    if isinstance(record.get("input"), str) or "tokens" in record:
        raise TraceError(
            where, "is a log of text or tokens; make a trace of it: kvstore trace anonymise", line
        )
    if "prompt_token_ids" in record:
        fault = (
            "is a log of tokens under names of vLLM; rename prompt_token_ids to tokens and arrival_time "
            "to timestamp, then make a trace of it: kvstore trace anonymise"
        )
        raise TraceError(where, fault, line)
    known = ", ".join(_FORMATS)
    fault = f"expected one of {known} in each object, found {shown(list(record))}{_ADVICE}"
    raise TraceError(where, fault, line)


def _mooncake(record: Mapping[str, Any], ids: NDArray[np.int64] | None) -> tuple[Row, int]:
    row = Row(
        fields.whole_number(record, "timestamp", MILLISECOND),
        fields.count(record, "input_length"),
        fields.count(record, "output_length", 0),
        fields.ids(record, "hash_ids") if ids is None else ids,
        fields.label(record, "session_id"),
    )
    given = record.get("block_size")
    return row, 0 if given is None else fields.size(given, "block_size")


def _bailian(record: Mapping[str, Any], ids: NDArray[np.int64] | None) -> tuple[Row, int]:
    row, _ = _mooncake(record, ids)
    # One number a chat is not given, only each turn's own and its parent's: no session is known.
    return row._replace(arrival=fields.whole_number(record, "timestamp", SECOND), session=None), 16


def _lookups(record: Mapping[str, Any], _: NDArray[np.int64] | None) -> tuple[Row, int]:
    row = Row(
        fields.whole_number(record, "timestamp", SECOND),
        fields.count(record, "seq_len"),
        0,
        fields.ids(record, "chunk_hashes"),
        None,
    )
    return row, fields.size(record.get("chunk_size"), "chunk_size")


_FORMATS: dict[str, Parser] = {
    "chat_id": _bailian,
    "hash_ids": _mooncake,
    "chunk_hashes": _lookups,
}
"""By a key that marks a format; the first that an object has decides."""
_BY_NAME: dict[str, Parser] = {"mooncake": _mooncake, "bailian": _bailian, "lmcache": _lookups}


def _weka(where: Path, text: bytes, columns: Columns, line: int) -> Iterator[tuple[int, Row]]:
    """Read one session: its ids hold inside it alone, sub-agents start at their parent's time."""
    try:
        session = json_object(text)
        if "requests" not in session:
            msg = (
                "expected lines of objects or one object with requests, "
                f"found {shown(list(session))}{_ADVICE}"
            )
            raise ValueError(msg)
        tokens = fields.size(session.get("block_size"), "block_size")
        if columns.block_tokens not in {0, tokens}:
            msg = f"has blocks of {tokens} tokens after blocks of {columns.block_tokens} tokens"
            raise ValueError(msg)
        columns.block_tokens = tokens
        name = fields.label(session, "id") or where.name
        scope = session.get("hash_id_scope")
        if scope not in (None, "local", "global"):
            msg = f"expected local or global as hash_id_scope, found {shown(scope)}"
            raise ValueError(msg)
        prefix = f"{name}/" if scope == "local" else ""
        requests = list(_flat(session["requests"], 0))
        requests.sort(key=lambda each: each[0])
        for start, request in requests:
            row = Row(
                start,
                fields.count(request, "in"),
                fields.count(request, "out", 0),
                [f"{prefix}{each}" for each in fields.ids(request, "hash_ids")],
                name,
            )
            yield line, row
    except RecursionError:
        raise TraceError(where, "has requests that are nested too deeply", line) from None
    except ValueError as error:
        raise TraceError(where, str(error), line) from error


def _flat(requests: Any, start: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each request with its time, sub-agents' at their own time after their parent's."""
    if not isinstance(requests, list):
        msg = f"expected a list as requests, found {shown(requests)}"
        raise ValueError(msg)
    for request in requests:
        if not isinstance(request, dict):
            msg = f"expected an object in requests, found {shown(request)}"
            raise ValueError(msg)
        at = start + fields.whole_number(request, "t", SECOND)
        if at >= LARGEST:
            msg = f"t is too large: {shown(request['t'])} in a request of a request"
            raise ValueError(msg)
        if "requests" in request:
            yield from _flat(request["requests"], at)
        else:
            yield at, request


@dataclass(frozen=True, slots=True)
class Table:
    """A CSV of lengths: its columns of the time, the prompt's tokens and the answer's."""

    time: str
    input_tokens: str
    output_tokens: str
    has_dates: bool
    """Else times are seconds."""


TABLES: dict[str, Table] = {
    "azure": Table("TIMESTAMP", "ContextTokens", "GeneratedTokens", has_dates=True),
    "burstgpt": Table("Timestamp", "Request tokens", "Response tokens", has_dates=False),
}
"""By format. Source: the headers of AzurePublicDataset and of BurstGPT."""


def _lengths(
    where: Path, lines: Iterable[bytes], table: Table, start: int
) -> Iterator[tuple[int, Row]]:
    """Read a CSV whose header is line ``start``."""
    expected = (table.time, table.input_tokens, table.output_tokens)
    reader = csv.DictReader(line.decode() for line in lines)
    try:
        missing = [name for name in expected if name not in (reader.fieldnames or ())]
        if missing:
            fault = f"has no column {missing[0]}; expected {', '.join(expected)}"
            raise TraceError(where, fault, start)
        for record in reader:
            row = Row(
                _date(record[table.time])
                if table.has_dates
                else fields.whole_number(
                    {table.time: _float(record[table.time])}, table.time, SECOND
                ),
                fields.count(record, table.input_tokens),
                fields.count(record, table.output_tokens),
                _NONE,
                None,
            )
            yield reader.line_num + start - 1, row
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 at byte {error.start + 1:,} of the line"
        raise TraceError(where, fault, reader.line_num + start) from None
    except (ValueError, csv.Error) as error:
        raise TraceError(where, str(error), reader.line_num + start - 1) from error


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _date(text: str | None) -> int:
    """Return microseconds since 1970 of a date; one without a zone is in UTC."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        msg = f"expected a date such as 2024-05-10 00:00:00.009930, found {shown(text)}"
        raise ValueError(msg) from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def _float(text: str | None) -> float | str | None:
    """Return the number that a text is, or what it is else."""
    try:
        return float(text or "")
    except ValueError:
        return text


def _column(values: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)


def _inferred(path: Path, tokens: NDArray[np.int64], blocks: NDArray[np.int64]) -> int:
    """Return the power of two that most lengths agree with, if it is most of them."""
    best, share = _best_size(tokens, blocks)
    if share < FITTING:
        raise TraceError(
            path,
            f"does not tell its block size ({best} tokens fits {share:.0%} of it); give it (--block-size)",
        )
    return best


def _best_size(tokens: NDArray[np.int64], blocks: NDArray[np.int64]) -> tuple[int, float]:
    """Return the power of two that most lengths agree with, whole blocks or a partial last one."""
    used = blocks > 0
    tokens, blocks = tokens[used], blocks[used]
    best, share = 0, 0.0
    for size in (1 << exponent for exponent in range(13)):
        for filled in (-(-tokens // size), tokens // size):
            agreeing = float((filled == blocks).mean())
            if agreeing > share:
                best, share = size, agreeing
    return best, share
