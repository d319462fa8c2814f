"""What went wrong inside the connector: counted, logged once, never raised into the engine."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("kvstore.vllm")


class Faults:
    """Counts exceptions by the work they ended, and logs the first of each kind with its traceback.

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
                exc_info=error,
            )

    def say(self, what: str, *values: object) -> None:
        """Log a warning, the first time that it is about ``what``."""
        kind = (what, Warning)
        if kind not in self._said:
            self._said.add(kind)
            log.warning(what, *values)
