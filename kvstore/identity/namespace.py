"""Namespace of blocks: model, weights, tokenizer, adapter, tenant and generation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvstore.checks import integer, text
from kvstore.errors import ConfigError

SAMPLE_BYTES = 64 << 10
"""Bytes hashed at each sampled offset of a weight file."""
SAMPLES = 64
"""Offsets sampled in a weight file, evenly spaced: at most 4 MiB are read of each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Identity of blocks in addition to their tokens.

    Two requests share blocks only if every field is equal. ``model`` is only a label: the same label with other
    ``weights`` is another namespace.
    """

    model: str
    weights: str = ""
    """Digest of the weights; see ``kvstore.weights_digest``."""
    tokenizer: str = ""
    """Version of the tokenizer and of the prompt encoder."""
    adapter: str | None = None
    """LoRA or other adapter. ``None`` and ``""`` differ."""
    tenant: str = ""
    """Salt that separates tenants."""
    generation: int = 0
    """Number of weight updates under one name."""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for fields that cannot be hashed."""
        for name in ("model", "weights", "tokenizer", "tenant", "adapter"):
            value: object = getattr(self, name)
            if name != "adapter" or value is not None:
                text(value, f"namespace {name}", ConfigError)
        generation = integer(self.generation, "namespace generation", 0, 2**64 - 1, ConfigError)
        object.__setattr__(self, "generation", generation)


def weights_digest(folder: str | Path) -> str:
    """Return a digest of the weights in ``folder`` (or of one weight file).

    Covers the config of a model or an adapter, and the name, the size, the first bytes (the header of safetensors and
    GGUF files) and evenly sampled ranges of every shard, but not the folder's name or the served model name. It
    detects retrained or requantised weights, but not a change of a few weights between two samples.

    Raises:
        ConfigError: if there are no weights at ``folder``.

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
        msg = f"no weights at {root}, expected a folder of {', '.join(sorted(suffixes))} files, or one file"
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
