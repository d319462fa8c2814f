"""Prompt encoder: text to tokens, preceded by the reasoning effort.

Prompts with different efforts share no prefix, because the effort is the first text. Another version of the
encoder may render other tokens for the same request, or equal tokens for another request, so the encoder's
identity is in the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

EFFORTS: Mapping[str, int] = MappingProxyType({"low": 50, "high": 75, "max": 100})
"""Source: the release's API. On its first day the names meant 25, 50 and 75."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encoder with a token per byte, and an effort by name or from 1 to 100."""

    version: str = "2"
    efforts: Mapping[str, int] = field(default_factory=lambda: EFFORTS)

    @property
    def identity(self) -> str:
        """Value of ``Namespace.tokenizer``: version and effort names."""
        names = ",".join(f"{name}={effort}" for name, effort in sorted(self.efforts.items()))
        return f"kvstore.reference.prompt {self.version} {names}"

    def encode(self, text: str, effort: str | int) -> NDArray[np.uint32]:
        """Return the tokens of a prompt, ``[n]``. Raises ``ValueError`` for an invalid effort."""
        level = self.efforts.get(effort) if isinstance(effort, str) else effort
        if level is None or not 1 <= level <= 100:
            msg = f"effort must be one of {', '.join(self.efforts)} or from 1 to 100, found {effort!r}"
            raise ValueError(msg)
        rendered = f"<effort {level}>\n{text}".encode()
        return np.frombuffer(rendered, np.uint8).astype(np.uint32)
