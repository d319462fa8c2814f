"""Bounded replay: values that a cache and an engine exchange to rebuild missing window KV.

If the window of a hit is missing, the engine runs its last W tokens again and returns their window rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.checks import integer
from kvstore.identity.block import ImageSpan


@dataclass(frozen=True, slots=True)
class WindowSnapshot:
    """Window KV of one sequence for tokens ``[start, stop)``.

    Shapes: ``rows[group]`` of every WINDOW group is uint8
        ``[len(group.layers), (stop - start) // tokens_per_entry, entry_bytes]``.
    Invariants: ``stop`` is a block boundary and ``start <= max(0, stop - (W - 1))``; the window
        pool checks both.
    """

    start: int
    stop: int
    rows: Mapping[str, NDArray[np.uint8]]
    source: str = "engine"
    """``"pool"`` if read from the window pool, ``"replay"`` if rebuilt by a hook."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for bounds that are no integers; widen narrow ones against overflow."""
        for name in ("start", "stop"):
            bound = integer(getattr(self, name), f"{name} of a window snapshot", None)
            object.__setattr__(self, name, bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Request to rebuild window KV for tokens ``[start, stop)``.

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
    """Token ids of the whole request."""
    images: Sequence[ImageSpan] = ()
    pages: Any = None
    """Result of ``PrefixCache.load`` for this match, None if it was not loaded."""
    request_id: str | None = field(default=None)


class ReplayHook(Protocol):
    """Function of the engine that rebuilds window KV."""

    def __call__(self, requests: list[ReplayRequest], /) -> Sequence[WindowSnapshot]:
        """Return one snapshot per request, in order, each covering ``[start, stop)``.

        Called in the thread that requested the window, without locks; its exceptions reach that caller.
        """
