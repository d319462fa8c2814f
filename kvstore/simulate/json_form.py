"""JSON form of a report: one conversion for all of its frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

INLINE = {"inline": True}
"""Metadata of a field whose own fields become keys of the object that holds it."""
OPTIONAL = {"optional": True}
"""Metadata of a field that is left out where it is None."""
INTERVAL = {"key": "window"}
"""Metadata of the counted interval, with its key in JSON."""
CEILING, CEILINGS = {"key": "ceiling"}, {"key": "ceilings"}
SHARE_OF_CEILING = {"key": "share_of_ceiling"}
"""Metadata of an infinite cache's values: its hit ratio is the ceiling in JSON."""


def as_dict(value: Any) -> Any:
    """Return a report, or a value of one, as JSON values, with keys in the order of the fields."""
    if isinstance(value, Mapping):
        return {name: as_dict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_dict(each) for each in value]
    if not is_dataclass(value):
        return value
    found: dict[str, Any] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if inner is None and "optional" in field.metadata:
            continue
        if "inline" in field.metadata:
            found |= as_dict(inner)
        else:
            found[field.metadata.get("key", field.name)] = as_dict(inner)
    return found
