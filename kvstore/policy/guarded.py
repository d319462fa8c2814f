"""A caller's policy, replaced by LRU after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from typing_extensions import override

from kvstore.policy.lru import Lru
from kvstore.policy.protocol import Policy, S

METHODS = ("fresh", "insert", "resize", "touch", "split", "release", "remove", "victim")
"""The methods of a policy."""


class Guarded(Policy[S], Generic[S]):
    """Delegates to a policy until it raises or chooses no evictable segment.

    Then a new LRU of all segments replaces it, and ``on_fault`` receives the error, once. The index never sees an
    exception, and an eviction succeeds if any segment is evictable. Cost: one reference per segment.
    """

    def __init__(self, policy: Policy[S], on_fault: Callable[[Exception], object]) -> None:
        self._policy = policy
        self._on_fault = on_fault
        self._is_trusted = True
        self._segments: dict[S, None] = {}

    @override
    def fresh(self) -> Guarded[S]:
        try:
            policy = self._policy.fresh()
        except Exception as error:
            self._on_fault(error)
            policy = Lru()
        return Guarded(policy, self._on_fault)

    @override
    def insert(self, segment: S) -> None:
        self._segments[segment] = None
        self._tell("insert", segment)

    @override
    def resize(self, segment: S) -> None:
        self._tell("resize", segment)

    @override
    def touch(self, segment: S) -> None:
        self._tell("touch", segment)

    @override
    def split(self, upper: S, lower: S) -> None:
        self._segments[upper] = None
        self._tell("split", upper, lower)

    @override
    def release(self, segment: S) -> None:
        self._tell("release", segment)

    @override
    def remove(self, segment: S) -> None:
        del self._segments[segment]
        self._tell("remove", segment)

    @override
    def victim(self, blocks: int) -> S | None:
        if self._is_trusted:
            try:
                return self._checked(self._policy.victim(blocks))
            except Exception as error:
                self._distrust(error)
        return self._policy.victim(blocks)

    def _checked(self, found: Any) -> S | None:
        """Return an evictable victim, or None if no segment is evictable; otherwise raise."""
        if found is None:
            evictable = sum(segment.is_evictable for segment in self._segments)
            if evictable:
                raise ValueError(
                    f"victim() returned None, expected one of {evictable} evictable segments"
                )
            return None
        if found not in self._segments or not found.is_evictable:
            raise ValueError(f"victim() returned {found!r}, expected an evictable segment")
        chosen: S = found
        return chosen

    def _tell(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._policy, method)(*arguments)
        except Exception as error:
            if not self._is_trusted:  # a bug of this module
                raise
            self._distrust(error)

    def _distrust(self, error: Exception) -> None:
        """Replace the policy by an LRU, whose order follows from the segments alone."""
        self._is_trusted = False
        self._policy = Lru()
        for segment in sorted(self._segments, key=lambda each: (each.last_use, each.start)):
            self._policy.insert(segment)
        self._on_fault(error)
