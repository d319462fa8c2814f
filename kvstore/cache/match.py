"""Matches of lookups and page tables of loads, with the pin sets that protect their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import BlockHash
from kvstore.identity.chain import Prefix
from kvstore.index import plan
from kvstore.index.prefix_tree import PrefixIndex, Segment
from kvstore.layout.replay import WindowSnapshot
from kvstore.tier.engine_pages import Pages

RequestKey = tuple[BlockHash, str]
"""A request id with its namespace's root: tenants may use the same ids."""


@dataclass(slots=True)
class PinSet:
    """Blocks and a window that a match protects from eviction until release."""

    segments: list[tuple[PrefixIndex, Segment]] = field(default_factory=list)
    """Pinned segments, each with its index."""
    snapshot: WindowSnapshot | None = None
    expires: float = 0.0
    """End of the lease by the store's clock; ``NEVER`` for a pin."""
    request: RequestKey | None = None
    """The request id that returns the same match until release."""
    is_released: bool = False


@dataclass(slots=True)
class PagePins:
    """Pages of the device tier protected by one ``PinnedPages`` until release."""

    segments: list[Segment] = field(default_factory=list)
    """Pinned segments of the device tier's index."""
    private: list[int] = field(default_factory=list)
    """Allocated pages that no lookup finds."""
    is_released: bool = False


class _Lookups(Protocol):
    """The lookups that found a match: they pin its blocks and shorten it."""

    window_tokens: int

    def enter(self, match: Match) -> None: ...
    def leave(self, match: Match) -> None: ...
    def shrink(self, match: Match, hit_tokens: int) -> None: ...
    def is_worth_loading(self, match: Match) -> bool: ...


class _PageOwner(Protocol):
    """The device cache of some pages."""

    def release(self, pins: PagePins) -> None: ...


class Match:
    """The longest reusable prefix of a request, returned by ``lookup``.

    ``lookup`` leases its blocks, so that they are not evicted before they are loaded. Entering the match turns the
    lease into a pin; leaving it drops the pin.

    Threads: one at a time.
    """

    def __init__(
        self,
        lookups: _Lookups,
        prefix: Prefix,
        resident: dict[str, int],
        hit_tokens: int,
        snapshot: WindowSnapshot | None,
        pins: PinSet | None,
        request_id: str | None,
        *,
        needs_window: bool = False,
    ) -> None:
        self.lookups = lookups
        self.prefix = prefix
        self.resident_blocks = resident
        """Leading blocks in each tier, nearest tier first."""
        self.hit_tokens = hit_tokens
        """H, the length of the hit in tokens. A bad block found by a later read shortens it."""
        self.snapshot = snapshot
        self.pins = pins
        self.request_id = request_id
        self.needs_window = needs_window
        """Whether a hit requires its window, because the engine cannot replay."""
        self.entered = 0
        """Number of entries without an exit."""
        self.pages: PinnedPages | None = None
        """Pages of the last ``load``."""

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """The request's token ids, uint32 ``[tokens]``."""
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
        """Whether the pool contains the window that ends at H."""
        return self.snapshot is not None and self.snapshot.stop == self.hit_tokens > 0

    @property
    def floors(self) -> plan.Floors:
        """The four token positions below as one value."""
        start = self.snapshot.start if self.snapshot is not None and self.window_hit else None
        return plan.floors(self.hit_tokens, self.lookups.window_tokens, start)

    @property
    def replay_start(self) -> int:
        """The engine reruns tokens ``[replay_start, H)`` to rebuild window KV; H if none."""
        return self.floors.replay_start

    @property
    def read_floor(self) -> int:
        """First token whose window rows exist."""
        return self.floors.read_floor

    @property
    def write_floor(self) -> int:
        """GLOBAL entries of tokens below it are final: a replay must not overwrite them."""
        return self.floors.write_floor

    @property
    def window_write_floor(self) -> int:
        """Window rows of tokens below it are final."""
        return self.floors.window_write_floor

    @property
    def worth_loading(self) -> bool:
        """Whether loading the hit is faster than computing it, by the measured speeds."""
        return self.lookups.is_worth_loading(self)

    def shrink(self, hit_tokens: int) -> None:
        """Shorten the hit to ``hit_tokens``, or less if a window is needed."""
        if hit_tokens < self.hit_tokens:
            self.lookups.shrink(self, hit_tokens)

    def __enter__(self) -> Self:
        self.lookups.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.lookups.leave(self)

    def __repr__(self) -> str:
        return (
            f"Match(hit_tokens={self.hit_tokens}, of={len(self.tokens)}, "
            f"residency={self.residency}, window_hit={self.window_hit})"
        )


class PinnedPages(Pages):
    """Pages of the device tier with their own pin.

    The pin lasts until ``release``, also after the match was left. Pages of ``device.allocate`` are private until
    ``publish``.
    """

    def __init__(
        self,
        device: _PageOwner,
        pins: PagePins,
        *,
        page_ids: Any,
        tokens: int,
        tensors: Mapping[str, Any],
    ) -> None:
        super().__init__(tensors, page_ids)
        self.device = device
        self.tokens = tokens
        """Leading tokens in the pages; for private pages, the tokens that fit."""
        self.pins = pins

    @property
    def is_released(self) -> bool:
        """Whether the pin was dropped, so that the pages may contain other blocks."""
        return self.pins.is_released

    def release(self) -> None:
        """Drop the pin and free private pages. Idempotent.

        The pages may be overwritten at once: every kernel that reads them must have finished on the device.
        """
        self.device.release(self.pins)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
