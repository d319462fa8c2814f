"""The KV of one sequence during a request, and the floors for reads and writes of it."""

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
    """The first tokens that a sequence may read and write.

    Invariants:
        ``read_floor <= start <= hit``; rows in ``[start, hit)`` are recomputed.
    """

    start: int
    """First token that the encoder computes."""
    hit: int
    """Global entries before it are restored; the write floor for global entries."""
    read_floor: int
    """Encoder window rows exist from here."""
    window_write_floor: int
    """Encoder window rows before it are restored and must not change."""

    @classmethod
    def replay(cls, hit: int, window: int) -> Floors:
        """Return the floors after a hit without a window: its last ``window`` tokens are replayed."""
        start = hit - min(window, hit)
        return cls(start=start, hit=hit, read_floor=start, window_write_floor=start)


class SequenceState:
    """Window rows, global entries and rows of unfinished groups of one sequence.

    It keeps the rows of every computed token, while a real engine keeps rings of W rows and of the
    tokens of one group. So a snapshot can be taken at any boundary, tokens can be rolled back, and
    unreadable rows can be NaN.

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
        """D: decoder window rows exist from here, for any hit and any chunks."""
        self.entries = GlobalEntries(layout, len(tokens), dtype)
        # NaN until written: a row read too early makes every result NaN.
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
        """Write the window rows of tokens ``start``, ``start + 1``, ... except restored ones.

        They are rounded to their stored format, so that a restored row equals this row.

        Shapes:
            rows ``[n, head_dim]``.
        """
        if layer < self._config.last_owner:
            skip = max(0, self.floors.window_write_floor - start)
            start, rows = start + skip, rows[skip:]
            if not len(rows):
                return
        self.windows[layer, start : start + len(rows)] = rounded(self._group, rows)

    def read_window(self, layer: int, start: int, stop: int) -> Keys:
        """Return the window rows that queries at ``[start, stop)`` read.

        Zeros replace the rows before the floor.

        Shapes:
            returns ``[stop - start, W, head_dim]``, a view in which the windows overlap.
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
        """Add token rows of an owner; return the groups that they complete, and the first one's number.

        Groups before the write floor have entries already and are left out. Rows of an incomplete
        group are kept, because a chunk may end inside a group.

        Shapes:
            values and scores ``[n, head_dim]`` for tokens ``start``, ``start + 1``, ...; returns values
            and scores of complete groups, ``[groups, ratio, head_dim]``.
        """
        ratio, stop = self._config.ratios[layer], start + len(values)
        kept = self.groups[layer]
        kept[:, start:stop] = torch.stack((values, scores))
        first, end = max(start, self.floors.hit) // ratio, stop // ratio
        rows = kept[:, first * ratio : max(first, end) * ratio].reshape(
            2, -1, ratio, self._config.head_dim
        )
        return first, rows[0], rows[1]

    def rollback(self, end: int) -> None:
        """Remove the computed tokens from ``end`` on, which were rejected."""
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
        """Which of its rows are of an image, bool ``[rows]``."""
        return self.state.is_image[self.start : self.stop]


def rows_of(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, slice]]:
    """Yield each chunk with the slice of its rows in the rows of all chunks."""
    first = 0
    for chunk in chunks:
        last = first + chunk.stop - chunk.start
        yield chunk, slice(first, last)
        first = last
