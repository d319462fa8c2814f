"""The model once more, one token at a time, from the definitions: plain loops, no chunks, no gather.

It shares weights, decoded table rows and the FP4 codec with the model under test and nothing else.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.weights import MixWeights, Weights

Array = NDArray[np.float64]


@dataclass(slots=True)
class Chosen:
    """Entries that the layers of one position read, and those that later indexers choose among."""

    picks: list[int] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Oracle:
    """One sequence from token ``start`` on; earlier entries are restored."""

    config: ReferenceConfig
    weights: Weights
    read_floor: int = 0
    write_floor: int = 0
    tables: dict[int, Array] = field(default_factory=dict)
    """Decoded rows of each Engram layer."""
    shown: dict[int, Array] = field(default_factory=dict)
    """Embeddings of image positions."""
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
        outputs: dict[int, tuple[Array, Array]] = {}
        for position in range(start, len(tokens)):
            embedded = self.shown.get(position, self.weights.embedding[tokens[position]].numpy())
            x = np.stack([embedded] * config.hc_mult)
            read = np.full(config.hc_mult, 1 / config.hc_mult)
            chosen = Chosen()
            for layer in range(first):
                if layer in config.engram_layer_ids and position not in self.shown:
                    x = x + self._look_up(layer, x, tokens, position)
                x, read = self._layer(layer, x, read, position, self.read_floor, chosen)
            self._own(first, _norm(read @ x, self.weights.layers[first].norm.numpy()), position)
            outputs[position] = x, read
        x, read = outputs[decoder_floor]
        for position in range(decoder_floor, len(tokens)):
            (x, read), chosen = outputs[position], Chosen()
            for layer in range(first, config.num_hidden_layers):
                x, read = self._layer(layer, x, read, position, decoder_floor, chosen)
        logits: Array = _norm(read @ x, self.weights.norm.numpy()) @ self.weights.head.numpy()
        return logits

    def _layer(
        self, layer: int, x: Array, read: Array, position: int, floor: int, chosen: Chosen
    ) -> tuple[Array, Array]:
        config, w = self.config, self.weights.layers[layer]
        ratio = config.compress_ratios[layer]
        base = config.compress_rope_theta if ratio else config.rope_theta
        inputs = _norm(read @ x, w.norm.numpy())
        latent = _norm(inputs @ w.query_down.numpy(), w.query_norm.numpy())
        rows = self.windows.setdefault(layer, {})
        row = _norm(inputs @ w.window.numpy(), w.window_norm.numpy())
        rows[position] = self._turn(row, position, base)
        low = max(floor, position - config.sliding_window + 1)
        keys = [rows[p] for p in range(low, position + 1)]
        if ratio:
            owner = max(o for o in config.kv_source_layer_ids if o <= layer)
            if owner == layer and layer != config.kv_source_layer_ids[-1]:
                self._own(layer, inputs, position)
            if layer in config.index_source_layer_ids:
                self._pick(layer, owner, inputs, latent, position, chosen)
            keys += [self.main[owner][entry] for entry in chosen.picks]
        heads = (latent @ w.query_up.numpy()).reshape(config.num_attention_heads, -1)
        out = []
        for head in heads:
            query = self._turn(_norm(head), position, base)
            scores = np.array([query @ key / math.sqrt(len(key)) for key in keys])
            share = np.exp(scores - scores.max())
            total = (share / share.sum()) @ np.array(keys)
            out.append(self._turn(total, -position, base))
        x, read = self._mix(w.attention_mix, x, read, np.concatenate(out) @ w.output.numpy())
        hidden = _norm(read @ x, w.ffn_norm.numpy())
        gate = hidden @ w.gate.numpy()
        fed = (gate / (1 + np.exp(-gate)) * (hidden @ w.up.numpy())) @ w.down.numpy()
        return self._mix(w.ffn_mix, x, read, fed)

    def _mix(
        self, w: MixWeights | None, x: Array, read: Array, output: Array
    ) -> tuple[Array, Array]:
        """Return the next streams, and the coefficients with which the next sub-layer reads them."""
        if w is None:
            return x + output, read
        n, eps = len(x), self.config.hc_eps
        logits = _norm(x.ravel()) @ w.project.numpy() + w.bias.numpy()
        mix = np.exp(logits[2 * n :].reshape(n, n))
        mix = mix / mix.sum(axis=1, keepdims=True) + eps
        for _ in range(self.config.hc_sinkhorn_iters):
            mix = mix / (mix.sum(axis=0, keepdims=True) + eps)
            mix = mix / (mix.sum(axis=1, keepdims=True) + eps)
        write = 2 / (1 + np.exp(-logits[n : 2 * n]))
        mixed = [
            sum(mix[to, of] * x[of] for of in range(n)) + write[to] * output for to in range(n)
        ]
        return np.array(mixed), 1 / (1 + np.exp(-logits[:n])) + eps

    def _look_up(self, layer: int, x: Array, tokens: list[int], position: int) -> Array:
        config, w = self.config, self.weights.layers[layer].engram
        assert w is not None
        orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
        rank = config.engram_layer_ids.index(layer)
        primes = _primes(config.engram_vocab_size, len(config.engram_layer_ids) * orders * heads)
        primes = primes[rank * orders * heads : (rank + 1) * orders * heads]
        classes = _classes(config.vocab_size)
        bound = (2**63 - 1) // (max(classes) + 1) // 2
        odd = np.random.default_rng(10007 * layer).integers(0, bound, orders + 1) * 2 + 1
        ids, is_cut = [], False
        for back in range(orders + 1):
            is_cut = is_cut or position < back or position - back in self.shown
            ids.append(classes[config.engram_pad_token_id if is_cut else tokens[position - back]])
        rows = []
        for order in range(orders):
            hashed = 0
            for back in range(order + 2):
                hashed ^= ids[back] * int(odd[back])
            for head in range(heads):
                column = order * heads + head
                rows.append(self.tables[layer][sum(primes[:column]) + hashed % primes[column]])
        found = np.concatenate(rows)
        keys = (found @ w.keys.numpy()).reshape(len(x), -1)
        added = []
        for stream, key, query_norm, key_norm in zip(
            x, keys, w.query_norm.numpy(), w.key_norm.numpy(), strict=True
        ):
            score = _norm(stream, query_norm) @ _norm(key, key_norm) / math.sqrt(len(stream))
            added.append(found @ w.values.numpy() / (1 + np.exp(-score)))
        return np.array(added)

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
        self,
        layer: int,
        owner: int,
        inputs: Array,
        latent: Array,
        position: int,
        chosen: Chosen,
    ) -> None:
        config, w = self.config, self.weights.layers[layer].indexer
        assert w is not None
        visible = (position + 1) // config.compress_ratios[owner]
        heads = (latent @ w.query.numpy()).reshape(config.index_n_heads, -1)
        shares = inputs @ w.head.numpy()
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
        pool = range(visible) if layer == owner else chosen.pool
        best = sorted(pool, key=lambda entry: (-scores[entry], entry))
        chosen.picks = sorted(best[: config.index_topk])
        if layer == config.candidate_source_layer_id:
            size = config.candidate_block_size
            blocks = [range(at, min(at + size, visible)) for at in range(0, visible, size)]
            blocks.sort(key=lambda block: (-max(scores[entry] for entry in block), block[0]))
            kept = blocks[: config.candidate_topk_blocks]
            chosen.pool = sorted(entry for block in kept for entry in block)

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


@functools.cache
def _primes(start: int, count: int) -> list[int]:
    primes: list[int] = []
    while len(primes) < count:
        if all(start % divisor for divisor in range(2, start)):
            primes.append(start)
        start += 1
    return primes


@functools.cache
def _classes(vocab_size: int) -> list[int]:
    """Class of each token: upper case folds to lower, and four kinds of white space to one."""
    names: list[object] = []
    for token in range(vocab_size):
        letter = chr(token) if token < 128 else token
        if isinstance(letter, str):
            letter = " " if letter in " \t\r\n" else letter.lower()
        names.append(letter)
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]
