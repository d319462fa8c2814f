"""The replay contract: how an engine rebuilds window KV that is gone.

A hit on global KV never needs its window to be stored. When the window is missing, the engine runs
the last W tokens of the hit again (*bounded replay*) and hands back their window rows. This module
holds the values that cross that border; it starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.identity.block import ImageSpan


@dataclass(frozen=True, slots=True)
class WindowSnapshot:
    """Window KV of one sequence for tokens ``[start, stop)``.

    Shapes:
        ``rows[group]`` is uint8 ``[len(group.layers), (stop - start) // tokens_per_entry, entry_bytes]``
        for every WINDOW group of the layout.

    Invariants:
        ``stop`` is a block boundary and ``start <= max(0, stop - (W - 1))``; checked where a
        snapshot enters the pool, which is where the layout is known.
    """

    start: int
    stop: int
    rows: Mapping[str, NDArray[np.uint8]]
    source: str = "engine"
    """``"pool"`` when it came from the window pool, ``"replay"`` when a hook rebuilt it."""

    def __post_init__(self) -> None:
        """Reject places that are no integers, and widen narrow ones, which would overflow."""
        for name in ("start", "stop"):
            place: object = getattr(self, name)
            if isinstance(place, bool) or not isinstance(place, Integral):
                msg = f"a window snapshot needs integers, found {name} {place!r}"
                raise ValueError(msg)
            object.__setattr__(self, name, int(place))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Ask the engine to rebuild window KV for tokens ``[start, stop)``.

    The engine runs those tokens with their original positions. A query at ``p`` reads window keys
    in ``[max(read_floor, p - W + 1), p]`` and all global entries below it. It writes window rows
    for every replayed token and no global entry below ``write_floor``.
    """

    start: int
    stop: int
    read_floor: int
    write_floor: int
    window_write_floor: int
    tokens: NDArray[np.uint32]
    """The whole request's token ids, so that anything that looks further back can."""
    images: Sequence[ImageSpan] = ()
    pages: Any = None
    """What ``PrefixCache.load`` returned for this match, or None if it was not loaded."""
    request_id: str | None = field(default=None)


class ReplayHook(Protocol):
    """The engine's side of bounded replay."""

    def __call__(self, requests: list[ReplayRequest], /) -> Sequence[WindowSnapshot]:
        """Return one snapshot per request, in order, each covering ``[start, stop)``.

        Called in the thread that asked for the window, with no lock held. An exception that it
        raises reaches that caller unchanged.
        """
        ...
