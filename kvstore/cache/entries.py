"""Host arrays of entries: results of reads, and validated arguments of stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codec.host import on_host
from kvstore.layout import Layout


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of a ``store`` or ``save``."""

    namespace: Mapping[str, Any]
    wait: float
    """Most seconds to wait for space in the queue."""
    ttl: float | None
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of a ``store`` or ``save``."""

    end: int
    """Leading tokens that are now stored or queued."""
    present: int
    """Offered blocks that were already stored or queued."""
    dropped: int
    """Offered blocks that were not accepted. An accepted block can still be dropped before its commit, for lack of
    space or quota; ``dropped_blocks`` of ``stats`` counts both by reason."""


class Entries(dict[str, NDArray[np.uint8]]):
    """Entries of tokens ``[0, tokens)``, by GLOBAL group.

    Shapes:
        Each is uint8 ``[len(group.layers), tokens // tokens_per_entry, entry_bytes]``.
    """

    def __init__(self, arrays: Mapping[str, NDArray[np.uint8]], tokens: int) -> None:
        super().__init__(arrays)
        self.tokens = tokens
        """Leading tokens covered: at most the hit, fewer after a bad block."""


def host_entries(
    layout: Layout, entries: Mapping[str, Any], start: int, stop: int
) -> dict[str, NDArray[np.uint8]]:
    """Return entries of tokens ``[start, stop)`` as host arrays, checked against the layout.

    Raises:
        ValueError: naming the group, the expected shape or type, and the one found.
    """
    groups = {group.name: group for group in layout.global_groups}
    given: object = entries
    if not isinstance(given, Mapping):
        raise ValueError(f"entries must map GLOBAL groups to arrays, found {type(given).__name__}")
    missing, unknown = groups.keys() - entries.keys(), entries.keys() - groups.keys()
    if missing or unknown:
        wrong = f"group {min(missing or unknown)!r} is {'missing' if missing else 'unknown'}"
        msg = f"entries: {wrong}, expected exactly {sorted(groups)}, found {sorted(entries)}"
        raise ValueError(msg)
    arrays = {}
    for name, group in groups.items():
        array = _on_host(name, entries[name])
        expected = (len(group.layers), (stop - start) // group.tokens_per_entry, group.entry_bytes)
        if array.shape != expected:
            raise ValueError(
                f"entries of group {name!r} for tokens [{start}, {stop}): expected shape "
                f"{list(expected)} (layers, entries, bytes of an entry), found {list(array.shape)}"
            )
        arrays[name] = array
    return arrays


def _on_host(name: str, array: Any) -> NDArray[np.uint8]:
    kind = getattr(array, "dtype", type(array).__name__)
    if str(kind).removeprefix("torch.") != "uint8":
        msg = f"entries of group {name!r}: expected dtype uint8 (view the values as bytes), found {kind}"
        raise ValueError(msg)
    found = on_host(array)
    if found is None:
        msg = f"entries of group {name!r}: expected a numpy array or a torch tensor, found {type(array).__name__}"
        raise ValueError(msg)
    if found.ndim and found.strides[-1] != 1:
        found = np.ascontiguousarray(found)  # an entry's bytes must be contiguous
    return found
