"""The namespaces of one store: their numbers, whose blocks those are, and how much they may hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore.block import BlockHash
from kvstore.cache.context import Context
from kvstore.tier.ssd import SsdTier


@dataclass(slots=True, eq=False)
class Line:
    """One namespace through all generations of its weights."""

    numbers: set[int] = field(default_factory=set)
    """Numbers of its generations."""
    quota: int | None = None
    """Most bytes that their frames may take in the file, together; None for no limit of its own."""


class Namespaces:
    """What an owner knows of the namespaces of its store.

    Invariants:
        A number that is given out is on the medium, with its namespace and its line's quota.

    Threads: any. What is read is guarded by the context's lock, which no write is waited for under.
    """

    def __init__(self, context: Context, ssd: SsdTier) -> None:
        """Take over what is on the medium.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``, as every method that writes.
        """
        self._context = context
        self._ssd = ssd
        self._entries: dict[int, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        self._lines: dict[str, Line] = {}
        self._line_of: dict[int, Line] = {}
        self._naming = threading.Lock()
        """Held from the choice of a number or a quota until it is on the medium. Before the lock."""
        for number, entry in namespace_facts(ssd).items():
            quota = entry.pop("quota", None)
            line = self._enter(number, entry)
            line.quota = line.quota if quota is None else quota

    def _enter(self, number: int, entry: dict[str, Any]) -> Line:
        line = self._lines.setdefault(_identity(entry), Line())
        line.numbers.add(number)
        self._entries[number] = entry
        self._line_of[number] = line
        if isinstance(entry.get("root"), str):
            self._numbers[entry["root"]] = number
        return line

    def find(self, root: BlockHash) -> int | None:
        """Return the number of a namespace, None if it has none yet."""
        return self._numbers.get(root.hex())

    def number(self, root: BlockHash, namespace: Mapping[str, Any]) -> int:
        """Return the number of a namespace, giving it one the first time."""
        known = self.find(root)
        if known is not None:
            return known
        with self._naming:
            return self._number(root, namespace)

    def _number(self, root: BlockHash, namespace: Mapping[str, Any]) -> int:
        known = self.find(root)
        if known is not None:
            return known
        number = next(free for free in count(1) if free not in self._entries)
        entry = {"root": root.hex(), **namespace}
        line = self._lines.get(_identity(entry))
        self._write({number: entry}, None if line is None else line.quota)
        with self._context.lock:  # not before: a number without a name would be given away again
            self._enter(number, entry)
        return number

    def set_quota(self, root: BlockHash, namespace: Mapping[str, Any], quota: int) -> int:
        """Let a namespace, through all its generations, hold ``quota`` bytes; return its number."""
        with self._naming:
            number = self._number(root, namespace)
            line = self._line_of[number]
            if line.quota != quota:
                self._write({each: self._entries[each] for each in line.numbers}, quota)
                with self._context.lock:
                    line.quota = quota
        return number

    def _write(self, entries: Mapping[int, Mapping[str, Any]], quota: int | None) -> None:
        limit = {} if quota is None else {"quota": quota}
        self._ssd.set_facts(
            {
                f"namespace:{number}": json.dumps({**entry, **limit}).encode()
                for number, entry in entries.items()
            }
        )

    def line(self, number: int) -> Line:
        """Return the line of a number; one that was never given out is alone, and has no quota."""
        return self._line_of.get(number) or Line({number})

    def lines(self, numbers: Iterable[int]) -> list[Line]:
        """Return the lines of ``numbers``, each once."""
        return list({id(line): line for line in map(self.line, numbers)}.values())

    def root(self, number: int) -> BlockHash | None:
        """Return what the first blocks of a namespace hang on, None if it is not known."""
        root = self._entries.get(number, {}).get("root")
        return None if root is None else BlockHash(bytes.fromhex(root))

    def table(self, blocks: Mapping[int, int], usage: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return each namespace as plain JSON values, with its blocks, bytes and quota."""
        return [
            {
                "id": number,
                "blocks": blocks.get(number, 0),
                "bytes": usage.get(number, 0),
                "quota": self.line(number).quota,
                **entry,
            }
            for number, entry in sorted(self._entries.items())
        ]


def _identity(entry: Mapping[str, Any]) -> str:
    """Spell what tells one line from all others."""
    own = {k: v for k, v in entry.items() if k not in ("root", "generation", "quota")}
    return json.dumps(own, sort_keys=True)


def namespace_facts(ssd: SsdTier) -> dict[int, dict[str, Any]]:
    """Return the namespaces that a store names, by number; the name of a damaged one is empty."""
    found: dict[int, dict[str, Any]] = {}
    for text, value in ssd.facts("namespace:").items():
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            continue
        try:
            entry = json.loads(value)
        except (ValueError, RecursionError):
            entry = None
        fields = entry.items() if isinstance(entry, dict) else ()
        found[int(text)] = {k: v for k, v in fields if _is_sane(k, v)}
    return found


def _is_sane(name: str, value: object) -> bool:
    if name == "quota":
        return type(value) is int and value >= 0
    return value is None or isinstance(value, str | int)
