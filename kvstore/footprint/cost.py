"""Bytes per token, turn and context, and the savings of one model over another. Pure arithmetic.

Device and SSD store the global KV of each token. kvstore never persists window KV; a store that does
writes two snapshots per turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvstore.errors import ConfigError
from kvstore.layout import LayerGroup, Layout
from kvstore.output.sizes import size_text

SNAPSHOTS_PER_TURN = 2
"""Window snapshots that DeepSeek-V4 persisted per turn: at the end of the prompt and of the output. Source:
technical report of DeepSeek-V4.1-Flash, section 3.2.1."""
PUBLISHED_SAVING = Fraction(7, 8)
"""Saving of V4.1 over V4 in persistent bytes: 1 - 1/4 (global KV) x 1/2 (no windows). Source: the same."""
TURN_TOKENS = 2048
"""Default number of new tokens of a turn, prompt and output: about what the published saving implies."""
PREFILL_TOKENS_PER_SECOND = 18_000.0
"""Default prefill speed: DeepSeek-V4.1-Flash in vLLM on 8 H100. Source: a public serving baseline of September
2026: 18,114 tokens/s for one prompt of 65,536 tokens."""
MEASURED_BLOCKS = 1000
"""Blocks written for a measurement: each has 1/1000 of the fixed cost of a store."""
MEASURED_BYTES = 1 << 27
"""Most payload written per model, unless one block is larger: a second of an SSD."""
_MOST_BLOCK_BYTES = 1 << 29
"""Largest block that is written: a few copies are in memory."""
BLOCK_TOKENS = 128
"""Tokens of a block, as in ``PrefixCache.open``."""
_MOST = 1 << 50
"""Limit of tokens: their bytes are still exact integers in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Options of a comparison. Raises ``ConfigError`` for numbers that are not in (0, 2**50)."""

    block_tokens: int = BLOCK_TOKENS
    turn_tokens: int = TURN_TOKENS
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND
    context_tokens: int | None = None
    """Tokens of a context to add up; None for no context."""

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        for name, value in (
            ("--block-tokens", self.block_tokens),
            ("--turn-tokens", self.turn_tokens),
            ("--prefill-tps", self.prefill_tokens_per_second),
            ("--tokens", 1 if self.context_tokens is None else self.context_tokens),
        ):
            if not 0 < value < _MOST:
                raise ConfigError(f"{name} must be positive and below 2**50, found {value}")

    def check(self, label: str, layout: Layout) -> None:
        """Raise ``ConfigError`` if a layout cannot have blocks of this size."""
        if self.block_tokens % layout.alignment:
            msg = (
                f"{label} has entries of {layout.alignment} tokens, so --block-tokens must be a multiple of "
                f"{layout.alignment}, found {self.block_tokens}"
            )
            raise ConfigError(msg)


def entries_per_token(group: LayerGroup) -> Fraction:
    """Return the entries per token, over all layers of a group."""
    return Fraction(len(group.layers), group.tokens_per_entry)


def persistent_bytes(layout: Layout, turn_tokens: int | Fraction) -> Fraction:
    """Return bytes per token of a store that also keeps two window snapshots per turn."""
    return layout.bytes_per_token + SNAPSHOTS_PER_TURN * layout.window_bytes / Fraction(turn_tokens)


def even_turn(layout: Layout) -> Fraction:
    """Return the tokens of a turn whose snapshots are as large as its global KV; 0 without windows."""
    return SNAPSHOTS_PER_TURN * layout.window_bytes / layout.bytes_per_token


def saving_turn(
    first: Layout, other: Layout, saving: Fraction = PUBLISHED_SAVING
) -> Fraction | None:
    """Return the longest turn at which ``first`` without windows saves this share of ``other`` with them.

    None if every turn has this saving, or none.
    """
    # Solves first = (1 - saving) * (other + 2 * window / turn) for the turn.
    rest = first.bytes_per_token / (1 - saving) - other.bytes_per_token
    if rest <= 0 or not other.window_bytes:
        return None
    return SNAPSHOTS_PER_TURN * other.window_bytes / rest


def context_bytes(groups: Sequence[LayerGroup], tokens: int) -> int:
    """Return the bytes of the complete entries of ``tokens`` tokens."""
    return sum(len(g.layers) * g.entry_bytes * (tokens // g.tokens_per_entry) for g in groups)


def blocks_to_measure(layout: Layout, block_tokens: int) -> int:
    """Return the number of blocks to write. Raises ``ConfigError`` if one block is too large."""
    block_bytes = layout.bytes_per_token * block_tokens
    if block_bytes > _MOST_BLOCK_BYTES:
        msg = (
            f"a block of {block_tokens:,} tokens of {layout.model} is {size_text(float(block_bytes))}; give a "
            f"smaller --block-tokens, so that it is at most {size_text(_MOST_BLOCK_BYTES)}"
        )
        raise ConfigError(msg)
    return max(1, min(MEASURED_BLOCKS, MEASURED_BYTES // block_bytes))


def compare(models: Sequence[tuple[str, Layout]], question: Question) -> dict[str, Any]:
    """Return the costs of each model, and the savings of the first over it, as JSON values.

    Raises ``ConfigError`` if a model cannot have blocks of this size.
    """
    for label, layout in models:
        question.check(label, layout)
    return {
        "block_tokens": question.block_tokens,
        "turn_tokens": question.turn_tokens,
        "prefill_tokens_per_second": question.prefill_tokens_per_second,
        "models": [_cost(label, layout, models[0][1], question) for label, layout in models],
    }


def _cost(label: str, layout: Layout, first: Layout, question: Question) -> dict[str, Any]:
    per_token, turn = layout.bytes_per_token, question.turn_tokens
    persistent = persistent_bytes(layout, turn)
    longest = saving_turn(first, layout)
    found: dict[str, Any] = {
        "model": label,
        "bytes_per_token": number(per_token),
        "window_bytes": layout.window_bytes,
        "window_tokens": layout.window_tokens,
        "groups": [
            {
                "name": group.name,
                "lifetime": group.lifetime.value,
                "entries_per_token": number(entries_per_token(group)),
                "entry_bytes": group.entry_bytes,
                "bytes_per_token": number(group.bytes_per_token),
            }
            for group in layout.groups
        ],
        "ratio": number(per_token / first.bytes_per_token),
        "alignment": layout.alignment,
        "block_bytes": number(per_token * question.block_tokens),
        "break_even_bytes_per_second": float(per_token) * question.prefill_tokens_per_second,
        "persistent_bytes_per_token": {
            "without_windows": number(per_token),
            "with_windows": number(persistent),
        },
        "even_turn_tokens": number(even_turn(layout)),
        "first_saves": {
            "hbm": number(1 - first.bytes_per_token / per_token),
            "ssd": number(1 - first.bytes_per_token / persistent),
            "ssd_published_up_to_turn_tokens": None if longest is None else number(longest),
        },
    }
    if question.context_tokens is not None:
        found["context"] = _context(layout, question.context_tokens, question.block_tokens)
    return found


def _context(layout: Layout, tokens: int, block_tokens: int) -> Mapping[str, int]:
    kept = tokens - tokens % block_tokens
    return {
        "tokens": tokens,
        "global_bytes": context_bytes(layout.global_groups, tokens),
        "window_bytes": context_bytes(layout.window_groups, min(tokens, layout.window_tokens)),
        "stored_tokens": kept,
        "stored_bytes": context_bytes(layout.global_groups, kept),
    }


def number(value: Fraction) -> int | float:
    """Return a fraction as a JSON number, an integer if it is one."""
    return value.numerator if value.denominator == 1 else float(value)
