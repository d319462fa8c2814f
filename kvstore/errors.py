"""Every error that this package raises on purpose.

KVStoreError
├── ConfigError      an option is impossible or contradicts another        (fix the option)
├── LayoutMismatch   the store at this path holds blocks of another layout (use another path)
├── StoreBusy        another process owns the store                        (open it as a reader)
├── CapacityError    a tier cannot make room without dropping a pin        (shed load)
├── StoreError       a tier failed or is not a store                       (serve without it)
└── TraceError       a file is not a trace, or one of its lines is bad     (fix the file)

A miss is not an error: lookups return it. Bad arguments are ``ValueError`` and name what was found
and what was expected; ``ConfigError`` is one too, because a bad option is a bad argument.
"""

from __future__ import annotations

from pathlib import Path

MOST_SHOWN = 200
"""Characters of a value that an error repeats."""


def brief(value: object) -> str:
    """Return the start of a value's text, for an error; its type if it has no text.

    A list may be too deep for one, an integer have too many digits.
    """
    if isinstance(value, str) and len(value) > MOST_SHOWN:
        value = f"{value[:MOST_SHOWN]}..."
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN + len("'...'") else f"{text[:MOST_SHOWN]}..."


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """An option is impossible, or two options contradict each other."""


class LayoutMismatch(KVStoreError):  # noqa: N818 - the public name says what happened
    """The store at this path was written for another layout. It was left untouched."""


class StoreBusy(KVStoreError):  # noqa: N818 - the public name says what happened
    """Another process owns the store."""


class StoreError(KVStoreError):
    """A tier failed, or what lies at a path is not a usable store."""


class CapacityError(KVStoreError):
    """A tier cannot make room without dropping something that is pinned."""


class TraceError(KVStoreError):
    """A file is not a trace, or one of its lines is bad."""

    def __init__(self, path: Path | str, fault: str, line: int = 0) -> None:
        """``line`` counts from 1; 0 is the file as a whole."""
        super().__init__(path, fault, line)
        self.path, self.fault, self.line = str(path), fault, line

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else self.path
        return f"{where}: {self.fault}"
