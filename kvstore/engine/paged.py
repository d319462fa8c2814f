"""Decisions for an engine that keeps KV in pages and schedules in steps: values in, values out.

Positions are token positions of one request. A *page* is a block of the engine, of ``page_tokens``
tokens; a *block* is ours. It knows no engine's classes, no tensor, no file and no clock.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvstore
from kvstore.errors import ConfigError

LEAST_BLOCK_TOKENS = 128
"""Tokens of a block where the engine's pages are no larger: few enough to hit, enough to read."""


def block_tokens_for(page_tokens: Collection[int]) -> int:
    """Return the block size that is a whole number of pages of every group of an engine.

    A hit then always ends where a page ends, which is where an engine can take it over.
    """
    return math.lcm(LEAST_BLOCK_TOKENS, *page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a request wishes for its own blocks."""

    store: bool = True
    """False: read what is there, keep nothing of this request."""
    pin: bool = False
    ttl: float | None = None
    """Seconds to keep its blocks; None until eviction."""

    @classmethod
    def of(cls, wishes: object) -> Hints:
        """Return the hints in a request's own words, a mapping of the fields of this class.

        Raises:
            ConfigError: for anything that is not such a mapping.
        """
        if wishes is None:
            return cls()
        if not isinstance(wishes, Mapping):
            msg = f"hints must be a mapping such as {{'ttl': 60}}, found {type(wishes).__name__}"
            raise ConfigError(msg)
        unknown = sorted(str(name) for name in wishes if name not in ("store", "pin", "ttl"))
        if unknown:
            msg = f"unknown hints {', '.join(unknown)}, expected store, pin or ttl"
            raise ConfigError(msg)
        values: dict[str, Any] = dict(wishes)
        for name in ("store", "pin"):
            if not isinstance(values.get(name, False), bool):
                msg = f"hint {name} must be true or false, found {values[name]!r}"
                raise ConfigError(msg)
        ttl = values.get("ttl")
        is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
        if ttl is not None and not (is_number and 0 < ttl <= sys.float_info.max):
            msg = f"hint ttl must be positive seconds, found {ttl!r}"
            raise ConfigError(msg)
        return cls(**values)


def settled_tokens(known: int, computed: int, scheduled: int) -> int:
    """Return how many leading tokens have final KV once the step that is being planned has run.

    ``known`` counts the tokens that the engine has accepted: a draft beyond them may be rejected,
    and its KV overwritten. ``computed`` and ``scheduled`` count those that the engine had run, and
    runs in this step, drafts included.
    """
    return min(known, computed + scheduled)


@dataclass(slots=True)
class Saving:
    """How far the saving of one request has come.

    At most one save of a request is under way: what a busy store cannot take at once becomes one
    larger save later, and the number of saves is bounded by the number of requests.
    """

    saved: int = 0
    """Tokens that need no saving: found stored, or answered by every writer."""
    underway: int | None = None
    """Where the save that is under way ends."""
    _offered: int = 0
    """Where the last save ended, whatever became of it."""
    _unanswered: int = 0
    _least: int = 0

    def start(self, settled: int, block_tokens: int, writers: int) -> tuple[int, int] | None:
        """Return the span ``[start, stop)`` to save now, or None; it is then under way."""
        stop = settled // block_tokens * block_tokens
        if self.underway is not None or stop <= max(self.saved, self._offered):
            return None
        self.underway = self._offered = self._least = stop
        self._unanswered = writers
        return self.saved, stop

    def finish(self, settled: int, block_tokens: int, writers: int) -> tuple[int, int] | None:
        """Return what is left to save of a request that ends, also while a save is under way."""
        begun, unanswered = self.underway, self._unanswered
        self.saved, self.underway = max(self.saved, begun or 0), None
        self._offered = 0  # what was dropped gets its last chance
        span = self.start(settled, block_tokens, writers)
        if span is None:
            self.underway = begun
        elif begun is not None:
            self._unanswered += unanswered
        return span

    def answer(self, end: int) -> None:
        """Take in how far one writer came with the save that is under way.

        What a full queue dropped is offered again with the next block that the request completes.
        """
        if self.underway is None:
            return
        self._unanswered -= 1
        self._least = min(self._least, end)
        if not self._unanswered:
            self.saved = max(self.saved, self._least)
            self.underway = None


def window_boundaries(before: int, settled: int, prompt: int, block_tokens: int) -> tuple[int, ...]:
    """Return the block boundaries in ``(before, settled]`` whose windows are worth taking.

    They are those where a later request can continue: the last one of the prompt of ``prompt``
    tokens, the one before it where the prompt ends on a boundary (an exact repeat has to compute its
    last token), and the last one of the output so far. At most two.
    """
    last = settled // block_tokens * block_tokens
    least = (prompt - 1) // block_tokens * block_tokens
    candidates = range(max(least, last - block_tokens), last + 1, block_tokens)
    return tuple(stop for stop in candidates if stop > before)


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of a window that ends at a block boundary.

    ``[start, stop)`` are whole pages of every group; ``first`` is the first token whose row is needed.
    A query reads W tokens, its own included, so W - 1 rows below ``stop``.
    """

    start: int
    stop: int
    first: int

    @classmethod
    def of(cls, stop: int, window_tokens: int, page_tokens: Collection[int]) -> WindowPages:
        """Return the pages of the window that ends at ``stop``, a multiple of all ``page_tokens``."""
        first = max(0, stop - (window_tokens - 1))
        unit = math.lcm(*page_tokens)
        return cls(first // unit * unit, stop, first)

    def needed(self, page_tokens: int, floor: int = 0) -> tuple[int, int]:
        """Return the numbers ``[first, stop)`` of the pages that hold needed rows from ``floor`` on.

        Pages below ``floor`` are left out: an engine shares them with other requests. An engine may
        have given away those before the first needed one.
        """
        return max(self.first, floor) // page_tokens, self.stop // page_tokens


def images_within(
    images: Collection[kvstore.ImageSpan], tokens: int
) -> tuple[kvstore.ImageSpan, ...]:
    """Return what of ``images`` lies in the first ``tokens`` tokens: a span may be cut short."""
    return tuple(
        replace(image, stop=min(image.stop, tokens)) for image in images if image.start < tokens
    )


def pages_of(page_ids: Sequence[int], page_tokens: int, start: int, stop: int) -> list[int]:
    """Return the ids of the pages that hold tokens ``[start, stop)``."""
    return list(page_ids[start // page_tokens : -(-stop // page_tokens)])


def longest_pooled(
    ranks: Sequence[tuple[Sequence[bytes], Collection[bytes]]], hit_blocks: int
) -> int:
    """Return the most blocks, at most ``hit_blocks``, whose window every one of ``ranks`` has pooled.

    A rank is the hashes of a request's blocks as its store names them, and those of its pooled windows.
    """
    for count in range(hit_blocks, 0, -1):
        if all(hashes[count - 1] in pooled for hashes, pooled in ranks):
            return count
    return 0


def shard_of(rank: int, replicas: int) -> int:
    """Return the rank that stores what ``rank`` holds: the first of ``replicas`` equal ones."""
    return rank - rank % replicas


def shard_name(rank: int, ranks: int) -> str:
    """Return the name of the folder that one rank owns."""
    return f"rank-{rank}-of-{ranks}"
