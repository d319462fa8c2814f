"""The model once more, one token at a time, from the definitions: plain loops, no chunks, no gather.

It shares weights and the FP4 codec with the model under test and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.weights import LayerWeights, Weights

Array = NDArray[np.float64]


@dataclass(slots=True)
class Oracle:
    """One sequence from token ``start`` on; what lies below comes in as restored entries."""

    config: ReferenceConfig
    weights: Weights
    read_floor: int = 0
    write_floor: int = 0
    main: dict[int, list[Array]] = field(default_factory=dict)
    """Decoded main entries by owner."""
    index: dict[int, list[Array]] = field(default_factory=dict)
    main_bytes: dict[int, list[bytes]] = field(default_factory=dict)
    index_bytes: dict[int, list[bytes]] = field(default_factory=dict)
    windows: dict[int, dict[int, Array]] = field(default_factory=dict)
    pairs: dict[int, list[tuple[Array, Array]]] = field(default_factory=dict)

    def logits(self, tokens: list[int], start: int = 0) -> Array:
        """Run a prompt and return the logits of its last token, ``[vocab]``."""
        config, first = self.config, self.config.kv_source_layer_ids[-1]
        decoder_floor = max(0, len(tokens) - config.sliding_window)
        outputs: dict[int, Array] = {}
        for position in range(start, len(tokens)):
            x = self.weights.embedding[tokens[position]].numpy()
            picks: list[int] = []
            for layer in range(first):
                x, picks = self._layer(layer, x, position, self.read_floor, picks)
            self._own(first, _norm(x, self.weights.layers[first].norm.numpy()), position)
            outputs[position] = x
        x = np.empty(0)
        for position in range(decoder_floor, len(tokens)):
            x, picks = outputs[position], []
            for layer in range(first, config.num_hidden_layers):
                x, picks = self._layer(layer, x, position, decoder_floor, picks)
        logits: Array = _norm(x, self.weights.norm.numpy()) @ self.weights.head.numpy()
        return logits

    def _layer(
        self, layer: int, x: Array, position: int, floor: int, picks: list[int]
    ) -> tuple[Array, list[int]]:
        config, w = self.config, self.weights.layers[layer]
        ratio = config.compress_ratios[layer]
        base = config.compress_rope_theta if ratio else config.rope_theta
        inputs = _norm(x, w.norm.numpy())
        latent = _norm(inputs @ w.query_down.numpy(), w.query_norm.numpy())
        rows = self.windows.setdefault(layer, {})
        row = _norm(inputs @ w.window.numpy(), w.window_norm.numpy())
        rows[position] = self._turn(row, position, base)
        low = max(floor, position - config.sliding_window + 1)
        keys = [rows[p] for p in range(low, position + 1)]
        if ratio:
            owner = max(o for o in config.kv_source_layer_ids if o <= layer)
            if owner == layer:
                if layer != config.kv_source_layer_ids[-1]:
                    self._own(layer, inputs, position)
                picks = self._pick(w, owner, inputs, latent, position)
            keys += [self.main[owner][entry] for entry in picks]
        heads = (latent @ w.query_up.numpy()).reshape(config.num_attention_heads, -1)
        out = []
        for head in heads:
            query = self._turn(_norm(head), position, base)
            scores = np.array([query @ key / math.sqrt(len(key)) for key in keys])
            share = np.exp(scores - scores.max())
            total = (share / share.sum()) @ np.array(keys)
            out.append(self._turn(total, -position, base))
        x = x + np.concatenate(out) @ w.output.numpy()
        hidden = _norm(x, w.ffn_norm.numpy())
        gate = hidden @ w.gate.numpy()
        return x + (gate / (1 + np.exp(-gate)) * (hidden @ w.up.numpy())) @ w.down.numpy(), picks

    def _own(self, layer: int, inputs: Array, position: int) -> None:
        owner, ratio = self.weights.layers[layer].owner, self.config.compress_ratios[layer]
        assert owner is not None
        if position < self.write_floor:
            return
        score = inputs if owner.gate is None else inputs @ owner.gate.numpy()
        group = self.pairs.setdefault(layer, [])
        group.append((inputs @ owner.values.numpy(), score))
        if (position + 1) % ratio:
            return
        if ratio == 1:
            latent = group[0][0]
        else:
            share = [np.exp(score) for _, score in group]
            weights = np.array(share) / np.sum(share, axis=0)
            latent = (weights * np.array([value for value, _ in group])).sum(axis=0)
        group.clear()
        base, place = self.config.compress_rope_theta, position // ratio * ratio
        latent = _norm(latent, owner.norm.numpy())
        key = _norm(latent @ owner.index_key.numpy(), owner.index_norm.numpy())
        self._keep(self.main, self.main_bytes, layer, self._turn(latent, place, base), "nvfp4")
        self._keep(self.index, self.index_bytes, layer, self._turn(key, place, base), "mxfp4")

    def _keep(
        self,
        decoded: dict[int, list[Array]],
        packed: dict[int, list[bytes]],
        layer: int,
        values: Array,
        entry_format: str,
    ) -> None:
        rule = {"nvfp4": "v41", "mxfp4": "rceil"}[entry_format]
        parts = fp4.pack(values[None].astype(np.float32), entry_format, scale_rule=rule)
        packed.setdefault(layer, []).append(b"".join(np.asarray(p).tobytes() for p in parts))
        rounded = np.asarray(fp4.unpack(*parts, entry_format, dtype="float32"))
        decoded.setdefault(layer, []).append(rounded[0].astype(np.float64))

    def _pick(
        self, w: LayerWeights, owner: int, inputs: Array, latent: Array, position: int
    ) -> list[int]:
        assert w.indexer is not None
        config = self.config
        visible = (position + 1) // config.compress_ratios[owner]
        heads = (latent @ w.indexer.query.numpy()).reshape(config.index_n_heads, -1)
        shares = inputs @ w.indexer.head.numpy()
        queries = []
        for head in heads:
            query = self._turn(_norm(head), position, config.compress_rope_theta)
            parts = fp4.pack(query[None].astype(np.float32), "mxfp4", scale_rule="rceil")
            queries.append(np.asarray(fp4.unpack(*parts, "mxfp4", dtype="float32"))[0])
        scores = [
            sum(
                s * max(0.0, float(q.astype(np.float64) @ key))
                for s, q in zip(shares, queries, strict=True)
            )
            for key in self.index.get(owner, [])[:visible]
        ]
        return sorted(range(visible), key=lambda entry: (-scores[entry], entry))[
            : config.index_topk
        ]

    def _turn(self, values: Array, position: int, base: float) -> Array:
        dims = self.config.qk_rope_head_dim
        turned = values.copy()
        for pair in range(dims // 2):
            at = len(values) - dims + 2 * pair
            angle = position * base ** (-2 * pair / dims)
            a, b = values[at], values[at + 1]
            turned[at] = a * math.cos(angle) - b * math.sin(angle)
            turned[at + 1] = a * math.sin(angle) + b * math.cos(angle)
        return turned


def _norm(values: Array, weight: Array | None = None) -> Array:
    normed = values / math.sqrt(float(np.mean(values**2)))
    return normed if weight is None else normed * weight
