"""Prompt encoder: text to tokens, after the reasoning effort.

The effort is text at index 0, so prompts with different efforts share no prefix. The encoder renders the
effort's name: another version may render other tokens for the same request, or the same tokens for
another request. So the encoder's identity is in the namespace.
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
    """Encoder with a token for each byte, after an effort by name or from 1 to 100."""

    version: str = "2"
    efforts: Mapping[str, int] = field(default_factory=lambda: EFFORTS)

    @property
    def identity(self) -> str:
        """The value for ``Namespace.tokenizer``: version and effort names."""
        names = ",".join(f"{name}={effort}" for name, effort in sorted(self.efforts.items()))
        return f"kvstore.reference.prompt {self.version} {names}"

    def encode(self, text: str, effort: str | int) -> NDArray[np.uint32]:
        """Return the tokens of a prompt, ``[n]``.

        Raises:
            ValueError: for an unknown name, or a number outside [1, 100].
        """
        level = self.efforts.get(effort) if isinstance(effort, str) else effort
        if level is None or not 1 <= level <= 100:
            msg = f"effort must be one of {', '.join(self.efforts)} or from 1 to 100, found {effort!r}"
            raise ValueError(msg)
        spelled = f"<effort {level}>\n{text}".encode()
        return np.frombuffer(spelled, np.uint8).astype(np.uint32)
