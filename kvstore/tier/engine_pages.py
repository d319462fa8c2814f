"""Entries in pages that an engine owns: where they lie, and in which order. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENTRIES_TAG = "entries"
"""The one order of pages that is taken: axes ``[page, entry, *numbers]`` of each layer, by strides."""


class Pages:
    """Source or target of entries: tensors cut into pages, and the page of each run of tokens.

    A page holds the same number of entries of every layer of a group. Axes must come in this order;
    strides are free, so an engine that keeps its tensors in another order gives permuted or sliced
    views of them and nothing is copied.

    Shapes:
        ``tensors[group]`` is either one torch tensor ``[pages, layers, entries, *entry]``, or a
        sequence of one tensor ``[pages, entries, *entry]`` for each of ``group.layers``. ``*entry``
        is ``(entry_bytes,)`` of uint8, or any shape of ``group.values`` floating-point numbers,
        which the group's format encodes and decodes.

    Units:
        ``page_ids`` lists the pages of tokens ``[0, ...)`` in order: integers, or one such list for
        each group where groups are paged apart. Ids of pages that a call does not touch may be
        anything.

    ``layout_tag`` names the order of axes; other orders than ``"entries"`` are refused, not guessed.
    """

    def __init__(
        self, tensors: Mapping[str, Any], page_ids: Any, layout_tag: str = ENTRIES_TAG
    ) -> None:
        self.tensors = tensors
        self.page_ids = page_ids
        self.layout_tag = layout_tag
