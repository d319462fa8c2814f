"""The forward pass: an encoder that makes all global KV, and a decoder that reads it.

Prefill runs the encoder over every row that is not restored and stops once the last owner's global
entries are written. The decoder then runs once, over the last W rows of the prompt, with windows
that begin there. After that each new token passes through both.

The model computes. Which rows to run, and where they come from, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import LayerSpec, Mode, ReferenceConfig
from kvstore.reference.formats import round_mxfp4
from kvstore.reference.state import PendingGroup, SequenceState
from kvstore.reference.weights import random_weights


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, stop)`` of one sequence, to be run in one pass."""

    state: SequenceState
    start: int
    stop: int

    @property
    def positions(self) -> Tensor:
        """Positions of its rows, int64 ``[rows]``."""
        return torch.arange(self.start, self.stop)


def _rows_of(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, slice]]:
    """Yield each chunk with the place of its rows among the rows of all."""
    first = 0
    for chunk in chunks:
        last = first + chunk.stop - chunk.start
        yield chunk, slice(first, last)
        first = last


class ReferenceModel:
    """A DeepSeek-V4.1-shaped model with random weights.

    A pass takes chunks of several sequences and concatenates their rows. Projections see all rows
    at once; only attention looks at one sequence at a time.
    """

    def __init__(self, config: ReferenceConfig, *, seed: int, dtype: torch.dtype) -> None:
        self.config = config
        self.weights = random_weights(config, seed, dtype)
        self._specs = config.layers
        self._index_rule = config.layout(dtype).group(f"index_r{config.ratios[-1]}").scale_rule

    def encode(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run the encoder; write its window rows and the global entries of every owner.

        Shapes:
            returns the encoder's output ``[rows, hidden]``, rows of all chunks in order.
        """
        rows = self.weights.embedding[
            torch.cat([chunk.state.tokens[chunk.start : chunk.stop] for chunk in chunks])
        ]
        chosen: dict[tuple[int, int], Tensor] = {}
        for spec in self._specs[: self.config.last_owner]:
            if spec.mode is Mode.FULL:
                self._write_global(spec, rows, chunks)
            rows = self._layer(spec, rows, chunks, chosen)
        self._write_global(self._specs[self.config.last_owner], rows, chunks)
        return rows

    def decode(self, rows: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Run the decoder over encoder outputs; write its window rows.

        Shapes:
            rows ``[rows, hidden]``, of all chunks in order; returns logits ``[rows, vocab]``.
        """
        chosen: dict[tuple[int, int], Tensor] = {}
        for spec in self._specs[self.config.last_owner :]:
            rows = self._layer(spec, rows, chunks, chosen)
        return self._norm(rows, self.weights.norm) @ self.weights.head

    def _layer(
        self,
        spec: LayerSpec,
        rows: Tensor,
        chunks: Sequence[Chunk],
        chosen: dict[tuple[int, int], Tensor],
    ) -> Tensor:
        """Run one layer.

        Shapes:
            rows ``[rows, hidden]``; ``chosen[index source, chunk]`` int64 ``[rows, index_topk]`` is
            written by index sources and read by the layers above them; returns ``[rows, hidden]``.
        """
        weights = self.weights.layers[spec.layer]
        inputs = self._norm(rows, weights.norm)
        positions = torch.cat([chunk.positions for chunk in chunks])
        latent = self._norm(inputs @ weights.query_down, weights.query_norm)
        queries = (latent @ weights.query_up).reshape(
            len(rows), self.config.num_attention_heads, -1
        )
        queries = self._rotate(self._norm(queries, None), positions, spec.ratio)
        window = self._norm(inputs @ weights.window, weights.window_norm)
        window = self._rotate(window, positions, spec.ratio)
        outputs = []
        for number, (chunk, own) in enumerate(_rows_of(chunks)):
            chunk.state.write_window(spec.layer, chunk.start, window[own])
            if spec.index_source == spec.layer:
                chosen[spec.layer, number] = self._choose(spec, inputs[own], latent[own], chunk)
            picks = None
            if spec.index_source is not None:
                picks = chosen[spec.index_source, number]
            outputs.append(self._attend(spec, queries[own], picks, chunk))
        # Entries are values as well as keys, so the sum carries their absolute rotation. Turning it
        # back by the query's position leaves relative positions only.
        attended = self._rotate(torch.cat(outputs), positions, spec.ratio, back=True)
        rows = rows + attended.flatten(1) @ weights.output
        ffn_inputs = self._norm(rows, weights.ffn_norm)
        return rows + ops.swiglu(ffn_inputs, weights.gate, weights.up, weights.down)

    def _attend(
        self, spec: LayerSpec, queries: Tensor, picks: Tensor | None, chunk: Chunk
    ) -> Tensor:
        """Attend to the chosen global entries of the owner and to the layer's own window, at once.

        Shapes:
            queries ``[rows, heads, head_dim]``, picks int64 ``[rows, index_topk]``; returns
            ``[rows, heads, head_dim]``.
        """
        keys, readable = chunk.state.read_window(spec.layer, chunk.positions)
        if spec.owner is not None and picks is not None:
            chosen = chunk.state.entries.gather(f"main_r{spec.ratio}", spec.owner, picks)
            keys = torch.cat((chosen, keys), dim=1)
            readable = torch.cat((picks >= 0, readable), dim=1)
        return ops.attend(queries, keys, readable)

    def _choose(self, spec: LayerSpec, inputs: Tensor, latent: Tensor, chunk: Chunk) -> Tensor:
        """Choose the global entries that each query of an index source reads.

        A query at p sees the entries of groups that end at or before it: ``(p + 1) // ratio``.

        Shapes:
            inputs ``[rows, hidden]``, latent ``[rows, q_lora_rank]``; returns int64 ``[rows, index_topk]``.
        """
        weights = self.weights.layers[spec.layer].indexer
        assert weights is not None
        assert spec.owner is not None
        queries = (latent @ weights.query).reshape(len(latent), self.config.index_n_heads, -1)
        queries = self._rotate(self._norm(queries, None), chunk.positions, spec.ratio)
        # Both sides of the product on the grid: that makes it exact, see ops.index_scores.
        queries = round_mxfp4(queries, self._index_rule)
        visible = (chunk.positions + 1) // spec.ratio
        keys = chunk.state.entries.scan(f"index_r{spec.ratio}", spec.owner, int(visible.max()))
        scores = ops.index_scores(queries, inputs @ weights.head, keys)
        return ops.top_entries(scores, visible, self.config.index_topk)

    def _write_global(self, spec: LayerSpec, rows: Tensor, chunks: Sequence[Chunk]) -> None:
        """Write the global entries of an owner, for the groups that these rows complete.

        The main entry is the rotated latent, the indexer key comes from the latent before rotation:
        neither can be made from the other.

        Shapes:
            rows ``[rows, hidden]``: the input of the owner's layer.
        """
        layer = self.weights.layers[spec.layer]
        weights = layer.owner
        assert weights is not None
        inputs = self._norm(rows, layer.norm)
        values = inputs @ weights.values
        scores = values if weights.gate is None else inputs @ weights.gate
        for chunk, own in _rows_of(chunks):
            first, groups = chunk.state.push_group(
                spec.layer, spec.ratio, chunk.start, PendingGroup(values[own], scores[own])
            )
            if not len(groups.values):
                continue
            pooled = groups.values
            if weights.gate is not None:
                shape = (-1, spec.ratio, self.config.head_dim)
                pooled = ops.pool_groups(groups.values.reshape(shape), groups.scores.reshape(shape))
            latent = self._norm(pooled, weights.norm)
            # Every entry stands at the first position of its group.
            positions = (first + torch.arange(len(latent))) * spec.ratio
            main = self._rotate(latent, positions, spec.ratio)
            index = self._norm(latent @ weights.index_key, weights.index_norm)
            index = self._rotate(index, positions, spec.ratio)
            chunk.state.entries.write(f"main_r{spec.ratio}", spec.layer, first, main)
            chunk.state.entries.write(f"index_r{spec.ratio}", spec.layer, first, index)

    def _norm(self, values: Tensor, weight: Tensor | None) -> Tensor:
        """``ops.rms_norm`` with the config's epsilon. Shapes: ``[..., width]`` in and out."""
        return ops.rms_norm(values, weight, self.config.rms_norm_eps)

    def _rotate(
        self, values: Tensor, positions: Tensor, ratio: int, *, back: bool = False
    ) -> Tensor:
        """``ops.rotate`` with the base of layers of this ratio. Shapes: ``[rows, ..., width]``."""
        config = self.config
        # A layer's queries meet its window rows and its global entries in one product, so all three
        # turn at one base.
        theta = config.compress_rope_theta if ratio else config.rope_theta
        return ops.rotate(values, positions, theta=theta, dims=config.qk_rope_head_dim, back=back)
