"""Exception types of kvstore.

KVStoreError
├── ConfigError      an option is impossible or contradicts another        (fix the option)
├── LayoutMismatch   the store at this path has another layout             (use another path)
├── StoreBusy        another process owns the store                        (open it as a reader)
├── CapacityError    a tier has no space without evicting pinned blocks    (shed load)
├── StoreError       a tier failed or is not a store                       (serve without it)
└── TraceError       a file is not a trace, or has an invalid line         (fix the file)

A miss is not an error: lookups return it. Invalid arguments raise ``ValueError``, whose message has the value found and
the values expected; ``ConfigError`` is a ``ValueError`` for options.
"""

from __future__ import annotations

from pathlib import Path

MOST_SHOWN = 200
"""Most characters of a value in an error."""


def brief(value: object) -> str:
    """Return the start of a value's ``repr`` for an error, or its type if ``repr`` fails, as for very deep lists."""
    if isinstance(value, str) and len(value) > MOST_SHOWN:
        value = f"{value[:MOST_SHOWN]}..."
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN + len("'...'") else f"{text[:MOST_SHOWN]}..."


class KVStoreError(Exception):
    """Base class of kvstore's exceptions."""


class ConfigError(KVStoreError, ValueError):
    """An option is invalid, or two options contradict each other."""


class LayoutMismatch(KVStoreError):  # noqa: N818 - the public name
    """The store at this path has another layout. It was not changed."""


class StoreBusy(KVStoreError):  # noqa: N818 - the public name
    """Another process owns the store."""


class StoreError(KVStoreError):
    """A tier failed, or the path has no usable store."""


class CapacityError(KVStoreError):
    """A tier has no space without evicting pinned blocks."""


class TraceError(KVStoreError):
    """A file is not a trace, or has an invalid line."""

    def __init__(self, path: Path | str, fault: str, line: int = 0) -> None:
        """``line`` counts from 1; 0 is the whole file."""
        super().__init__(path, fault, line)
        self.path, self.fault, self.line = str(path), fault, line

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else self.path
        return f"{where}: {self.fault}"
