"""LRU pool in host memory for trailing pages: window KV and recurrent states, under the engine's keys.

They are useful for minutes and never written to a persistent tier. A missing page is recomputed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PageKey = tuple[str, bytes]
"""Pool name and the caller's key."""


@dataclass(frozen=True, slots=True)
class _Page:
    data: Bytes
    expires: float


class TrailingPages:
    """Pages by key, evicted in order of last use. Threads: any.

    Invariants:
        The bytes of all pages never exceed ``capacity_bytes``. A page expires ``ttl_seconds`` after
        ``put``.
    """

    def __init__(self, capacity_bytes: int, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._pages: OrderedDict[PageKey, _Page] = OrderedDict()
        self._lock = threading.Lock()
        self.live_bytes = 0
        self.evicted = 0
        self.expired = 0

    def put(self, key: PageKey, data: Bytes) -> bool:
        """Store a copy of a page, replacing an older one; return whether it fits."""
        if data.nbytes > self._capacity:
            return False
        page = _Page(data.copy(), self._clock() + self._ttl)
        with self._lock:
            self._drop(key)
            self._pages[key] = page
            self.live_bytes += page.data.nbytes
            while self.live_bytes > self._capacity:
                self._drop(next(iter(self._pages)))
                self.evicted += 1
        return True

    def get(self, key: PageKey, target: Bytes) -> bool:
        """Copy a page to a ``target`` of its size; return whether it was copied."""
        with self._lock:
            page = self._live(key)
            if page is None or page.data.nbytes != target.nbytes:
                return False
            self._pages.move_to_end(key)
        target[:] = page.data
        return True

    def has(self, key: PageKey) -> bool:
        """Return whether a page is in the pool. It may be evicted at any later time."""
        with self._lock:
            return self._live(key) is not None

    def clear(self) -> None:
        """Drop every page."""
        with self._lock:
            self._pages.clear()
            self.live_bytes = 0

    def _live(self, key: PageKey) -> _Page | None:
        page = self._pages.get(key)
        if page is not None and page.expires <= self._clock():
            self._drop(key)
            self.expired += 1
            return None
        return page

    def _drop(self, key: PageKey) -> None:
        page = self._pages.pop(key, None)
        if page is not None:
            self.live_bytes -= page.data.nbytes

    def __len__(self) -> int:
        return len(self._pages)
