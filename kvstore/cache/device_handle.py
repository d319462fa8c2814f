"""The engine's interface to the device tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.device_cache import DeviceCache
from kvstore.cache.match import PinnedPages
from kvstore.checks import integer, text

if TYPE_CHECKING:
    import torch


class DeviceHandle:
    """The pages of the device tier: gather entries from them, or fill new ones in place. Threads: any."""

    def __init__(self, device: DeviceCache) -> None:
        self._device = device

    def gather(
        self,
        pages: PinnedPages,
        group: str,
        layer: int,
        entry_indices: torch.Tensor | NDArray[np.integer[Any]] | None,
        dtype: torch.dtype | str,
    ) -> torch.Tensor:
        """Return decoded entries of one layer from loaded pages.

        Shapes:
            ``entry_indices``: int ``[queries, k]``, -1 for none (zeros), or None for all entries as one query.
            Returns ``[queries, k, values]`` of ``dtype`` on the tier's device.

        Raises:
            ValueError: for an unknown group or dtype, a layer outside the group, an index beyond the pages, or pages
                that were released or belong to another store.

        Cost: reads only the rows of ``entry_indices``.
        """
        self._device.check(pages)
        tier = self._device.tier
        known = {g.name: g for g in tier.layout.global_groups}
        if text(group, "group") not in known:
            raise ValueError(f"unknown GLOBAL group {group!r}, expected one of {', '.join(known)}")
        if pages.is_released:
            msg = "these pages were released and may contain another prefix; load the match again"
            raise ValueError(msg)
        number = integer(layer, "layer")
        return tier.gather(pages.page_ids, known[group], number, entry_indices, dtype)

    def allocate(self, count: int) -> PinnedPages:
        """Return ``count`` private pages for the engine to fill in place; ``publish`` shares them.

        Raises:
            CapacityError: if fewer pages are free or unpinned.
            ValueError: if ``count`` is not a positive integer.
        """
        return self._device.allocate(integer(count, "count", 1))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Page tensors by group: uint8 ``[pages, layers, entries of a block, entry_bytes]``."""
        return self._device.tier.tensors

    @property
    def page_count(self) -> int:
        """Number of pages."""
        return self._device.tier.page_count

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return self._device.tier.free_pages
