"""KV of one sequence during a request, with floors for its reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.entries import GlobalEntries
from kvstore.reference.formats import pack, rounded, unpack
from kvstore.reference.ops import Keys
from kvstore.reference.vision import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """First tokens that a sequence may read and write: ``read_floor <= start <= hit``."""

    start: int
    """First token computed by the encoder; rows in ``[start, hit)`` are recomputed."""
    hit: int
    """Write floor of global entries: earlier ones are restored."""
    read_floor: int
    """First encoder window row."""
    window_write_floor: int
    """Write floor of encoder window rows: earlier ones are restored."""

    @classmethod
    def replay(cls, hit: int, window: int) -> Floors:
        """Return the floors after a hit without a window: its last ``window`` tokens are replayed."""
        start = hit - min(window, hit)
        return cls(start=start, hit=hit, read_floor=start, window_write_floor=start)


class SequenceState:
    """Window rows, global entries and rows of unfinished groups of one sequence.

    It keeps the rows of all computed tokens, unlike a production engine with rings of W rows and of one
    group. So snapshots are possible at any boundary, tokens can be rolled back, and unreadable rows can
    be NaN.

    Shapes:
        tokens int64 and is_image bool ``[capacity]``; windows ``[layers, capacity, head_dim]``, draft
        layers last; groups, by owner, ``[2, capacity, head_dim]``: values and scores.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        layout: kvstore.Layout,
        tokens: NDArray[np.uint32],
        *,
        floors: Floors,
        prompt: int,
        dtype: torch.dtype,
        images: Sequence[Image] = (),
    ) -> None:
        """Start a sequence whose first ``prompt`` tokens are the prompt."""
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.images = tuple(images)
        self.is_image = torch.zeros(len(tokens), dtype=torch.bool)
        for span in (image.span for image in images):
            self.is_image[span.start : span.stop] = True
        self.floors = floors
        self.decoder_floor = max(0, prompt - config.sliding_window)
        """D: first decoder window row, for any hit and any chunks."""
        self.entries = GlobalEntries(layout, len(tokens), dtype)
        # NaN until written, so that a row read too early makes every result NaN.
        shape = (config.draft_layers.stop, len(tokens), config.head_dim)
        self.windows = torch.full(shape, torch.nan, dtype=dtype)
        self.groups = {
            owner: torch.full((2, *shape[1:]), torch.nan, dtype=dtype)
            for owner in config.kv_source_layer_ids
        }
        self._config = config
        self._group = layout.group("window")

    def restore_window(self, snapshot: kvstore.WindowSnapshot) -> None:
        """Set the encoder window rows of a snapshot."""
        rows = unpack(self._group, snapshot.rows["window"], self.windows.dtype)
        self.windows[: self._config.last_owner, snapshot.start : snapshot.stop] = rows

    def snapshot(self, start: int, stop: int, source: str) -> kvstore.WindowSnapshot:
        """Return the encoder window rows of tokens ``[start, stop)``."""
        rows = pack(self._group, self.windows[: self._config.last_owner, start:stop])
        return kvstore.WindowSnapshot(start, stop, {"window": rows}, source)

    def write_window(self, layer: int, start: int, rows: Tensor) -> None:
        """Write the window rows of tokens from ``start`` on, except restored ones.

        They are rounded to their stored format, to equal restored rows. Shapes: rows ``[n, head_dim]``.
        """
        if layer < self._config.last_owner:
            skip = max(0, self.floors.window_write_floor - start)
            start, rows = start + skip, rows[skip:]
            if not len(rows):
                return
        self.windows[layer, start : start + len(rows)] = rounded(self._group, rows)

    def read_window(self, layer: int, start: int, stop: int) -> Keys:
        """Return the window rows for queries at ``[start, stop)``, with zeros before the floor.

        Shapes:
            ``[stop - start, W, head_dim]``, a view with overlapping windows.
        """
        in_encoder = layer < self._config.last_owner
        floor = self.floors.read_floor if in_encoder else self.decoder_floor
        window = self._config.sliding_window
        low = min(max(floor, start - window + 1), stop)
        missing = low - (start - window + 1)
        rows = functional.pad(self.windows[layer, low:stop], (0, 0, missing, 0))
        reads = torch.arange(start, stop)[:, None] + torch.arange(1 - window, 1)
        return Keys(rows.unfold(0, window, 1).transpose(1, 2), reads >= floor)

    def push_groups(
        self, layer: int, start: int, values: Tensor, scores: Tensor
    ) -> tuple[int, Tensor, Tensor]:
        """Add token rows of an owner; return the number of the first completed group, and the groups.

        Groups before the write floor have entries already and are omitted. Rows of an incomplete
        group are kept, because a chunk may end inside a group.

        Shapes:
            values and scores ``[n, head_dim]`` of tokens from ``start`` on; returns values and scores
            of completed groups, ``[groups, ratio, head_dim]``.
        """
        ratio, stop = self._config.ratios[layer], start + len(values)
        kept = self.groups[layer]
        kept[:, start:stop] = torch.stack((values, scores))
        first, end = max(start, self.floors.hit) // ratio, stop // ratio
        rows = kept[:, first * ratio : max(first, end) * ratio]
        rows = rows.reshape(2, -1, ratio, self._config.head_dim)
        return first, rows[0], rows[1]

    def rollback(self, end: int) -> None:
        """Remove the rejected tokens from ``end`` on."""
        self.tokens[end:] = 0
        self.windows[:, end:] = torch.nan
        for rows in self.groups.values():
            rows[:, end:] = torch.nan
        self.entries.truncate(end)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of one sequence, computed in one pass."""

    state: SequenceState
    start: int
    stop: int

    @property
    def positions(self) -> Tensor:
        """Positions of its rows, int64 ``[rows]``."""
        return torch.arange(self.start, self.stop)

    @property
    def is_image(self) -> Tensor:
        """Whether each row is of an image, bool ``[rows]``."""
        return self.state.is_image[self.start : self.stop]


def rows_of(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, slice]]:
    """Yield each chunk with the slice of its rows in the rows of all chunks."""
    first = 0
    for chunk in chunks:
        last = first + chunk.stop - chunk.start
        yield chunk, slice(first, last)
        first = last
