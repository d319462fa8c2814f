"""Logging of the connector through vLLM's logger."""

from __future__ import annotations

import copy
import logging

from typing_extensions import override

log = logging.getLogger("kvstore.vllm")


class _VllmHandler(logging.Handler):
    """Passes records to the present handlers of vLLM's logger."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.filename = record.name  # vLLM's format prints the file name
        logging.getLogger("vllm").handle(named)


def log_as_vllm() -> None:
    """Log through vLLM's handlers, unless the application configured the logger ``kvstore``.

    vLLM adds a handler to its own logger only. Without a handler Python prints bare messages.
    """
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    ours.addHandler(_VllmHandler())
    ours.propagate = False  # as vLLM's logger: a later handler of the root would repeat every line
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
