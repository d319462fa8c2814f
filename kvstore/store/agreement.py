"""The check that all openings of one store in a process use the same options."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, LayoutMismatch, brief
from kvstore.layout import LayerGroup, Layout

_FOR = frozenset({"block_tokens", "key_bytes", "secret", "ssd_formats"})
"""Options that determine, with the layout, the blocks of a store."""


def check_agreement(path: Path, options: Any, in_force: Any, given: Collection[str]) -> None:
    """Compare the ``given`` options with those in force.

    Raises:
        LayoutMismatch: if the store contains other blocks; every difference is named.
        ConfigError: if another option differs; every difference is named.
    """
    layouts = in_force.layout, options.layout
    parts = _layout_differences(*layouts) if "layout" in given else []
    is_other = bool(parts)
    for name in given:
        here, there = getattr(options, name), getattr(in_force, name)
        if name != "layout" and here != there:
            parts.append(f"{name} {brief(there)}, found {brief(here)}")
            is_other |= name in _FOR
    if parts:
        found = f"{path} is open in this process with {'; '.join(parts)}"
        if is_other:
            raise LayoutMismatch(f"{found}; it was left untouched: use another path")
        raise ConfigError(f"{found}: leave the option out, give the same, or close the store first")


def _layout_differences(found: Layout, expected: Layout) -> list[str]:
    """Describe the differences between the groups of two layouts, of any lifetime; labels are ignored."""
    parts = []
    if found.window_tokens != expected.window_tokens:
        parts.append(f"window_tokens {found.window_tokens}, found {expected.window_tokens}")
    there, here = ({group.name: group for group in each.groups} for each in (found, expected))
    parts += [
        f"group {name!r} {_group_text(there.get(name))}, found {_group_text(here.get(name))}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    return parts


def _group_text(group: LayerGroup | None) -> str:
    if group is None:
        return "missing"
    values = asdict(group) | {"layers": brief(list(group.layers)), "lifetime": group.lifetime.name}
    return " ".join(f"{name}={value}" for name, value in values.items() if name != "name")
