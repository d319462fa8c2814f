"""The device tier: pages of torch tensors, one block each, on a GPU or the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codec import codec_for
from kvstore.codec.arrays import check_plain
from kvstore.errors import CapacityError, ConfigError, brief
from kvstore.frame.format import Frames
from kvstore.frame.geometry import PartBatch
from kvstore.layout import LayerGroup


class DeviceTier:
    """Pages of one layout on one device.

    Shapes:
        ``tensors[group]`` is uint8 ``[pages, layers, entries of a block, entry_bytes]``.

    A page is free or allocated. Threads: the caller serialises allocation and freeing; copies and gathers may run at
    any time.
    """

    name = "device"

    def __init__(self, frame_format: Frames, capacity_bytes: int, device: str) -> None:
        """Allocate all pages. Raises ``ConfigError`` if the device is missing or too small."""
        self._format = frame_format
        self.layout = frame_format.layout
        self.capacity_bytes = capacity_bytes
        self.page_bytes = frame_format.payload_bytes
        self.page_count = capacity_bytes // self.page_bytes
        try:
            self.device = torch.device(device)
            with torch.inference_mode(mode=False):  # pages made in it can only be written in it
                self.tensors = {
                    group.name: torch.empty(
                        (
                            *(self.page_count, len(group.layers)),
                            *(frame_format.entries[group.name], group.entry_bytes),
                        ),
                        dtype=torch.uint8,
                        device=self.device,
                    )
                    for group in self.layout.global_groups
                }
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"device {device!r} cannot allocate {self.page_count} pages of {self.page_bytes} bytes: "
                f"{error}; lower device_bytes or choose another device"
            ) from error
        self._free = list(range(self.page_count - 1, -1, -1))
        self._target = (
            frame_format.entries_target(
                {name: tensor.numpy() for name, tensor in self.tensors.items()}
            )
            if self.device.type == "cpu"
            else None
        )
        """All pages as a frame target, if they are in host memory."""

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` free pages. Raises ``CapacityError`` if there are fewer."""
        if count > len(self._free):
            msg = f"{count} device pages were requested, {len(self._free)} of {self.page_count} are free"
            raise CapacityError(msg)
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Free pages."""
        self._free.extend(pages)
        assert len(self._free) <= self.page_count, "a page was freed twice"

    def page_table(self, pages: Sequence[int]) -> torch.Tensor:
        """Return pages as an int64 tensor on the device."""
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device)

    def write(self, page: int, frame: memoryview) -> str | None:
        """Copy a frame's payload to a page; return its fault or None. After a fault its content is undefined."""
        if self._target is not None:
            return self._format.scatter(frame, self._target, page)
        staged = self._format.empty(1)
        fault = self._format.scatter(frame, self._format.entries_target(staged), 0)
        if fault is None:
            for name, array in staged.items():
                self.tensors[name][page].copy_(torch.from_numpy(array))
        return fault

    def read(
        self,
        page: int,
        entries: Mapping[str, NDArray[np.uint8]],
        block: int,
        batch: PartBatch | None = None,
    ) -> None:
        """Copy a page to block ``block`` of host ``entries``: the layers of ``batch``, or all."""
        for group in self._format.layout.global_groups:
            count = self._format.entries[group.name]
            target = entries[group.name][:, block * count : (block + 1) * count]
            rows = self.tensors[group.name][page]
            if batch is not None:
                rows = rows[[at for at, n in enumerate(group.layers) if n in batch.layers]]
            target[...] = rows.cpu().numpy()

    def _indices(self, given: object) -> torch.Tensor:
        """Return entry indices as int64 ``[queries, k]`` on the device, or raise ``ValueError``."""
        check_plain(given, "entry_indices")
        try:
            indices = torch.as_tensor(given, device=self.device)
        except Exception as error:  # torch raises different exceptions for different values
            msg = f"entry_indices must be integers [queries, k], found {brief(given)}: {error}"
            raise ValueError(msg) from error
        if indices.ndim != 2:
            msg = f"entry_indices must be [queries, k], found shape {list(indices.shape)}"
            raise ValueError(msg)
        is_whole = not (indices.is_floating_point() or indices.is_complex())
        if indices.numel() and (not is_whole or indices.dtype == torch.bool):
            name = str(indices.dtype).removeprefix("torch.")
            raise ValueError(f"entry_indices must be integers, found dtype {name}")
        return indices.to(torch.int64)

    def gather(
        self,
        page_ids: torch.Tensor,
        group: LayerGroup,
        layer: int,
        entry_indices: torch.Tensor | NDArray[np.integer[Any]] | None,
        dtype: torch.dtype | str,
    ) -> torch.Tensor:
        """Return decoded entries of one layer; reads only the requested rows.

        Shapes:
            ``page_ids`` is int64 ``[blocks]``. ``entry_indices`` is int ``[queries, k]``, -1 for none (zeros), or None
            for every entry of the table as one query. The result is ``[queries, k, group.values]`` of ``dtype``.

        Raises ``ValueError`` for a layer that the group does not own or an entry beyond the table.
        """
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(wanted, torch.dtype):
            msg = f"unknown dtype {dtype!r}, expected a torch dtype such as torch.bfloat16, or its name"
            raise ValueError(msg)
        if layer not in group.layers:
            msg = f"layer {layer} owns no {group.name!r} entries, expected one of {list(group.layers)}"
            raise ValueError(msg)
        per_page = self._format.entries[group.name]
        total = per_page * len(page_ids)
        if entry_indices is None:
            indices = torch.arange(total, device=self.device).unsqueeze(0)
        else:
            indices = self._indices(entry_indices)
        if indices.numel() == 0:
            return torch.zeros((*indices.shape, group.values), dtype=wanted, device=self.device)
        low, high = int(indices.min()), int(indices.max())
        if low < -1 or high >= total:
            msg = f"entry indices must lie in [-1, {total}), found {low if low < -1 else high}"
            raise ValueError(msg)
        if not total:
            return torch.zeros((*indices.shape, group.values), dtype=wanted, device=self.device)
        present = indices >= 0
        safe = indices.clamp(min=0)
        table = page_ids.to(self.device)
        rows = self.tensors[group.name][
            table[safe // per_page], group.layers.index(layer), safe % per_page
        ]
        values = codec_for(group).decode(rows, wanted)
        return torch.where(
            present.unsqueeze(-1), values, torch.zeros((), dtype=wanted, device=self.device)
        )
