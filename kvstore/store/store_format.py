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

_GROUP_FIELDS: Mapping[str, type] = {
    "name": str,
    "layers": list,
    "values": int,
    "entry_format": str,
    "scale_rule": str,
    "tokens_per_entry": int,
}
"""Fields of a group in the text, in order."""


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """The format described by the ``VERSION`` file of a store."""

    layout: Layout  # its GLOBAL groups are stored
    block_tokens: int
    key_bytes: int = 0  # longest key of a store of callers' own keys, 0 for a store of tokens
    ssd_formats: Mapping[str, str] = field(default_factory=dict)
    """Entry formats at rest, by group, if they differ from the layout's."""
    secret: str = ""  # fingerprint of the secret of the block hashes, empty for none


def format_text(form: StoreFormat) -> str:
    """Return the format of a store as one line of JSON. Equal texts mean equal frames."""
    text: dict[str, Any] = {
        "fingerprint": form.layout.fingerprint,
        "block_tokens": form.block_tokens,
        "groups": [
            {name: getattr(group, name) for name in _GROUP_FIELDS}
            for group in form.layout.global_groups
        ],
    }
    more = {
        "key_bytes": form.key_bytes,
        "ssd_formats": dict(sorted(form.ssd_formats.items())),
        "secret": form.secret,
    }
    text |= {name: value for name, value in more.items() if value}
    return json.dumps(text, separators=(",", ":"))


def parse_format(text: str) -> StoreFormat:
    """Parse the result of ``format_text``. Raises ``StoreError`` for a damaged text."""
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
        raise StoreError(f"the store's VERSION file is damaged: {error!r:.200}") from error
    if layout.fingerprint != found.get("fingerprint"):
        msg = "the store's VERSION file is damaged: its groups do not match its fingerprint"
        raise StoreError(msg)
    return form


def _group(found: Mapping[str, Any]) -> LayerGroup:
    values: dict[str, Any] = {
        name: _value(found, name, kind) for name, kind in _GROUP_FIELDS.items()
    }
    if any(type(layer) is not int for layer in values["layers"]):
        raise TypeError(f"layers are {values['layers']!r:.40}, expected integers")
    return LayerGroup(**values | {"layers": tuple(values["layers"])})


def _value(found: Mapping[str, Any], name: str, kind: type[V], *default: V) -> V:
    """Return a field of exactly one type: 16.0 and true are not integers. Raises ``TypeError``."""
    value = found[name] if name in found or not default else default[0]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.40}, expected {kind.__name__}")
    return value
