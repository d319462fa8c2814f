"""Layout of a model's cache: groups of layers, the bytes of their entries, and their lifetimes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from kvstore.checks import choice, integer, several, text
from kvstore.errors import ConfigError, brief


class Lifetime(StrEnum):
    """Lifetime of a group's entries: it determines the tiers that store them."""

    GLOBAL = "GLOBAL"
    """Read by all later tokens; stored for days, in device pages and on SSD."""
    WINDOW = "WINDOW"
    """Read by the next W tokens only; stored for minutes, in the host window pool."""
    TRANSIENT = "TRANSIENT"
    """Not stored; only the footprint counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """Byte format of an entry: the plane of its codes, then the plane of their scales.

    Source: docs/format.md, section 3.
    """

    name: str
    value_bits: int
    scale_block: int = 0
    """Values that share one scale; 0 if all values of an entry do."""
    scale_bytes: int = 0
    """Bytes of one scale; 0 for a format without scales."""

    def planes(self, values: int) -> tuple[int, ...]:
        """Bytes of each plane of an entry of ``values`` values."""
        if self.value_bits * values % 8 or (self.scale_block and values % self.scale_block):
            unit = math.lcm(8 // math.gcd(8, self.value_bits), self.scale_block or 1)
            msg = f"an entry of {self.name} must have a multiple of {unit} values, found {values}"
            raise ConfigError(msg)
        codes = self.value_bits * values // 8
        scales = values // self.scale_block if self.scale_block else 1
        return (codes, scales * self.scale_bytes) if self.scale_bytes else (codes,)

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
"""All entry formats, by name."""

SCALE_RULES: Mapping[str, tuple[str, ...]] = {
    "nvfp4": ("v41", "torchao"),
    "mxfp4": ("floor", "even", "rceil"),
    "mxfp8": ("rceil",),
    "fp8": ("amax",),
}
"""Scale rules by format, the default first. Source: docs/format.md."""

DTYPE_FORMATS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "uint8": "u8",
}
"""Entry formats of the dtype names in model configs."""


MOST_LAYERS = 1 << 12
"""Most layers of a group, 30 times any public model's: a frame's geometry costs their square."""
_MOST_COUNT = 1 << 48
"""Largest count, so that the bytes of any group fit 64 bits."""


def _set(owner: object, **fields: object) -> None:
    """Set fields of a frozen value."""
    for name, value in fields.items():
        object.__setattr__(owner, name, value)


def _count(value: object, name: str, *, least: int) -> int:
    return integer(value, name, least, _MOST_COUNT, ConfigError)


def _layer_ids(value: object, owner: str) -> tuple[int, ...]:
    items = several(value, f"{owner}: layers", "layer ids", ConfigError, MOST_LAYERS)
    layers = tuple(_count(item, f"{owner}: a layer's id", least=0) for item in items)
    if not layers or list(layers) != sorted(set(layers)):
        msg = f"{owner}: layers must be ids from 0 on, distinct, ascending and not empty, found {brief(layers)}"
        raise ConfigError(msg)
    return layers


def _groups(value: object, owner: str) -> tuple[LayerGroup, ...]:
    groups = []
    for item in several(value, f"{owner}: groups", "LayerGroup", ConfigError, MOST_LAYERS):
        if not isinstance(item, LayerGroup):
            raise ConfigError(f"{owner}: groups must be LayerGroup values, found {brief(item)}")
        groups.append(item)
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that cache entries of one format.

    Invariants: ``layers`` are distinct and ascending; every count is at least 1; ``scale_rule``
        belongs to ``entry_format``.
    """

    name: str
    layers: tuple[int, ...]
    """Ids of the layers that own entries, without layers that only read them."""
    values: int
    """Values in one entry of one layer."""
    entry_format: str
    lifetime: Lifetime = Lifetime.GLOBAL
    tokens_per_entry: int = 1
    scale_rule: str = ""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an invalid group; convert the fields to plain types."""
        owner = f"group {brief(self.name)}"
        _set(
            self,
            name=text(self.name, f"{owner}: name", ConfigError),
            layers=_layer_ids(self.layers, owner),
            values=_count(self.values, f"{owner}: values", least=1),
            tokens_per_entry=_count(self.tokens_per_entry, f"{owner}: tokens_per_entry", least=1),
            lifetime=Lifetime(
                choice(self.lifetime, f"{owner}: lifetime", [*map(str, Lifetime)], ConfigError)
            ),
            entry_format=choice(self.entry_format, f"{owner}: entry_format", FORMATS, ConfigError),
        )
        rules = SCALE_RULES.get(self.entry_format, ("",))
        name = f"{owner}: scale_rule of {self.entry_format}"
        rule = text(self.scale_rule, name, ConfigError) or rules[0]
        _set(self, scale_rule=choice(rule, name, rules, ConfigError))
        self.planes  # noqa: B018 - raises for a number of values that the format cannot hold

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of each plane of one entry: codes, then scales."""
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
    """Layer groups of a model's cache.

    Invariants: At least one GLOBAL group; group names are distinct; ``window_tokens`` is positive
        exactly when there are WINDOW groups.
    """

    model: str
    """Label for people, not part of the fingerprint."""
    groups: tuple[LayerGroup, ...]
    window_tokens: int = 0
    """W: number of last tokens that a window layer reads, including the query's own."""
    _fingerprint: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an invalid layout; convert the fields to plain types."""
        owner = f"layout {brief(self.model)}"
        _set(
            self,
            model=text(self.model, f"{owner}: model", ConfigError),
            groups=_groups(self.groups, owner),
            window_tokens=_count(self.window_tokens, f"{owner}: window_tokens", least=0),
        )
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"layout {self.model!r}: group names must be distinct, found {names}")
        if not self.global_groups:
            raise ConfigError(f"layout {self.model!r} has no GLOBAL group, expected at least one")
        if bool(self.window_groups) != (self.window_tokens > 0):
            msg = (
                f"layout {self.model!r}: window_tokens is {self.window_tokens} "
                f"with {len(self.window_groups)} WINDOW groups, expected both or neither"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "_fingerprint", self._digest())

    @property
    def global_groups(self) -> tuple[LayerGroup, ...]:
        """Groups that tiers store."""
        return self._with_lifetime(Lifetime.GLOBAL)

    @property
    def window_groups(self) -> tuple[LayerGroup, ...]:
        """Groups that the window pool stores."""
        return self._with_lifetime(Lifetime.WINDOW)

    def _with_lifetime(self, lifetime: Lifetime) -> tuple[LayerGroup, ...]:
        return tuple(group for group in self.groups if group.lifetime is lifetime)

    def group(self, name: str) -> LayerGroup:
        """Return a group by name. Raises ``ValueError`` for an unknown name."""
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
        """Hex digest of all fields that determine the bytes of GLOBAL entries."""
        return self._fingerprint

    def _digest(self) -> str:
        groups = [
            [g.name, list(g.layers), g.values, g.entry_format, g.tokens_per_entry, g.scale_rule]
            for g in self.global_groups
        ]
        spelled = json.dumps(["kvstore.layout.1", groups], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(spelled.encode()).hexdigest()
