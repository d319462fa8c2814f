"""Decisions for an engine with paged KV and step scheduling, as functions of plain values.

Positions are tokens of one request. A *page* is a block of the engine; a *block* is one of kvstore.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvstore
from kvstore.checks import flag, is_number
from kvstore.errors import ConfigError

LEAST_BLOCK_TOKENS = 128
"""Fewest tokens of a block: with fewer, reads are slow; with more, hits are shorter."""


def block_tokens_for(page_tokens: Collection[int]) -> int:
    """Return the block size: whole pages of every group, so that hits end at page boundaries."""
    return math.lcm(LEAST_BLOCK_TOKENS, *page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Options of a request for its own blocks."""

    store: bool = True
    """Whether to store this request's blocks; stored blocks are loaded in any case."""
    pin: bool = False
    ttl: float | None = None
    """Lifetime of its blocks in seconds, None until eviction."""

    @classmethod
    def of(cls, given: object) -> Hints:
        """Return the hints in a mapping of this class's fields. Raises ``ConfigError``."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            msg = f"hints must be a mapping such as {{'ttl': 60}}, found {type(given).__name__}"
            raise ConfigError(msg)
        unknown = sorted(str(name) for name in given if name not in ("store", "pin", "ttl"))
        if unknown:
            raise ConfigError(f"unknown hints {', '.join(unknown)}, expected store, pin or ttl")
        values: dict[str, Any] = dict(given)
        for name in ("store", "pin"):
            flag(values.get(name, False), f"hint {name}", ConfigError)
        ttl = values.get("ttl")
        if ttl is not None and not (is_number(ttl) and 0 < ttl <= sys.float_info.max):
            raise ConfigError(f"hint ttl must be positive seconds, found {ttl!r}")
        return cls(**values)


def final_tokens(known: int, computed: int, scheduled: int) -> int:
    """Return the number of leading tokens with final KV after the planned step.

    ``known`` tokens are accepted by the engine; KV of a draft after them may be overwritten.
    ``computed`` and ``scheduled`` count tokens computed before this step and in it, with drafts.
    """
    return min(known, computed + scheduled)


@dataclass(slots=True)
class Saving:
    """Progress of the saves of one request.

    At most one save of a request is pending, so there are never more saves than requests. Tokens that a
    busy store drops become part of a later, larger save.
    """

    saved: int = 0
    """Leading tokens that are stored: found by a lookup, or reported by every writer."""
    pending: int | None = None
    """End of the pending save."""
    _offered: int = 0
    """End of the last save, successful or not."""
    _unanswered: int = 0
    _least: int = 0

    def start(self, final: int, block_tokens: int, writers: int) -> tuple[int, int] | None:
        """Return the span ``[start, stop)`` to save now, and mark it as pending; None without one."""
        stop = final // block_tokens * block_tokens
        if self.pending is not None or stop <= max(self.saved, self._offered):
            return None
        self.pending = self._offered = self._least = stop
        self._unanswered = writers
        return self.saved, stop

    def finish(self, final: int, block_tokens: int, writers: int) -> tuple[int, int] | None:
        """Return the unsaved span of a request at its end, also while a save is pending."""
        begun, unanswered = self.pending, self._unanswered
        self.saved, self.pending = max(self.saved, begun or 0), None
        self._offered = 0  # to offer dropped blocks a last time
        span = self.start(final, block_tokens, writers)
        if span is None:
            self.pending = begun
        elif begun is not None:
            self._unanswered += unanswered
        return span

    def answer(self, end: int) -> None:
        """Record the end of one writer's stored part of the pending save.

        Blocks dropped by a full queue are offered again with the next block of the request.
        """
        if self.pending is None:
            return
        self._unanswered -= 1
        self._least = min(self._least, end)
        if not self._unanswered:
            self.saved = max(self.saved, self._least)
            self.pending = None


def window_boundaries(before: int, final: int, prompt: int, block_tokens: int) -> tuple[int, ...]:
    """Return the block boundaries in ``(before, final]`` at which to copy windows, at most two.

    They are where a later request can continue: the last boundary of the ``prompt`` tokens, the one
    before it if the prompt ends on a boundary (an exact repeat has to compute its last token), and the
    last boundary of the output so far.
    """
    last = final // block_tokens * block_tokens
    least = kvstore.hit_limit(prompt, block_tokens)
    candidates = range(max(least, last - block_tokens), last + 1, block_tokens)
    return tuple(stop for stop in candidates if stop > before)


@dataclass(frozen=True, slots=True)
class WindowPages:
    """Pages of a window that ends at a block boundary.

    ``[start, stop)`` are whole pages of every group; ``first`` is the first token with a needed row.
    A query reads W tokens, its own included, so W - 1 rows before ``stop``.
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
        """Return the range ``[first, stop)`` of pages with needed rows from ``floor`` on.

        Pages below ``floor`` are shared with other requests. The engine may have freed earlier pages.
        """
        return max(self.first, floor) // page_tokens, self.stop // page_tokens


def images_within(
    images: Collection[kvstore.ImageSpan], tokens: int
) -> tuple[kvstore.ImageSpan, ...]:
    """Return the spans of ``images`` in the first ``tokens`` tokens, the last one truncated."""
    return tuple(replace(i, stop=min(i.stop, tokens)) for i in images if i.start < tokens)


def pages_of(page_ids: Sequence[int], page_tokens: int, start: int, stop: int) -> list[int]:
    """Return the ids of the pages with tokens ``[start, stop)``."""
    return list(page_ids[start // page_tokens : -(-stop // page_tokens)])


def longest_pooled(
    ranks: Sequence[tuple[Sequence[bytes], Collection[bytes]]], hit_blocks: int
) -> int:
    """Return the largest block count, up to ``hit_blocks``, with a pooled window at its end in every rank.

    ``ranks`` has the block hashes of the request, and the hashes of the pooled windows, of each rank.
    """
    for count in range(hit_blocks, 0, -1):
        if all(hashes[count - 1] in pooled for hashes, pooled in ranks):
            return count
    return 0


def shard_of(rank: int, replicas: int) -> int:
    """Return the writing rank for the KV of ``rank``: the first of ``replicas`` equal ones."""
    return rank - rank % replicas


def shard_name(rank: int, ranks: int) -> str:
    """Return the directory name of a rank."""
    return f"rank-{rank}-of-{ranks}"
