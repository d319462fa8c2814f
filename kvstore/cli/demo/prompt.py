"""Prompt of the demo."""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.demo.engines import BLOCK_TOKENS, Engine
from kvstore.errors import ConfigError

PROMPT_TOKENS = 4120
"""Length of the default prompt: 32 blocks, and 24 tokens to compute, like a final question."""
MAX_PROMPT_TOKENS = 8192 - 128
"""The demo model has 8,192 positions, of which the new tokens need some."""


def default_text() -> str:
    """Return an English text of some 120,000 tokens: the help topics in every CPython."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ``ConfigError`` if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read the text file {path}: {error}; expected a UTF-8 text file"
        raise ConfigError(msg) from error


def prompt(engine: Engine, text: str | None) -> list[int]:
    """Return the token ids of ``text``, or of the start of the default text.

    Raises ``ConfigError`` if the text is too short for one block to be restored.
    """
    if text is None:
        # Enough characters for any tokenizer, without tokenizing all of it.
        return engine.encode(default_text()[: 16 * PROMPT_TOKENS])[:PROMPT_TOKENS]
    tokens = engine.encode(text)[:MAX_PROMPT_TOKENS]
    if len(tokens) <= BLOCK_TOKENS:
        msg = (
            f"the text has {len(tokens)} tokens for engine {engine.name}, expected more than "
            f"{BLOCK_TOKENS}: only whole blocks are stored; give a longer text"
        )
        raise ConfigError(msg)
    return tokens
