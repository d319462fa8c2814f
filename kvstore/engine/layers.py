"""Cache layers of transformers for a prefix hit of a model with sliding layers.

A model builds masks and positions from the sizes reported by its cache layers. Correct sizes make masks
correct for every attention kernel.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding-window layer with rows from ``start`` on, the read floor of its sequence.

    Transformers' own layer assumes rows from 0 on. At token 100 with a window of 16 it reports 15
    rows even if it has fewer, and the mask would admit missing rows.

    Shapes:
        keys and values ``[1, kv_heads, n, head_dim]``, n at most W - 1: the next query adds its own.
    """

    def __init__(self, sliding_window: int, start: int = 0) -> None:
        super().__init__(sliding_window=sliding_window)
        self.cumulative_length = start  # position of the next token, counting missing rows too

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for the next ``query_length`` tokens, and the first key's position."""
        held = 0 if not self.is_initialized else self.keys.shape[-2]
        visible = min(held, self.sliding_window - 1)
        return visible + query_length, self.cumulative_length - visible


class StoredLayer(DynamicLayer):  # type: ignore[misc]
    """A full-attention layer during a replay, which reads stored rows and drops new ones.

    Replayed tokens have stored keys and values already. A query at ``p`` reads the stored rows
    ``[0, p]``: its mask is causal from ``position`` on, as for a cache that ends there.

    Shapes:
        keys and values ``[1, kv_heads, tokens, head_dim]``, those of the stored layer.
    """

    def __init__(self, stored: DynamicLayer, position: int) -> None:
        """Replace ``stored`` during a replay of the tokens from ``position`` on."""
        super().__init__()
        self.lazy_initialization(stored.keys, stored.values)
        self.keys, self.values = stored.keys, stored.values
        self.position = position

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored rows that the next tokens read."""
        self.position += key_states.shape[-2]
        stored = self.keys.shape[-2]
        if self.position > stored:
            msg = f"a replay needs a stored row for each token, found token {self.position - 1} of {stored} rows"
            raise ValueError(msg)
        return self.keys[:, :, : self.position], self.values[:, :, : self.position]

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for the next ``query_length`` tokens, and the first key's position."""
        return self.position + query_length, 0

    @override
    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self.position
