"""What a model caches: groups of layers, their entries, and how long each is worth keeping.

A layout knows bytes and lifetimes. It knows no tier, no token and no file.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import SupportsIndex

from kvstore.checks import several
from kvstore.errors import ConfigError, brief


class Lifetime(StrEnum):
    """How long the entries of a group are worth keeping, and so where they may live."""

    GLOBAL = "GLOBAL"
    """Read by every later token: kept for days, in device pages and on SSD."""
    WINDOW = "WINDOW"
    """Read by the next few tokens only: kept for minutes, in the host window pool alone."""
    TRANSIENT = "TRANSIENT"
    """Never worth keeping: counted by the footprint, stored nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """How the values of one entry become bytes.

    An entry is its ``planes``, one after the other: the packed values, then their scales.

    Source: spec of the formats in docs/format.md, section 3.
    """

    name: str
    value_bits: int
    scale_block: int = 0
    """Values that share one scale; 0 when all values of an entry do."""
    scale_bytes: int = 0
    """Bytes of one scale; 0 when the format has no scales."""

    def planes(self, values: int) -> tuple[int, ...]:
        """Bytes of each plane of an entry of ``values`` values."""
        if self.value_bits * values % 8 or (self.scale_block and values % self.scale_block):
            unit = math.lcm(8 // math.gcd(8, self.value_bits), self.scale_block or 1)
            msg = f"{self.name} packs {unit} values at a time, an entry of {values} does not divide"
            raise ConfigError(msg)
        packed = self.value_bits * values // 8
        scales = values // self.scale_block if self.scale_block else 1
        return (packed, scales * self.scale_bytes) if self.scale_bytes else (packed,)

    def entry_bytes(self, values: int) -> int:
        """Bytes of an entry of ``values`` values."""
        return sum(self.planes(values))


FORMATS: Mapping[str, EntryFormat] = {
    entry_format.name: entry_format
    for entry_format in (
        EntryFormat(name="u8", value_bits=8),
        EntryFormat(name="f16", value_bits=16),
        EntryFormat(name="bf16", value_bits=16),
        EntryFormat(name="f32", value_bits=32),
        EntryFormat(name="nvfp4", value_bits=4, scale_block=16, scale_bytes=1),
        EntryFormat(name="mxfp4", value_bits=4, scale_block=32, scale_bytes=1),
        EntryFormat(name="mxfp8", value_bits=8, scale_block=32, scale_bytes=1),
        EntryFormat(name="fp8", value_bits=8, scale_bytes=4),
    )
}
"""Every entry format that a layout can name."""

SCALE_RULES: Mapping[str, tuple[str, ...]] = {
    "nvfp4": ("v41", "torchao"),
    "mxfp4": ("floor", "even", "rceil"),
    "mxfp8": ("rceil",),
    "fp8": ("amax",),
}
"""Rules for choosing a scale, by format. The first is the default. Source: docs/format.md."""

DTYPE_FORMATS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "uint8": "u8",
}
"""Names that model configs use, as entry formats."""


MOST_LAYERS = 1 << 12
"""Most layers of a group: thirty times any public model's. Laying out a frame costs their square."""
_MOST_COUNT = 1 << 48
"""Largest count: bytes of any group stay within 64 bits, as files have them."""


def _set(owner: object, **fields: object) -> None:
    """Give a frozen value its fields as they were checked."""
    for name, value in fields.items():
        object.__setattr__(owner, name, value)


def _text(value: object, owner: str, name: str) -> str:
    if not isinstance(value, str):
        msg = f"{owner}: {name} must be text, found {brief(value)}"
        raise ConfigError(msg)
    return value


def _count(value: object, owner: str, name: str, *, least: int) -> int:
    """Return an integer of any integer type, numpy's included, as Python's own."""
    found = -1
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # of an array
            found = operator.index(value)
    if not least <= found <= _MOST_COUNT:
        msg = f"{owner}: {name} must be an integer from {least} to 2**48, found {brief(value)}"
        raise ConfigError(msg)
    return found


def _one_of(value: object, known: tuple[str, ...], owner: str, name: str) -> str:
    if not isinstance(value, str) or value not in known:
        msg = f"{owner}: unknown {name} {brief(value)}, expected one of {', '.join(known)}"
        raise ConfigError(msg)
    return known[known.index(value)]


def _layer_ids(value: object, owner: str) -> tuple[int, ...]:
    items = several(value, f"{owner}: layers", "layer ids", ConfigError, MOST_LAYERS)
    layers = tuple(_count(item, owner, "a layer's id", least=0) for item in items)
    if not layers or list(layers) != sorted(set(layers)):
        msg = f"{owner}: layers must be ids from 0 on, distinct, ascending and not empty, found {brief(layers)}"
        raise ConfigError(msg)
    return layers


def _groups(value: object, owner: str) -> tuple[LayerGroup, ...]:
    groups = []
    for item in several(value, f"{owner}: groups", "LayerGroup", ConfigError, MOST_LAYERS):
        if not isinstance(item, LayerGroup):
            msg = f"{owner}: groups must be LayerGroup values, found {brief(item)}"
            raise ConfigError(msg)
        groups.append(item)
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that cache one kind of entry.

    Invariants:
        ``layers`` are distinct and ascending; every count is at least 1; ``scale_rule`` belongs to
        ``entry_format``.
    """

    name: str
    layers: tuple[int, ...]
    """Ids of the layers that own entries; layers that only read them are not listed."""
    values: int
    """Values in one entry of one layer."""
    entry_format: str
    lifetime: Lifetime = Lifetime.GLOBAL
    tokens_per_entry: int = 1
    scale_rule: str = ""

    def __post_init__(self) -> None:
        """Reject a group that could not be stored; make its fields plain values."""
        owner = f"group {brief(self.name)}"
        _set(
            self,
            name=_text(self.name, owner, "name"),
            layers=_layer_ids(self.layers, owner),
            values=_count(self.values, owner, "values", least=1),
            tokens_per_entry=_count(self.tokens_per_entry, owner, "tokens_per_entry", least=1),
            lifetime=_one_of(self.lifetime, tuple(Lifetime), owner, "lifetime"),
            entry_format=_one_of(self.entry_format, tuple(FORMATS), owner, "entry format"),
        )
        rules = SCALE_RULES.get(self.entry_format, ("",))
        if isinstance(self.scale_rule, str) and not self.scale_rule:
            _set(self, scale_rule=rules[0])
        if not isinstance(self.scale_rule, str) or self.scale_rule not in rules:
            msg = f"{owner}: {self.entry_format} has no scale rule {brief(self.scale_rule)}, expected one of {', '.join(rules)}"
            raise ConfigError(msg)
        self.planes  # noqa: B018 - raises for a number of values that the format cannot pack

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of each plane of one entry: packed values, then scales."""
        return FORMATS[self.entry_format].planes(self.values)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer."""
        return sum(self.planes)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one token adds, over all layers of the group."""
        return Fraction(len(self.layers) * self.entry_bytes, self.tokens_per_entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a model caches.

    Invariants:
        At least one GLOBAL group; group names are distinct; ``window_tokens`` is positive exactly
        when there are WINDOW groups.
    """

    model: str
    """A label for people. It is not part of the fingerprint."""
    groups: tuple[LayerGroup, ...]
    window_tokens: int = 0
    """W: how many of the last tokens a window layer reads, the query's own token included."""
    _fingerprint: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Reject a layout that no cache could hold; make its fields plain values."""
        owner = f"layout {brief(self.model)}"
        _set(
            self,
            model=_text(self.model, owner, "model"),
            groups=_groups(self.groups, owner),
            window_tokens=_count(self.window_tokens, owner, "window_tokens", least=0),
        )
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            msg = f"layout {self.model!r}: group names must be distinct, found {names}"
            raise ConfigError(msg)
        if not self.global_groups:
            msg = f"layout {self.model!r} has no GLOBAL group, so there is nothing to keep"
            raise ConfigError(msg)
        if bool(self.window_groups) != (self.window_tokens > 0):
            msg = (
                f"layout {self.model!r}: window_tokens is {self.window_tokens} "
                f"with {len(self.window_groups)} WINDOW groups; give both or neither"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "_fingerprint", self._digest())

    @property
    def global_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that tiers keep."""
        return tuple(group for group in self.groups if group.lifetime is Lifetime.GLOBAL)

    @property
    def window_groups(self) -> tuple[LayerGroup, ...]:
        """The groups that the window pool keeps."""
        return tuple(group for group in self.groups if group.lifetime is Lifetime.WINDOW)

    def group(self, name: str) -> LayerGroup:
        """Return the group of that name, or raise ``ValueError`` naming those there are."""
        for group in self.groups:
            if group.name == name:
                return group
        msg = f"layout {self.model!r} has no group {name!r}, expected one of {', '.join(g.name for g in self.groups)}"
        raise ValueError(msg)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of global KV that one token adds."""
        return sum((group.bytes_per_token for group in self.global_groups), Fraction(0))

    @property
    def window_bytes(self) -> int:
        """Bytes of one window snapshot of ``window_tokens`` rows."""
        rows = self.window_tokens
        return sum(
            len(g.layers) * g.entry_bytes * rows // g.tokens_per_entry for g in self.window_groups
        )

    @property
    def alignment(self) -> int:
        """Least number of tokens that is a whole number of entries in every GLOBAL group."""
        return math.lcm(*(group.tokens_per_entry for group in self.global_groups))

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides how GLOBAL entries are laid out in bytes."""
        return self._fingerprint

    def _digest(self) -> str:
        groups = [
            [g.name, list(g.layers), g.values, g.entry_format, g.tokens_per_entry, g.scale_rule]
            for g in self.global_groups
        ]
        text = json.dumps(["kvstore.layout.1", groups], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()
