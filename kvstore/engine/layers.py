"""Cache layers of transformers for a hit of a model some of whose layers slide.

A model builds its masks and positions from what its cache layers say of themselves, so a layer that
tells the truth about its rows is masked right, whatever attention kernel the model uses.

They know tensors and positions. They know no entry and no prefix cache.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding-window layer whose rows exist from ``start`` on: the read floor of its sequence.

    Transformers' own layer takes rows to exist from 0 on. Asked at token 100 of a window of 16 it
    says 15 rows, whether it holds them or not, and the mask would admit rows that are not there.

    Shapes:
        keys and values ``[1, kv_heads, n, head_dim]``, n at most W - 1: the next query adds its own.
    """

    def __init__(self, sliding_window: int, start: int = 0) -> None:
        super().__init__(sliding_window=sliding_window)
        # Counts every token of the sequence, held or not: the position of the next one.
        self.cumulative_length = start

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next ``query_length`` tokens see, and the first one's position."""
        held = 0 if not self.is_initialized else self.keys.shape[-2]
        visible = min(held, self.sliding_window - 1)
        return visible + query_length, self.cumulative_length - visible


class StoredLayer(DynamicLayer):  # type: ignore[misc]
    """A full-attention layer during a replay: it reads stored rows and takes no new ones.

    Tokens run again have stored keys and values already. Theirs are dropped, and a query at ``p``
    reads the stored rows of ``[0, p]``: its mask is causal from ``position`` on, as for a cache that
    ends there.

    Shapes:
        keys and values ``[1, kv_heads, tokens, head_dim]``, those of the layer it stands for.
    """

    def __init__(self, stored: DynamicLayer, position: int) -> None:
        """Stand for ``stored`` while tokens from ``position`` on run again."""
        super().__init__()
        self.lazy_initialization(stored.keys, stored.values)
        self.keys, self.values = stored.keys, stored.values
        self.position = position

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored rows that the next tokens read, instead of their own."""
        self.position += key_states.shape[-2]
        stored = self.keys.shape[-2]
        if self.position > stored:
            msg = f"a replay runs stored tokens only: found one at {self.position - 1} of {stored}"
            raise ValueError(msg)
        return self.keys[:, :, : self.position], self.values[:, :, : self.position]

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next ``query_length`` tokens see, and the first one's position."""
        return self.position + query_length, 0

    @override
    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self.position
