"""The namespaces of one store: their numbers, stored names, generations and quotas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.identity.block import BlockHash
from kvstore.store.context import Context
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.tier import SsdTier

LAST_NUMBER = 2**32 - 1  # 32 bits in records and frames. docs/format.md, sections 4 and 5.
ERASED_TOGETHER = 256  # names per transaction: ten per leaf, about 26 adjacent leaves


@dataclass(slots=True, eq=False)
class Lineage:
    """All generations of one namespace."""

    numbers: set[int] = field(default_factory=set)  # namespace numbers
    quota: int | None = None  # most bytes of the file for all their frames; None for no limit


class Namespaces:
    """The namespaces of a store in the process that owns it.

    A namespace is assigned a number by its first ``store`` call, and its name is stored in the transaction of its
    first blocks. Both are removed after its last block. The last number of a lineage with a quota remains, to keep the
    quota.

    Invariants:
        The number of every record has a stored name, with its lineage's quota.
        A new number is not used by any entry, record or stored name.

    Threads: any. The caller holds the context's lock where stated; a method that writes is called by one
    thread at a time, without the lock.
    """

    def __init__(self, context: Context, ssd: SsdTier, on_removed: Callable[[int], None]) -> None:
        """Read the stored names; ``ssd.usage`` determines which have blocks. ``on_removed`` gets removed numbers."""
        self._context = context
        self._ssd = ssd
        self._on_removed = on_removed
        self._entries: dict[int, dict[str, Any]] = {}
        self._numbers: dict[str, int] = {}
        self._lineages: dict[str, Lineage] = {}
        self._lineage_of: dict[int, Lineage] = {}
        self._references: Counter[int] = Counter()  # calls and queued blocks in progress, by number
        self._named: set[int] = set()  # numbers whose names are stored
        self._idle: set[int] = set()  # numbers of entries that may be empty
        self._left: set[int] = set()  # numbers whose stored names are to be erased
        facts = namespace_facts(ssd)
        for number in sorted(facts, key=lambda number: ssd.usage[number] > 0):
            entry = facts[number]
            quota = entry.pop("quota", None)
            lineage = self._enter(number, entry)
            lineage.quota = lineage.quota if quota is None else quota
        self._named |= facts.keys()
        self._idle |= facts.keys()
        self._last = max([*facts, *ssd.usage], default=0)

    def _enter(self, number: int, entry: dict[str, Any]) -> Lineage:
        lineage = self._lineages.setdefault(_identity(entry), Lineage())
        lineage.numbers.add(number)
        self._entries[number] = entry
        self._lineage_of[number] = lineage
        if isinstance(entry.get("root"), str):
            self._numbers[entry["root"]] = number
        return lineage

    def _remove(self, number: int) -> None:
        entry, lineage = self._entries.pop(number), self._lineage_of.pop(number)
        lineage.numbers.discard(number)
        if not lineage.numbers:
            del self._lineages[_identity(entry)]
        if self._numbers.get(entry.get("root", "")) == number:
            del self._numbers[entry["root"]]
        self._on_removed(number)

    def _is_unused(self, number: int) -> bool:
        """Return whether no block, no call and no quota needs a number."""
        lineage = self._lineage_of[number]
        return (
            not self._ssd.usage[number]
            and not self._references[number]
            and (lineage.quota is None or not self._named.isdisjoint(lineage.numbers - {number}))
        )

    def find(self, root: BlockHash) -> int | None:
        """Return the number of a namespace, None if it has none now."""
        return self._numbers.get(root.hex())

    # ---- the caller holds the lock -------------------------------------------------------------

    def acquire(self, root: BlockHash, namespace: Mapping[str, Any]) -> int:
        """Add a reference to a namespace; return its number, which is new if it has none."""
        number = self.find(root)
        if number is None:
            number = self._free_number()
            self._enter(number, {"root": root.hex(), **namespace})
        self._references[number] += 1
        return number

    def acquire_again(self, number: int) -> None:
        """Add a reference to a number that has one."""
        self._references[number] += 1

    def release(self, number: int) -> None:
        """Remove a reference. A namespace that never had a block is removed with its last reference."""
        self._references[number] -= 1
        if self._references[number]:
            return
        del self._references[number]
        if number in self._named or not self._is_unused(number):
            self._idle.add(number)
        else:
            self._remove(number)

    def remove_empty(self) -> None:
        """Remove every unused namespace. ``erase`` erases the stored names."""
        emptied, self._ssd.emptied = self._ssd.emptied, set()
        idle, self._idle = self._idle | emptied, set()
        for number in idle & self._entries.keys():
            if self._is_unused(number):
                self._remove(number)
                self._left |= self._named & {number}

    def _free_number(self) -> int:
        """Return the next unused number. Numbers are reused only after all others."""
        number = self._last % LAST_NUMBER + 1
        while number in self._entries or number in self._named or self._ssd.usage[number]:
            number = number % LAST_NUMBER + 1
        self._last = number
        return number

    # ---- one thread at a time, without the lock ------------------------------------------------

    def names(self, numbers: Iterable[int]) -> dict[str, bytes]:
        """Return the facts to be written in the transaction of blocks of ``numbers``."""
        with self._context.lock:
            return {
                _fact(number): self._text(number, self._lineage_of[number].quota)
                for number in set(numbers) - self._named
            }

    def note_named(self, numbers: Iterable[int]) -> None:
        """Record that a transaction has written the facts of ``names``."""
        with self._context.lock:
            for number in set(numbers) - self._named:
                self._named.add(number)
                # Another number of the lineage may remain only for the quota.
                self._idle |= self._lineage_of[number].numbers

    def erase(self) -> None:
        """Erase the stored names of removed namespaces. Raises ``MEDIUM_ERRORS``; a later call erases the rest."""
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
        """Record the quota in bytes of an acquired number's lineage, or raise one of ``MEDIUM_ERRORS``."""
        with self._context.lock:
            lineage = self._lineage_of[number]
            numbers = set(lineage.numbers)
            facts = {_fact(each): self._text(each, quota) for each in numbers}
        if lineage.quota != quota:
            self._ssd.set_facts(facts)
            with self._context.lock:
                lineage.quota = quota
                self._named |= numbers

    def _text(self, number: int, quota: int | None) -> bytes:
        limit = {} if quota is None else {"quota": quota}
        return json.dumps({**self._entries[number], **limit}).encode()

    # ---- state ---------------------------------------------------------------------------------

    def lineage(self, number: int) -> Lineage:
        """Return the lineage of a number; an unknown number has its own, without a quota."""
        return self._lineage_of.get(number) or Lineage({number})

    def lineages(self, numbers: Iterable[int]) -> list[Lineage]:
        """Return the distinct lineages of ``numbers``."""
        return list(dict.fromkeys(map(self.lineage, numbers)))

    def root(self, number: int) -> BlockHash | None:
        """Return the root hash of a namespace, None if it is unknown."""
        root = self._entries.get(number, {}).get("root")
        return None if root is None else BlockHash(bytes.fromhex(root))

    def table(self, blocks: Mapping[int, int], usage: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return the namespaces as plain JSON values, with blocks, bytes and quota."""
        return [
            {
                "id": number,
                "blocks": blocks.get(number, 0),
                "bytes": usage.get(number, 0),
                "quota": self.lineage(number).quota,
                **entry,
            }
            for number, entry in sorted(self._entries.items())
        ]


_FACT = "namespace:"


def _fact(number: int) -> str:
    return f"{_FACT}{number}"


def _identity(entry: Mapping[str, Any]) -> str:
    """Return the fields that identify a lineage, as text."""
    own = {k: v for k, v in entry.items() if k not in ("root", "generation", "quota")}
    return json.dumps(own, sort_keys=True)


def namespace_facts(ssd: SsdTier) -> dict[int, dict[str, Any]]:
    """Return the stored namespaces by number; the fields of a damaged one are empty."""
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
        found[number] = {k: v for k, v in fields if _is_valid(k, v)}
    return found


def _is_valid(name: str, value: object) -> bool:
    if name == "quota":
        return type(value) is int and 0 <= value < 2**64
    return value is None or isinstance(value, str | int)
