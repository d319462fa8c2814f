"""CSV formats of traces: Azure and BurstGPT, which have lengths only."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvstore.errors import TraceError
from kvstore.trace import fields
from kvstore.trace.builder import Request
from kvstore.trace.columns import SECOND
from kvstore.trace.fields import shown
from kvstore.trace.json_formats import Rows


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
