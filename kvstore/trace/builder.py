"""Builder of a trace from the requests of log files: sorted, with dense ids and a checked block size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TraceError
from kvstore.trace import fields
from kvstore.trace.chained import rekeyed
from kvstore.trace.columns import UNKNOWN, Ints, Trace, dense, ends
from kvstore.trace.fields import LARGEST

FITTING = 0.9
"""Share of requests whose lengths must agree with the block size. Estimated lengths agree in 90 to 97 %
(lmcache_*_bytes64), with a wrong power of two in under 55 %."""
NAMED = -(2**31)
"""First number of ids that are not their own number: below all others, and within 32 bits."""
Form = Literal["auto", "mooncake", "bailian", "lmcache", "weka", "azure", "burstgpt"]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of reading."""

    block_tokens: int = 0
    """Tokens of a block; 0 for the size in the file, or else the size that its lengths agree with."""
    unsorted: Literal["sort", "refuse"] = "sort"
    unchained: Literal["refuse", "rekey"] = "refuse"
    """Whether ids that name a block alone are refused (when chains are made of them) or re-keyed."""
    form: Form = "auto"
    """Format; ``auto`` recognises it by its first bytes."""
    model: str | None = None
    """Read only requests of this model, where the format names one."""

    def __post_init__(self) -> None:
        """Refuse an impossible block size."""
        if self.block_tokens:
            fields.size(self.block_tokens, "a block size")


DEFAULTS = Options()


class Request(NamedTuple):
    """One request of a log."""

    arrival: int
    """Microseconds, on the clock of the file."""
    input_tokens: int
    output_tokens: int
    ids: Ints | Sequence[str | int]
    session: str | None


@dataclass(slots=True)
class TraceBuilder:
    """Collector of the requests of one or more files."""

    path: Path
    block_tokens: int = 0
    arrival: array[int] = field(default_factory=lambda: array("q"))
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    sessions: array[int] = field(default_factory=lambda: array("i"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    latest: int = 0
    """Latest time in the current file; each file has its own clock, as rotated logs and sessions do."""
    late: list[int] = field(default_factory=list)
    """Requests with an earlier time than one before them in the same file."""
    ids: list[NDArray[np.integer]] = field(default_factory=list)
    session_numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str | int, int] = field(default_factory=dict)
    """Numbers, from ``NAMED`` on, of ids that are text or integers outside the kept range."""

    def add(self, row: Request, line: int) -> None:
        """Add a request that was found in this line."""
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

    def set_block_tokens(self, tokens: int) -> None:
        """Record a block size, 0 for unknown. Raises ``ValueError`` if an earlier one differs."""
        if self.block_tokens not in {0, tokens}:
            size = f"{tokens} tokens" if tokens else "unknown size"
            raise ValueError(f"has blocks of {size} after blocks of {self.block_tokens} tokens")
        self.block_tokens = tokens

    def _number(self, name: str | int) -> int:
        """Return the number of an id: its own value, or another unique one."""
        if isinstance(name, int) and 0 <= name < LARGEST:
            return name
        return self.names.setdefault(name, NAMED + len(self.names))

    def trace(self, name: str, options: Options) -> Trace:
        """Return the requests as a trace."""
        arrival = _column(self.arrival)
        if not len(arrival):
            raise TraceError(self.path, "holds no request", int(not self.path.is_dir()))
        order = np.argsort(arrival, kind="stable")
        if self.late and options.unsorted == "refuse":
            line = self.lines[self.late[0]]
            raise TraceError(self.path, "is earlier than a request before it", line)
        chains = [self.ids[i] for i in order]
        offsets = ends(np.array([len(chain) for chain in chains], np.int64))
        flat = np.concatenate(chains)
        self.ids = chains = []
        if self.names:
            flat = flat.astype(np.int64) - int(flat.min())
        blocks, distinct = dense(flat)
        input_tokens = _column(self.input_tokens)[order]
        output_tokens = _column(self.output_tokens)[order]
        totals = (input_tokens.sum(dtype=float), output_tokens.sum(dtype=float))
        if max(totals) > LARGEST:
            raise TraceError(self.path, f"has lengths that add up to more than {LARGEST:,} tokens")
        block_tokens = 0
        if len(blocks):
            lines, counts = _column(self.lines)[order], np.diff(offsets)
            block_tokens = options.block_tokens or self.block_tokens
            block_tokens = block_tokens or _inferred(self.path, input_tokens, counts)
            self._check_lengths(input_tokens, counts, block_tokens, lines)
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

    def _check_lengths(self, tokens: Ints, blocks: Ints, size: int, lines: Ints) -> None:
        """Refuse lengths that contradict the block size.

        No request may have more ids than its tokens fill. A share of ``FITTING`` may have at most two fewer:
        of a partial last block, and of one block where the length is an estimate.
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
            msg = (
                f"{blocks[at]:,} block ids for {tokens[at]:,} tokens contradict blocks of {size} tokens, in "
                f"{len(bad):,} of {len(blocks):,} requests; give the block size of this trace{hint} or another format"
            )
            raise TraceError(self.path, msg, int(lines[at]))


def _column(values: array[int]) -> Ints:
    return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)


def _inferred(path: Path, tokens: Ints, blocks: Ints) -> int:
    """Return the power of two that a share of ``FITTING`` of the lengths agrees with."""
    best, share = _best_size(tokens, blocks)
    if share < FITTING:
        msg = f"has no block size ({best} tokens fits {share:.0%} of the requests); give it (--block-size)"
        raise TraceError(path, msg)
    return best


def _best_size(tokens: Ints, blocks: Ints) -> tuple[int, float]:
    """Return the power of two that most lengths agree with, and their share."""
    used = blocks > 0
    tokens, blocks = tokens[used], blocks[used]
    best, share = 0, 0.0
    for size in (1 << exponent for exponent in range(13)):
        for filled in (-(-tokens // size), tokens // size):
            agreeing = float((filled == blocks).mean())
            if agreeing > share:
                best, share = size, agreeing
    return best, share
