"""Logging of the connector through vLLM's logger."""

from __future__ import annotations

import copy
import logging

from typing_extensions import override

log = logging.getLogger("kvstore.vllm")


class _VllmHandler(logging.Handler):
    """Passes records to vLLM's logger, with the handlers that it has at that time."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.filename = record.name  # vLLM's format prints the file name as the module
        logging.getLogger("vllm").handle(named)


def log_as_vllm() -> None:
    """Make ``kvstore`` log where and as vLLM does, unless the application configured its logger.

    vLLM adds a handler to its own logger only. Without a handler Python prints bare messages.
    """
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    ours.addHandler(_VllmHandler())
    # As for vLLM's logger: a handler that the root gets later prints no line twice.
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
