"""The format of a store as one line of JSON: its layout, block size, formats at rest and secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.errors import StoreError
from kvstore.layout import LayerGroup, Layout
from kvstore.tier.ssd.version_file import FORMAT_BYTES

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """The format that the ``VERSION`` file of a store describes."""

    layout: Layout
    """Its GLOBAL groups."""
    block_tokens: int
    key_bytes: int = 0
    """Longest key of a store of callers' own keys, 0 for a store of tokens."""
    ssd_formats: Mapping[str, str] = field(default_factory=dict)
    """Entry formats at rest, of the groups where they differ from the layout's."""
    secret: str = ""
    """Fingerprint of the secret that block hashes depend on, empty for none."""


def format_text(
    layout: Layout,
    block_tokens: int,
    key_bytes: int = 0,
    ssd_formats: Mapping[str, str] | None = None,
    secret: str = "",
) -> str:
    """Return the format of a store as one line of JSON. Equal text means equal frames."""
    groups = [
        {
            "name": group.name,
            "layers": list(group.layers),
            "values": group.values,
            "entry_format": group.entry_format,
            "scale_rule": group.scale_rule,
            "tokens_per_entry": group.tokens_per_entry,
        }
        for group in layout.global_groups
    ]
    text: dict[str, Any] = {
        "fingerprint": layout.fingerprint,
        "block_tokens": block_tokens,
        "groups": groups,
    }
    text |= {"key_bytes": key_bytes} if key_bytes else {}
    text |= {"ssd_formats": dict(sorted(ssd_formats.items()))} if ssd_formats else {}
    text |= {"secret": secret} if secret else {}
    return json.dumps(text, separators=(",", ":"))


def parse_format(text: str) -> StoreFormat:
    """Return the format that ``format_text`` wrote.

    Raises:
        StoreError: if the text is damaged.
    """
    try:
        if len(text) > FORMAT_BYTES:
            raise ValueError(f"{len(text)} characters, expected at most {FORMAT_BYTES}")
        found = json.loads(text)
        layout = Layout(model="stored", groups=tuple(map(_group, found["groups"])))
        formats = _value(found, "ssd_formats", dict, {})
        form = StoreFormat(
            layout,
            _value(found, "block_tokens", int),
            _value(found, "key_bytes", int, 0),
            {name: _value(formats, name, str) for name in formats},
            _value(found, "secret", str, ""),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"the store's VERSION file is damaged: {error!r:.200}"
        raise StoreError(msg) from error
    if layout.fingerprint != found.get("fingerprint"):
        msg = "the store's VERSION file is damaged: its groups do not match its fingerprint"
        raise StoreError(msg)
    return form


def _group(found: Mapping[str, Any]) -> LayerGroup:
    layers = _value(found, "layers", list)
    if any(type(layer) is not int for layer in layers):
        raise TypeError(f"layers are {layers!r:.40}, expected integers")
    return LayerGroup(
        name=_value(found, "name", str),
        layers=tuple(layers),
        values=_value(found, "values", int),
        entry_format=_value(found, "entry_format", str),
        tokens_per_entry=_value(found, "tokens_per_entry", int),
        scale_rule=_value(found, "scale_rule", str),
    )


def _value(found: Mapping[str, Any], name: str, kind: type[V], *default: V) -> V:
    """Return a field of exactly one type: 16.0 and true are no integers. Raises ``TypeError``."""
    value = found[name] if name in found or not default else default[0]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.40}, expected {kind.__name__}")
    return value
