"""What went wrong inside the connector: counted, logged once, never raised into the engine."""

from __future__ import annotations

import copy
import logging
from collections import Counter

from typing_extensions import override

from kvstore.errors import KVStoreError

log = logging.getLogger("kvstore.vllm")


class _ThroughVllm(logging.Handler):
    """Hands records to vLLM's logger, whatever handlers that has by then."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.filename = record.name  # vLLM's lines say the file, and mean the module
        logging.getLogger("vllm").handle(named)


def log_as_vllm() -> None:
    """Let ``kvstore`` log where and as vLLM does, unless somebody has said where it logs.

    vLLM gives a handler to its own logger alone. Without one Python prints bare messages.
    """
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    ours.addHandler(_ThroughVllm())
    ours.propagate = (
        False  # as vLLM's: a handler of the root that comes later makes no double lines
    )
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)


class Faults:
    """Counts exceptions by the work they ended, and logs the first of each kind.

    With its traceback, unless it is one of ours: their messages say it all.

    A store that fails costs hits. An engine that stops costs every request.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: set[tuple[str, type[BaseException]]] = set()

    def note(self, work: str, error: BaseException) -> None:
        """Count an exception that ended ``work``, a verb such as ``"save"``."""
        self.counts[f"{work}_faults"] += 1
        kind = (work, type(error))
        if kind not in self._said:
            self._said.add(kind)
            log.error(
                "a %s was given up: %s. It is recomputed or left out; further ones of this kind are "
                "counted only",
                *(work, error),
                exc_info=None if isinstance(error, KVStoreError) else error,
            )

    def say(self, what: str, *values: object) -> None:
        """Log a warning, the first time that it is about ``what``."""
        kind = (what, Warning)
        if kind not in self._said:
            self._said.add(kind)
            log.warning(what, *values)
