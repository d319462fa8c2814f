"""Failures of an adapter: counted, logged once per kind, never raised into the engine."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvstore.errors import KVStoreError

_KINDS = 1024
"""Most kinds of failure that are logged; bounds the memory of ``Faults``."""


class Faults:
    """Counters of failures by topic, and a log of the first failure of each kind. Threads: any.

    A failed store causes misses only. An exception in the engine would fail every request.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._log = log
        self._logged: set[Any] = set()
        self._lock = threading.Lock()

    def note(self, work: str, error: BaseException) -> None:
        """Count an exception that ended ``work``, a noun such as ``"save"``.

        The traceback is logged, except for a ``KVStoreError``, whose message names the cause.
        """
        if self._is_first((work, type(error)), f"{work}_faults"):
            self._log.error(
                "a %s failed: %s. Its tokens are recomputed or not stored; further failures of this "
                "kind are only counted",
                *(work, error),
                exc_info=None if isinstance(error, KVStoreError) else error,
            )

    def noted(self, work: str) -> _Noted:
        """Return a context manager that notes an exception and suppresses it."""
        return _Noted(self, work)

    def report(self, topic: str, detail: str) -> None:
        """Count a failure under ``topic``, and log the first one with this ``detail``."""
        if self._is_first(detail, topic):
            self._log.warning("%s: %s; further ones are only counted", topic, detail)

    def say(self, message: str, *values: object) -> None:
        """Log a warning at the first use of ``message``. It is not counted."""
        if self._is_first((message, Warning)):
            self._log.warning(message, *values)

    def _is_first(self, kind: object, topic: str = "") -> bool:
        with self._lock:
            if topic:
                self.counts[topic] += 1
            is_first = kind not in self._logged and len(self._logged) < _KINDS
            if is_first:
                self._logged.add(kind)
        return is_first


@dataclass(frozen=True, slots=True)
class _Noted:
    faults: Faults
    work: str

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, Exception):
            self.faults.note(self.work, error)
        return isinstance(error, Exception)
