"""The ``VERSION`` file of a store: its format version, and its layout as one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

from kvstore.errors import ConfigError, LayoutMismatch, StoreError
from kvstore.frame.format import FORMAT_VERSION
from kvstore.tier.ssd.directory import refuse_links
from kvstore.tier.ssd.files import VERSION_FILE, write_file

FORMAT_BYTES = 16 << 10  # 5,000 layers; computing a frame's layout is quadratic in layers
_FIRST_LINE = f"kvstore {FORMAT_VERSION}"
_SHOWN = 200  # characters shown of a format text that cannot be parsed


def read_format(path: Path) -> str:
    """Return the format text of a store, the second line of its ``VERSION`` file.

    Raises:
        ConfigError: if a file of the store is not a regular file.
        StoreError: if the file is damaged or of another version.
    """
    refuse_links(path)  # reading a pipe would block
    most = len(_FIRST_LINE) + FORMAT_BYTES + len("\n\n")
    try:
        with (path / VERSION_FILE).open("rb") as file:
            text = file.read(most + 1)
        lines = text.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path / VERSION_FILE} cannot be read: {error}") from error
    if len(text) > most:
        msg = f"{path / VERSION_FILE} is damaged: it has more than {most} bytes, the most that a format has"
        raise StoreError(msg)
    if len(lines) != 2 or lines[0] != _FIRST_LINE:
        found = lines[0][:40] if lines else "an empty file"
        raise StoreError(
            f"{path} was written by another version: found {found!r}, expected {_FIRST_LINE!r}; "
            "use another path or remove the directory"
        )
    return lines[1]


def has_format(path: Path, format_text: str) -> bool:
    """Return whether a store exists with ``format_text``; raise ``LayoutMismatch`` for another format."""
    if not (path / VERSION_FILE).exists():
        return False
    found = read_format(path)
    if found != format_text:
        raise LayoutMismatch(
            f"{path} contains blocks of another layout and was left untouched: "
            f"{_difference(found, format_text)}. Use another path for this one."
        )
    return True


def claim_format(path: Path, format_text: str) -> None:
    """Write the format of a new store; raise ``LayoutMismatch`` if the store has another format."""
    if not has_format(path, format_text):
        if len(format_text.encode()) > FORMAT_BYTES:
            raise ConfigError(
                f"the layout is {len(format_text.encode())} bytes of JSON, expected at most "
                f"{FORMAT_BYTES}: join groups, or give them shorter names"
            )
        # Before the database exists: a database without VERSION is not recognised as a store.
        write_file(path, VERSION_FILE, f"{_FIRST_LINE}\n{format_text}\n".encode())


def _difference(found: str, expected: str) -> str:
    """Describe how two format texts differ, without the fingerprint, which follows from the rest."""
    try:
        a, b = json.loads(found), json.loads(expected)
        names = [name for name in {**a, **b} if name not in ("fingerprint", "groups")]
        pairs = [(name, a.get(name), b.get(name)) for name in names]
        groups = [{group["name"]: group for group in each["groups"]} for each in (a, b)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"found {found[:_SHOWN]!r}, expected {expected}"
    pairs.append(("groups", sorted(groups[0]), sorted(groups[1])))
    for name in (name for name in groups[0] if name in groups[1]):
        one, other = groups[0][name], groups[1][name]
        pairs += [(f"{name}: {key}", value, other.get(key)) for key, value in one.items()]
    parts = [f"found {name} {x}, expected {y}" for name, x, y in pairs if x != y]
    return "; ".join(parts) or f"found fingerprint {a['fingerprint']}, expected {b['fingerprint']}"
