"""Matches and page tables: what a lookup and a load hand back, and what they protect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import BlockHash
from kvstore.identity.chain import Prefix
from kvstore.index import plan
from kvstore.index.prefix_tree import Segment
from kvstore.layout import Layout
from kvstore.layout.replay import WindowSnapshot
from kvstore.tier.pages import Pages


@dataclass(slots=True)
class Hold:
    """What a match protects from eviction until it is released."""

    segments: list[tuple[Any, Segment]] = field(default_factory=list)
    """Pinned segments with the index that each belongs to."""
    snapshot: WindowSnapshot | None = None
    expires: float = 0.0
    request: tuple[BlockHash, str] | None = None
    """The namespace and request id that stand for it as long as it lasts."""
    private_pages: list[int] = field(default_factory=list)
    """Device pages that nobody else knows of."""
    is_released: bool = False


class Keeper(Protocol):
    """Who keeps what a match found, and lets go of it again."""

    layout: Layout

    def enter(self, match: Match, /) -> None:
        """Turn the match's lease into a pin."""
        ...

    def leave(self, match: Match, /) -> None:
        """Drop the match's pin."""
        ...

    def release(self, hold: Hold, /) -> None:
        """Give back every pin of a hold."""
        ...

    def window_at(self, match: Match, /) -> WindowSnapshot | None:
        """Return the pooled window of a match whose hit became shorter."""
        ...

    def is_worth_loading(self, match: Match, /) -> bool:
        """Weigh the load of a match against computing it."""
        ...


class Match:
    """The longest reusable prefix of a request, and what an engine needs to use it.

    ``lookup`` takes a lease on what it found; entering the match turns the lease into a pin, and
    leaving drops it. A match belongs to one thread.
    """

    def __init__(
        self,
        keeper: Keeper,
        prefix: Prefix,
        resident: dict[str, int],
        hit_tokens: int,
        snapshot: WindowSnapshot | None,
        hold: Hold | None,
        request_id: str | None,
        *,
        needs_window: bool = False,
    ) -> None:
        self._keeper = keeper
        self.prefix = prefix
        self.resident_blocks = resident
        """Leading blocks in each tier, nearest tier first."""
        self.hit_tokens = hit_tokens
        """H: tokens whose GLOBAL entries are at hand; a bad block found later shortens it."""
        self.snapshot = snapshot
        self.hold = hold
        self.request_id = request_id
        self.needs_window = needs_window
        """Whether a hit without its window is of no use, because the engine cannot replay."""
        self.entered = 0
        """How often it was entered and not left again."""
        self.pages: PinnedPages | None = None
        """What ``load`` made of it."""

    def is_of(self, keeper: Keeper) -> bool:
        """Say whether ``keeper`` found it."""
        return self._keeper is keeper

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """The request's token ids."""
        return self.prefix.tokens

    @property
    def residency(self) -> dict[str, int]:
        """Leading tokens of the hit in each tier, nearest tier first."""
        size = self.prefix.block_tokens
        return {
            tier: min(blocks * size, self.hit_tokens)
            for tier, blocks in self.resident_blocks.items()
        }

    @property
    def window_hit(self) -> bool:
        """Say whether the pool holds the window that ends at the hit."""
        return self.snapshot is not None and self.snapshot.stop == self.hit_tokens > 0

    @property
    def floors(self) -> plan.Floors:
        """The four floors together."""
        start = self.snapshot.start if self.snapshot is not None and self.window_hit else None
        return plan.floors(self.hit_tokens, self._keeper.layout.window_tokens, start)

    @property
    def replay_start(self) -> int:
        """Tokens ``[replay_start, H)`` must run again for their window KV; H when none must."""
        return self.floors.replay_start

    @property
    def read_floor(self) -> int:
        """Window rows exist from here."""
        return self.floors.read_floor

    @property
    def write_floor(self) -> int:
        """Global entries below it are settled: rows run again below it overwrite nothing."""
        return self.floors.write_floor

    @property
    def window_write_floor(self) -> int:
        """Window rows below it are settled."""
        return self.floors.window_write_floor

    @property
    def worth_loading(self) -> bool:
        """Say whether using the hit is cheaper than computing it again, by measured speeds."""
        return self._keeper.is_worth_loading(self)

    def shrink(self, hit_tokens: int) -> None:
        """Note that only ``hit_tokens`` could be had."""
        if hit_tokens < self.hit_tokens:
            self.hit_tokens = hit_tokens
            self.snapshot = self._keeper.window_at(self)

    def __enter__(self) -> Match:
        self._keeper.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeper.leave(self)

    def __repr__(self) -> str:
        return (
            f"Match(hit_tokens={self.hit_tokens}, of={len(self.tokens)}, "
            f"residency={self.residency}, window_hit={self.window_hit})"
        )


class PinnedPages(Pages):
    """Pages of the device tier, with a pin of their own.

    They stay until ``release``, however long, also after the match that they were loaded for has
    been left. Those that ``device.allocate`` gave are private until they are published.
    """

    def __init__(
        self,
        keeper: Keeper,
        hold: Hold,
        *,
        page_ids: Any,
        tokens: int,
        tensors: Mapping[str, Any],
    ) -> None:
        super().__init__(tensors, page_ids)
        self._keeper = keeper
        self.tokens = tokens
        """Leading tokens in the pages; those that they have room for, if they are private."""
        self.hold = hold

    def is_of(self, keeper: Keeper) -> bool:
        """Say whether they are pages of ``keeper``."""
        return self._keeper is keeper

    @property
    def is_released(self) -> bool:
        """Say whether the pin was dropped, so that the pages may hold anything."""
        return self.hold.is_released

    def release(self) -> None:
        """Drop the pin; private pages are free again. Idempotent.

        Other blocks may be written to them at once: a device must have run what reads them.
        """
        self._keeper.release(self.hold)

    def __enter__(self) -> PinnedPages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
