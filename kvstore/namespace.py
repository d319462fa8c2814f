"""Whose cache it is: everything besides tokens that must agree before a block may be reused."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity under which blocks are stored.

    Two requests share blocks only if every field is equal. Nothing here is looked up by name: a
    model served under another alias with other ``weights`` is another namespace.
    """

    model: str
    weights: str = ""
    """Digest of the weights; see ``kvstore.weights_digest``."""
    tokenizer: str = ""
    """Version of the tokenizer and of the prompt encoder."""
    adapter: str | None = None
    """LoRA or other adapter. ``None`` and ``""`` are different."""
    tenant: str = ""
    """Salt that keeps tenants apart."""
    generation: int = 0
    """Counts weight updates under one name."""

    def __post_init__(self) -> None:
        """Reject what could not be hashed without ambiguity."""
        for name in ("model", "weights", "tokenizer", "tenant"):
            if not isinstance(getattr(self, name), str):
                msg = f"namespace {name} must be a str, found {type(getattr(self, name)).__name__}"
                raise ConfigError(msg)
        if self.adapter is not None and not isinstance(self.adapter, str):
            msg = f"namespace adapter must be a str or None, found {type(self.adapter).__name__}"
            raise ConfigError(msg)
        if (
            isinstance(self.generation, bool)
            or not isinstance(self.generation, int)
            or self.generation < 0
        ):
            msg = f"namespace generation must be an integer >= 0, found {self.generation!r}"
            raise ConfigError(msg)
