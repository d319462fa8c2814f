"""An adapter for a dense model. Run it twice: python docs/examples/dense_adapter.py STORE."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

import kvstore

Ids = NDArray[np.uint32]
Floats = NDArray[np.float32]
LAYERS, WIDTH, VOCAB = 2, 16, 64


class TinyModel:
    """Attention with random weights. Its KV cache is float32 ``[k and v, layers, tokens, WIDTH]``."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.embed = rng.standard_normal((VOCAB, WIDTH), np.float32)
        self.qkv = rng.standard_normal((LAYERS, 3, WIDTH, WIDTH), np.float32) / 4

    def forward(self, tokens: Ids, past: Floats) -> tuple[Floats, Floats]:
        """Compute ``tokens`` after ``past``; return the last logits, and ``past`` with their rows."""
        positions = np.arange(past.shape[2], past.shape[2] + len(tokens))
        x = self.embed[tokens] + np.sin(positions[:, None] * np.float32(0.1)).astype(np.float32)
        layers = []
        for layer in range(LAYERS):
            q, *new = x @ self.qkv[layer]
            kv = np.concatenate([past[:, layer], new], axis=1)
            is_seen = positions[:, None] >= np.arange(kv.shape[1])
            scores = np.where(is_seen, q @ kv[0].T / 4, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            x = x + weights @ kv[1] / weights.sum(axis=1, keepdims=True)
            layers.append(kv)
        return x[-1] @ self.embed.T, np.stack(layers, axis=1)


LAYOUT = kvstore.Layout(
    model="tiny",
    groups=tuple(
        kvstore.LayerGroup(name=name, layers=(0, 1), values=WIDTH, entry_format="f32")
        for name in ("k", "v")
    ),
)


class DenseAdapter:
    """The model over a prefix cache, for one tenant."""

    def __init__(self, model: TinyModel, cache: kvstore.Scope) -> None:
        self.model, self.cache = model, cache

    def prefill(self, tokens: Ids, request_id: str | None = None) -> tuple[Floats, int]:
        """Compute a prompt from the longest cached prefix on; return its last logits and the hit."""
        with self.cache.lookup(tokens, request_id) as match:
            entries = self.cache.read(match)
        past = np.stack([entries[name].view(np.float32) for name in ("k", "v")])
        hit = entries.tokens  # can be less than match.hit_tokens: a corrupt block ends the hit
        block = self.cache.block_tokens
        cut = (len(tokens) - 1) // block * block  # where a later prefill of the same prompt starts
        if hit < cut:
            _, past = self.model.forward(tokens[hit:cut], past)
        logits, past = self.model.forward(tokens[cut:], past)
        new = {name: past[i, :, hit:].view(np.uint8) for i, name in enumerate(("k", "v"))}
        self.cache.store(tokens, new, start=hit, wait=0)
        return logits, hit


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) == 2 else sys.exit("usage: dense_adapter.py STORE")
    prompt = np.arange(500, dtype=np.uint32) % VOCAB
    space = kvstore.Namespace(model="tiny", weights="seed 0")
    with kvstore.PrefixCache.open(path, layout=LAYOUT, namespace=space) as store:
        logits, hit = DenseAdapter(TinyModel(), store).prefill(prompt)
        print(f"{hit} of {len(prompt)} tokens restored, next token {logits.argmax()}")
