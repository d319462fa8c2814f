"""Copies of entries between an engine's own pages and host arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.codec import codec_for
from kvstore.layout import LayerGroup, Layout
from kvstore.tier.engine_pages import ENTRIES_TAG, Pages

RAW_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Formats of plain numbers: a copy is exact in the engine's own dtype, otherwise one rounding."""
OPAQUE_FORMAT = "u8"  # the format of entries that are opaque bytes


def encode_rows(group: LayerGroup, rows: torch.Tensor) -> torch.Tensor:
    """Return numbers ``[n, group.values]`` as entries, uint8 ``[n, entry_bytes]``."""
    raw = RAW_DTYPES.get(group.entry_format)
    return codec_for(group).encode(rows if raw is None else rows.to(raw))


def decode_rows(group: LayerGroup, entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return entries uint8 ``[n, entry_bytes]`` as numbers ``[n, group.values]`` of ``dtype``."""
    raw = RAW_DTYPES.get(group.entry_format)
    return codec_for(group).decode(entries, dtype if raw is None else raw).to(dtype)


class PagedEntries:
    """One request's entries in an engine's pages, addressed by token.

    Copies run in inference mode, because tensors created in it can only be written in it.

    Threads: any; the caller guards the engine's tensors.
    """

    def __init__(self, layout: Layout, pages: Pages, tokens: int) -> None:
        """Check that ``pages`` can contain tokens ``[0, tokens)``; raise ``ValueError`` naming group and mismatch."""
        if pages.layout_tag != ENTRIES_TAG:
            raise ValueError(
                f"pages have layout tag {pages.layout_tag!r}, expected {ENTRIES_TAG!r}: give views with "
                "axes [page, entry, ...]"
            )
        self.layout = layout
        self._layers: dict[str, list[torch.Tensor]] = {}
        self._ids: dict[str, torch.Tensor] = {}
        for group in layout.global_groups:
            self._layers[group.name] = _layer_views(group, pages.tensors)
            self._ids[group.name] = self._page_table(group, pages.page_ids, tokens)

    def _page_table(self, group: LayerGroup, page_ids: Any, tokens: int) -> torch.Tensor:
        given = page_ids.get(group.name) if isinstance(page_ids, Mapping) else page_ids
        if given is None:
            raise ValueError(f"page_ids has no group {group.name!r}, found {sorted(page_ids)}")
        try:
            ids = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            msg = f"page_ids of group {group.name!r} must be a list of integers: {error}"
            raise ValueError(msg) from error
        is_integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.ndim != 1 or not is_integers:
            raise ValueError(
                f"page_ids of group {group.name!r} must be a list of integers, found "
                f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            )
        ids = ids.to("cpu", torch.int64)
        have = len(ids) * self._page_entries(group)
        need = tokens // group.tokens_per_entry
        if have < need:
            raise ValueError(
                f"group {group.name!r}: {len(ids)} pages have {have} entries, expected at least {need} "
                f"for {tokens} tokens"
            )
        return ids

    def _page_entries(self, group: LayerGroup) -> int:
        return int(self._layers[group.name][0].shape[1])

    def check(self, start: int, stop: int) -> None:
        """Raise ``ValueError`` if a page id of tokens ``[start, stop)`` is out of range."""
        for group in self.layout.global_groups:
            per = self._page_entries(group)
            first, last = start // group.tokens_per_entry, stop // group.tokens_per_entry
            ids = self._ids[group.name][first // per : -(-last // per)]
            count = len(self._layers[group.name][0])
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                msg = f"group {group.name!r}: found page {wrong}, expected one of [0, {count})"
                raise ValueError(msg)

    @torch.inference_mode()
    def gather(self, start: int, stop: int) -> dict[str, NDArray[np.uint8]]:
        """Copy the entries of tokens ``[start, stop)`` to the host.

        Returns uint8 ``[layers, (stop - start) // tokens_per_entry, entry_bytes]`` by group. Cost: one copy; two if a
        page contains tokens outside the range.
        """
        found: dict[str, NDArray[np.uint8]] = {}
        for group in self.layout.global_groups:
            first, last = start // group.tokens_per_entry, stop // group.tokens_per_entry
            rows = np.empty((len(group.layers), last - first, group.entry_bytes), np.uint8)
            for target, view in zip(rows, self._layers[group.name], strict=True):
                if len(target):
                    self._gather_layer(group, view, first, last, torch.from_numpy(target))
            found[group.name] = rows
        return found

    def _gather_layer(
        self, group: LayerGroup, view: torch.Tensor, first: int, last: int, out: torch.Tensor
    ) -> None:
        per = int(view.shape[1])
        ids = self._ids[group.name][first // per : -(-last // per)].to(view.device)
        raw = RAW_DTYPES.get(group.entry_format)
        is_whole = not (first % per or last % per)
        if is_whole and view.device.type == "cpu" and view.dtype in (raw, torch.uint8):
            target = out.view(view.dtype).view(len(ids), *view.shape[1:])
            torch.index_select(view, 0, ids, out=target)
            return
        rows = torch.index_select(view, 0, ids).flatten(0, 1)
        rows = rows[first % per :][: last - first].flatten(1)
        out.copy_(rows if view.dtype == torch.uint8 else encode_rows(group, rows.contiguous()))

    @torch.inference_mode()
    def scatter(
        self, group: LayerGroup, layer: int, first: int, entries: NDArray[np.uint8]
    ) -> None:
        """Copy entries of one layer to the pages, and wait for the copy.

        ``layer`` is an index in ``group.layers``; ``entries``, uint8 ``[n, entry_bytes]``, are the entries
        ``[first, first + n)`` of the request. Cost: one copy per run of consecutive pages.
        """
        view = self._layers[group.name][layer]
        last, per = first + len(entries), int(view.shape[1])
        if not len(entries):
            return
        moved = torch.from_numpy(entries).to(view.device)
        rows = moved if view.dtype == torch.uint8 else decode_rows(group, moved, view.dtype)
        rows = rows.reshape(len(entries), *view.shape[2:])
        ids: list[int] = self._ids[group.name][first // per : -(-last // per)].tolist()
        entry = first
        if first % per:  # the first page also contains earlier entries
            stop = min(last, first - first % per + per)
            view[ids[0], first % per : first % per + stop - first].copy_(rows[: stop - first])
            entry, ids = stop, ids[1:]
        whole = (last - entry) // per
        pages = rows[entry - first : entry - first + whole * per].view(whole, per, *view.shape[2:])
        for at, stop in _runs(ids[:whole]):
            view[ids[at] : ids[at] + stop - at].copy_(pages[at:stop])
        entry += whole * per
        if entry < last:
            view[ids[whole], : last - entry].copy_(rows[entry - first :])
        if view.device.type == "cuda":
            torch.cuda.current_stream(view.device).synchronize()


def _layer_views(group: LayerGroup, tensors: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return one tensor ``[pages, entries, *entry]`` for each layer of a group, checked."""
    given = tensors.get(group.name)
    if given is None:
        raise ValueError(f"pages have no tensors of group {group.name!r}, found {sorted(tensors)}")
    if isinstance(given, torch.Tensor):
        views = [given[:, layer] for layer in range(given.shape[1])] if given.ndim >= 4 else []
    else:
        views = list(given)
    if len(views) != len(group.layers):
        raise ValueError(
            f"group {group.name!r}: expected pages of {len(group.layers)} layers, found {len(views)}; "
            "give one tensor per layer, or one tensor [pages, layers, entries, ...]"
        )
    takes_numbers = group.entry_format != OPAQUE_FORMAT
    numbers_too = f" or {group.values} floating-point numbers" if takes_numbers else ""
    for view in views:
        is_bytes = view.dtype == torch.uint8
        is_taken = is_bytes or (takes_numbers and view.is_floating_point())
        expected = group.entry_bytes if is_bytes else group.values
        numbers = view[:1, :1].numel() if view.ndim >= 3 and len(view) else expected
        if view.ndim < 3 or numbers != expected or not is_taken:
            raise ValueError(
                f"group {group.name!r}: expected pages [pages, entries, ...] with {group.entry_bytes} "
                f"bytes (uint8){numbers_too} an entry, found "
                f"{str(view.dtype).removeprefix('torch.')} {list(view.shape)}"
            )
        if view.shape[1] != views[0].shape[1] or len(view) != len(views[0]):
            raise ValueError(
                f"group {group.name!r}: layers have pages of different shapes, found "
                f"{list(views[0].shape)} and {list(view.shape)}"
            )
    return views


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield index ranges ``[at, stop)`` of consecutive page ids."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(ids), 1) if b != a + 1), len(ids)]
    return ((a, b) for a, b in pairwise(cuts) if a < b)
