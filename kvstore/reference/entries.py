"""Global entries of one sequence: stored bytes and their decoded values.

Attention reads decoded values only, so the writer of an entry and a sequence that restores it read equal
values.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore.reference.formats import Entries, pack, unpack
from kvstore.reference.ops import straight_through


class PageReader(Protocol):
    """Reader of a hit's entries in device pages."""

    def __call__(self, group: str, layer: int, indices: Tensor | None, /) -> Tensor:
        """Return decoded entries.

        Shapes:
            indices int64 ``[rows, k]``, -1 for none, or None for all n entries of the hit;
            returns ``[rows, k, values]``, or ``[n, values]`` for all of them.
        """


class GlobalEntries:
    """Global entries of tokens ``[0, capacity)``, written in order.

    Invariants:
        Entries of the restored prefix, which are shared with other sequences, are never written.
    """

    def __init__(self, layout: kvstore.Layout, capacity: int, dtype: torch.dtype) -> None:
        self._groups = {group.name: group for group in layout.global_groups}
        self._dtype = dtype
        self._bytes = {}
        for name, group in self._groups.items():
            # One entry more than can be complete, so that a query without entries can index one.
            count = capacity // group.tokens_per_entry + 1
            self._bytes[name] = np.zeros((len(group.layers), count, group.entry_bytes), np.uint8)
        # NaN until written, so that an entry read too early makes every result NaN. With a tensor for
        # each layer, a gradient can pass through one while the next is written.
        self._values = {
            name: [
                torch.full((stored.shape[1], self._groups[name].values), torch.nan, dtype=dtype)
                for _ in stored
            ]
            for name, stored in self._bytes.items()
        }
        self._pages: PageReader | None = None
        self.write_floor = 0
        """First token with entries that this sequence may write."""
        self.bytes_from = 0
        """First token with entries in host memory; earlier ones are in device pages."""

    def restore(self, entries: Entries, tokens: int) -> None:
        """Set the entries of tokens ``[0, tokens)``, as returned by ``PrefixCache.read``."""
        for name, group in self._groups.items():
            count = tokens // group.tokens_per_entry
            self._bytes[name][:, :count] = entries[name][:, :count]
            for row in range(len(group.layers)):
                stored = self._bytes[name][row, :count]
                self._values[name][row][:count] = unpack(group, stored, self._dtype)
        self.write_floor = tokens

    def attach(self, pages: PageReader, tokens: int) -> None:
        """Use device pages for the entries of tokens ``[0, tokens)``, read on demand."""
        self._pages = pages
        self.write_floor = self.bytes_from = tokens

    def write(self, name: str, layer: int, first: int, values: Tensor) -> None:
        """Pack values as entries ``first``, ``first + 1``, ... Shapes: values ``[n, group.values]``."""
        group = self._groups[name]
        assert first * group.tokens_per_entry >= self.write_floor
        row, stop = group.layers.index(layer), first + len(values)
        self._bytes[name][row, first:stop] = packed = pack(group, values)
        decoded = unpack(group, packed, self._dtype)
        self._values[name][row][first:stop] = straight_through(values, decoded)

    def truncate(self, tokens: int) -> None:
        """Remove the entries completed by tokens from ``tokens`` on."""
        for name, group in self._groups.items():
            count = tokens // group.tokens_per_entry
            self._bytes[name][:, count:] = 0
            for values in self._values[name]:
                values[count:] = torch.nan

    def gather(self, name: str, layer: int, indices: Tensor) -> Tensor:
        """Return the chosen entries of each query, with an arbitrary value for -1.

        Shapes:
            indices int64 ``[rows, k]``; returns ``[rows, k, group.values]``.
        """
        group = self._groups[name]
        values = self._values[name][group.layers.index(layer)][indices.clamp(min=0)]
        if self._pages is None:
            return values
        in_pages = (indices >= 0) & (indices < self.bytes_from // group.tokens_per_entry)
        paged = self._pages(name, layer, indices.masked_fill(~in_pages, -1))
        return torch.where(in_pages[..., None], paged.to(self._dtype), values)

    def scan(self, name: str, layer: int, count: int) -> Tensor:
        """Return the first ``count`` entries. Shapes: returns ``[count, group.values]``."""
        group = self._groups[name]
        values = self._values[name][group.layers.index(layer)][:count]
        if self._pages is None:
            return values
        paged = self._pages(name, layer, None)[: self.bytes_from // group.tokens_per_entry]
        return torch.cat((paged.to(self._dtype), values[len(paged) :]))[:count]

    def export(self, start: int, stop: int) -> dict[str, NDArray[np.uint8]]:
        """Return a copy of the entries of tokens ``[start, stop)``, for ``PrefixCache.store``.

        Shapes:
            by group, uint8 ``[layers, n, entry_bytes]``.
        """
        assert start >= self.bytes_from
        copies = {}
        for name, group in self._groups.items():
            ratio = group.tokens_per_entry
            copies[name] = self._bytes[name][:, start // ratio : stop // ratio].copy()
        return copies
