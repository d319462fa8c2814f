"""The namespaces of one store: their numbers, whose blocks those are, and how much they may hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.identity.block import BlockHash
from kvstore.store.context import Context
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier

LAST_NUMBER = 2**32 - 1
"""Largest number of a namespace: records and frames hold 32 bits. docs/format.md, sections 4 and 5."""
ERASED_TOGETHER = 256
"""Names that one transaction takes off the medium: ten to a leaf, a few dozen leaves where they are
neighbours."""


@dataclass(slots=True, eq=False)
class Line:
    """One namespace through all generations of its weights."""

    numbers: set[int] = field(default_factory=set)
    """Numbers of its generations."""
    quota: int | None = None
    """Most bytes that their frames may take in the file, together; None for no limit of its own."""


class Namespaces:
    """What an owner knows of the namespaces of its store.

    A namespace has a number from its first store call on, its name on the medium from the transaction
    of its first blocks on, and neither after its last block. The last number of a line with a quota
    stays, for the quota.

    Invariants:
        A number that a record has is on the medium, with its namespace and its line's quota.
        No number is given out that an entry, a record or a name on the medium has.

    Threads: any. The caller holds the context's lock where a method says so; a method that writes
    is called by one thread at a time, without the lock.
    """

    def __init__(self, context: Context, ssd: SsdTier) -> None:
        """Take over what is on the medium; ``ssd.usage`` says which of it has blocks."""
        self._context = context
        self._ssd = ssd
        self._entries: dict[int, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        self._lines: dict[str, Line] = {}
        self._line_of: dict[int, Line] = {}
        self._held: Counter[int] = Counter()
        """Store calls and queued blocks under way, by number."""
        self._named: set[int] = set()
        """Numbers whose names are on the medium."""
        self._idle: set[int] = set()
        """Numbers of entries that may hold nothing any more."""
        self._left: set[int] = set()
        """Numbers of names on the medium that no entry has any more."""
        facts = namespace_facts(ssd)
        for number in sorted(facts, key=lambda number: ssd.usage[number] > 0):
            entry = facts[number]
            quota = entry.pop("quota", None)
            line = self._enter(number, entry)
            line.quota = line.quota if quota is None else quota
        self._named |= facts.keys()
        self._idle |= facts.keys()
        self._last = max([*facts, *ssd.usage], default=0)

    def _enter(self, number: int, entry: dict[str, Any]) -> Line:
        line = self._lines.setdefault(_identity(entry), Line())
        line.numbers.add(number)
        self._entries[number] = entry
        self._line_of[number] = line
        if isinstance(entry.get("root"), str):
            self._numbers[entry["root"]] = number
        return line

    def _remove(self, number: int) -> None:
        entry, line = self._entries.pop(number), self._line_of.pop(number)
        line.numbers.discard(number)
        if not line.numbers:
            del self._lines[_identity(entry)]
        if self._numbers.get(entry.get("root", "")) == number:
            del self._numbers[entry["root"]]

    def _is_over(self, number: int) -> bool:
        """Say whether nothing needs a number: no block, no call, no quota."""
        line = self._line_of[number]
        return (
            not self._ssd.usage[number]
            and not self._held[number]
            and (line.quota is None or not self._named.isdisjoint(line.numbers - {number}))
        )

    def find(self, root: BlockHash) -> int | None:
        """Return the number of a namespace, None if it has none now."""
        return self._numbers.get(root.hex())

    # ---- the caller holds the lock -------------------------------------------------------------

    def hold(self, root: BlockHash, namespace: Mapping[str, Any]) -> int:
        """Return the number of a namespace, given to it if it has none; it stays until ``release``."""
        number = self.find(root)
        if number is None:
            number = self._free_number()
            self._enter(number, {"root": root.hex(), **namespace})
        self._held[number] += 1
        return number

    def hold_again(self, number: int) -> None:
        """Hold a number that is held once more."""
        self._held[number] += 1

    def release(self, number: int) -> bool:
        """Give back one ``hold``; say whether the namespace went with it, as it never had a block."""
        self._held[number] -= 1
        if self._held[number]:
            return False
        del self._held[number]
        if number in self._named or not self._is_over(number):
            self._idle.add(number)
            return False
        self._remove(number)
        return True

    def leave(self) -> list[int]:
        """Let go of every namespace that holds nothing any more; return the numbers."""
        emptied, self._ssd.emptied = self._ssd.emptied, set()
        idle, self._idle = self._idle | emptied, set()
        gone = []
        for number in idle & self._entries.keys():
            if self._is_over(number):
                self._remove(number)
                gone.append(number)
        self._left |= self._named & set(gone)
        return gone

    def _free_number(self) -> int:
        """Return the next number that nothing has; one that was free comes after all others."""
        number = self._last % LAST_NUMBER + 1
        while number in self._entries or number in self._named or self._ssd.usage[number]:
            number = number % LAST_NUMBER + 1
        self._last = number
        return number

    # ---- one thread at a time, without the lock ------------------------------------------------

    def names(self, numbers: Iterable[int]) -> dict[str, bytes]:
        """Return what a transaction that stores blocks of ``numbers`` has to write beside them."""
        with self._context.lock:
            return {
                _fact(number): self._text(number, self._line_of[number].quota)
                for number in set(numbers) - self._named
            }

    def note_named(self, numbers: Iterable[int]) -> None:
        """Note that a transaction has written what ``names`` said."""
        with self._context.lock:
            for number in set(numbers) - self._named:
                self._named.add(number)
                # Another one of the line may have stayed for the quota alone.
                self._idle |= self._line_of[number].numbers

    def erase(self) -> None:
        """Take the names of namespaces that left off the medium.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``; the rest goes with the next call, or the
                next opening.
        """
        left, count = sorted(self._left, key=str), ERASED_TOGETHER
        while left:
            some = left[:count]
            try:
                self._ssd.set_facts(dict.fromkeys(map(_fact, some)))
            except MEDIUM_ERRORS as error:
                if count == 1 or not self._ssd.lacks_room(error, count):
                    raise
                count = max(1, count // 8)
                continue
            left = left[count:]
            with self._context.lock:
                self._left.difference_update(some)
                self._named.difference_update(some)

    def set_quota(self, number: int, quota: int) -> None:
        """Let the line of a held number have ``quota`` bytes.

        Raises:
            lmdb.Error, OSError: one of ``MEDIUM_ERRORS``; then the old one is in force.
        """
        with self._context.lock:
            line = self._line_of[number]
            numbers = set(line.numbers)
            facts = {_fact(each): self._text(each, quota) for each in numbers}
        if line.quota != quota:
            self._ssd.set_facts(facts)
            with self._context.lock:
                line.quota = quota
                self._named |= numbers

    def _text(self, number: int, quota: int | None) -> bytes:
        limit = {} if quota is None else {"quota": quota}
        return json.dumps({**self._entries[number], **limit}).encode()

    # ---- telling -------------------------------------------------------------------------------

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


_FACT = "namespace:"


def _fact(number: int) -> str:
    return f"{_FACT}{number}"


def _identity(entry: Mapping[str, Any]) -> str:
    """Spell what tells one line from all others."""
    own = {k: v for k, v in entry.items() if k not in ("root", "generation", "quota")}
    return json.dumps(own, sort_keys=True)


def namespace_facts(ssd: SsdTier) -> dict[int, dict[str, Any]]:
    """Return the namespaces that a store names, by number; the name of a damaged one is empty."""
    found: dict[int, dict[str, Any]] = {}
    for text, value in ssd.facts(_FACT).items():
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
        if not 0 < number <= LAST_NUMBER or str(number) != text:
            continue
        try:
            entry = json.loads(value)
        except (ValueError, RecursionError):
            entry = None
        fields = entry.items() if isinstance(entry, dict) else ()
        found[number] = {k: v for k, v in fields if _is_sane(k, v)}
    return found


def _is_sane(name: str, value: object) -> bool:
    if name == "quota":
        return type(value) is int and 0 <= value < 2**64
    return value is None or isinstance(value, str | int)
