"""Whose cache it is: everything besides tokens that must agree before a block may be reused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

SAMPLE_BYTES = 64 << 10
"""Bytes hashed at each sampled place of a weight file."""
SAMPLES = 64
"""Places sampled in a weight file, evenly spread: 4 MiB read of a shard of any size."""


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
        for name in ("model", "weights", "tokenizer", "tenant", "adapter"):
            value: object = getattr(self, name)
            if not isinstance(value, str) and not (name == "adapter" and value is None):
                msg = f"namespace {name} must be a str, found {type(value).__name__}"
                raise ConfigError(msg)
        generation: object = self.generation
        is_number = isinstance(generation, int) and not isinstance(generation, bool)
        if not is_number or not 0 <= self.generation < 2**64:
            msg = (
                f"namespace generation must be an integer in [0, 2**64), found {self.generation!r}"
            )
            raise ConfigError(msg)


def weights_digest(folder: str | Path) -> str:
    """Return a digest of the weights in ``folder`` (or of one weight file).

    Covers the config of a model or an adapter, and of every shard its name, its size, its first
    bytes (which hold the header of safetensors and GGUF files) and evenly sampled extents. Neither
    the folder's name nor the name a model is served under is part of it. A change of a few weights
    between two samples goes unseen; retrained or requantised weights do not.

    Raises:
        ConfigError: if there is nothing to digest.

    Cost: reads at most 4 MiB of each shard.
    """
    try:
        root = Path(folder)
        root.is_dir()
    except (TypeError, ValueError, OSError) as error:
        msg = f"folder must name a folder of weights or one weight file: {error}"
        raise ConfigError(msg) from error
    suffixes = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(item for item in root.iterdir() if item.suffix in suffixes)
        configs = [root / name for name in ("config.json", "adapter_config.json")]
        files += [item for item in configs if item.is_file()]
    else:
        files = []
    if not files:
        msg = f"no weights at {root}: expected a folder of {', '.join(sorted(suffixes))} files, or one"
        raise ConfigError(msg)
    digest = hashlib.sha256(b"kvstore.weights.1")
    for item in files:
        size = item.stat().st_size
        name = item.name.encode() if root.is_dir() else b""
        digest.update(b"F%d:%s%d:" % (len(name), name, size))
        step = max(SAMPLE_BYTES, size // SAMPLES)
        with item.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
