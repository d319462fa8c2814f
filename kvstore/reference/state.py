"""What one sequence holds while it runs. It knows where its numbers may be read and written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.entries import GlobalEntries
from kvstore.reference.formats import pack_rows, unpack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """From which token on a sequence may read and write.

    Invariants:
        ``read_floor <= start <= hit``; rows in ``[start, hit)`` are run again.
    """

    start: int
    """First token to run through the encoder."""
    hit: int
    """Global entries below it are restored; the write floor for global entries."""
    read_floor: int
    """Encoder window rows exist from here."""
    window_write_floor: int
    """Encoder window rows below it are restored and must stay."""

    @classmethod
    def replay(cls, hit: int, window: int) -> Floors:
        """Floors after a hit without a window: run the last ``window`` tokens of it again."""
        start = hit - min(window, hit)
        return cls(start=start, hit=hit, read_floor=start, window_write_floor=start)


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Tokens of a compression group that is not complete yet.

    Shapes:
        values and scores ``[n, head_dim]``, n < ratio.
    """

    values: Tensor
    scores: Tensor


class SequenceState:
    """Window rows, global entries and pending groups of one sequence.

    It keeps the window rows of every token that it ran, where a real engine keeps a ring of W rows:
    then a snapshot can be taken at any boundary, and a row that must not be read can be poisoned.

    Shapes:
        tokens int64 ``[capacity]``; windows ``[layers, capacity, head_dim]``.
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
    ) -> None:
        """Start a sequence whose first ``prompt`` tokens are the prompt."""
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.floors = floors
        self.decoder_floor = max(0, prompt - config.sliding_window)
        """D: decoder window rows exist from here, whatever was hit and however prefill was cut."""
        self.entries = GlobalEntries(layout, len(tokens), dtype)
        # NaN until written: a row read before its time shows in every result.
        shape = (config.num_hidden_layers, len(tokens), config.head_dim)
        self.windows = torch.full(shape, torch.nan, dtype=dtype)
        self.pending: dict[int, PendingGroup] = {}
        self._config = config
        self._group = layout.group("window")

    def restore_window(self, snapshot: kvstore.WindowSnapshot) -> None:
        """Take over the encoder window rows of a snapshot."""
        rows = unpack_rows(self._group, snapshot.rows["window"], self.windows.dtype)
        self.windows[: self._config.last_owner, snapshot.start : snapshot.stop] = rows

    def snapshot(self, start: int, stop: int, source: str) -> kvstore.WindowSnapshot:
        """Return the encoder window rows of tokens ``[start, stop)``."""
        rows = pack_rows(self._group, self.windows[: self._config.last_owner, start:stop])
        return kvstore.WindowSnapshot(start, stop, {"window": rows}, source)

    def write_window(self, layer: int, start: int, rows: Tensor) -> None:
        """Keep the window rows of tokens ``start``, ``start + 1``, ... unless they are restored ones.

        They pass through the format they are stored in, so that a restored row is this row.

        Shapes:
            rows ``[n, head_dim]``.
        """
        if layer < self._config.last_owner:
            skip = max(0, self.floors.window_write_floor - start)
            start, rows = start + skip, rows[skip:]
        stored = pack_rows(self._group, rows)
        self.windows[layer, start : start + len(rows)] = unpack_rows(
            self._group, stored, rows.dtype
        )

    def read_window(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the window rows that queries at ``positions`` read, and which of them are readable.

        Shapes:
            positions int64 ``[rows]``; returns ``[rows, W, head_dim]`` and bool ``[rows, W]``.
        """
        in_encoder = layer < self._config.last_owner
        floor = self.floors.read_floor if in_encoder else self.decoder_floor
        window = self._config.sliding_window
        reads = positions[:, None] + torch.arange(1 - window, 1)
        return self.windows[layer][reads.clamp(min=0)], reads >= floor

    def push_group(
        self, layer: int, ratio: int, first: int, rows: PendingGroup
    ) -> tuple[int, PendingGroup]:
        """Add token rows of an owner; return the groups they complete and the first one's number.

        Rows below the write floor belong to entries that exist already and are dropped. The rest
        of an incomplete group waits here, because prefill may be cut inside a group.

        Shapes:
            rows ``[n, head_dim]`` for tokens ``first``, ``first + 1``, ...; returns rows of complete
            groups, ``[groups * ratio, head_dim]``.
        """
        skip = max(0, self.floors.hit - first)
        first, values, scores = first + skip, rows.values[skip:], rows.scores[skip:]
        waiting = self.pending.pop(layer, None)
        if waiting is not None:
            first -= len(waiting.values)
            values = torch.cat((waiting.values, values))
            scores = torch.cat((waiting.scores, scores))
        whole = len(values) // ratio * ratio
        if whole < len(values):
            self.pending[layer] = PendingGroup(values[whole:], scores[whole:])
        return first // ratio, PendingGroup(values[:whole], scores[:whole])
