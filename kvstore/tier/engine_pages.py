"""The description of an engine's own pages. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENTRIES_TAG = "entries"
"""The only supported layout tag: axes ``[page, entry, *numbers]`` of each layer, any strides."""


class Pages:
    """Source or target of entries: paged tensors, and a page table.

    A page contains the same number of entries of every layer of a group. The order of axes is fixed and strides are free:
    an engine with another order passes permuted or sliced views, without a copy.

    Shapes:
        ``tensors[group]`` is either one torch tensor ``[pages, layers, entries, *entry]``, or a sequence of one tensor
        ``[pages, entries, *entry]`` for each of ``group.layers``. ``*entry`` is ``(entry_bytes,)`` of uint8, or any
        shape of ``group.values`` floating-point numbers, which are encoded and decoded in the group's format.

    Units:
        ``page_ids`` lists the pages of tokens ``[0, ...)`` in order: integers, or a mapping from each group to such a
        list. Ids of pages that a call does not access may have any value.

    ``layout_tag`` names the order of axes; any other than ``"entries"`` is refused.
    """

    def __init__(
        self, tensors: Mapping[str, Any], page_ids: Any, layout_tag: str = ENTRIES_TAG
    ) -> None:
        self.tensors = tensors
        self.page_ids = page_ids
        self.layout_tag = layout_tag
