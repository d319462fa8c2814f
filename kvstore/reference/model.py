"""The forward pass: an encoder that writes all global KV, and a decoder that reads it.

Prefill computes the encoder for every row that is not restored, up to the global entries of the last
owner, then the decoder once, for the last W rows of the prompt, with windows that begin there. Each new
token passes through both. The engine chooses the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import LayerSpec, Mode, ReferenceConfig
from kvstore.reference.draft import Drafter
from kvstore.reference.engram import Engram, Table
from kvstore.reference.indexer import Indexer, Selection, read_entries
from kvstore.reference.layer import Layer
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, rows_of
from kvstore.reference.vision import image_rows
from kvstore.reference.weights import Weights


class ReferenceModel:
    """A model with the structure of DeepSeek-V4.1.

    A pass concatenates the rows of chunks of several sequences. Only attention separates sequences.
    """

    def __init__(
        self, config: ReferenceConfig, weights: Weights, tables: Mapping[int, Table] | None = None
    ) -> None:
        """Raises ``ValueError`` unless ``tables`` has a table for each Engram layer of the config."""
        self.config = config
        self.weights = weights
        self.drafter = Drafter(config, weights) if config.num_nextn_predict_layers else None
        self._engram = Engram(config, tables or {})
        self._specs = config.layers
        self._layers = [
            Layer(config, spec.ratio, layer)
            for spec, layer in zip(self._specs, weights.layers, strict=True)
        ]
        self._indexer = Indexer(config, config.layout().group("index_r1"))

    def encode(self, chunks: Sequence[Chunk], losses: list[Tensor] | None = None) -> Streams:
        """Compute the encoder; write its window rows and the global entries of every owner.

        Returns its output, with the rows of all chunks in order. In training, the loss of each indexer is
        appended to ``losses``.
        """
        is_image = torch.cat([chunk.is_image for chunk in chunks])
        found = [
            self._engram.locate(chunk.state.tokens, chunk.state.is_image, chunk.positions)
            for chunk in chunks
        ]
        embedded = torch.cat([self._embed(chunk) for chunk in chunks])
        streams = Streams.start(embedded, self.config.hc_mult)
        selections = [Selection() for _ in chunks]
        for spec in self._specs[: self.config.last_owner]:
            engram = self.weights.layers[spec.layer].engram
            if engram is not None:
                rows = torch.cat([located[spec.layer] for located in found])
                streams = self._engram.add(spec.layer, engram, streams, rows, is_image)
            if spec.mode is Mode.FULL:
                self._write_global(spec, streams, chunks)
            streams = self._run(spec, streams, chunks, selections, losses)
        # The decoder's first owner writes the last entries of a prompt.
        self._write_global(self._specs[self.config.last_owner], streams, chunks)
        return streams

    def decode(
        self, streams: Streams, chunks: Sequence[Chunk], losses: list[Tensor] | None = None
    ) -> Streams:
        """Compute the decoder from the encoder's output; write its window rows, and the drafter's.

        Rows and ``losses`` are as for ``encode``.
        """
        selections = [Selection() for _ in chunks]
        targets = []
        for spec in self._specs[self.config.last_owner :]:
            if spec.layer in self.config.dspark_target_layer_ids:
                targets.append(streams.values.mean(dim=1))
            streams = self._run(spec, streams, chunks, selections, losses)
        if self.drafter is not None:
            self.drafter.remember(torch.cat(targets, dim=1), chunks)
        return streams

    def logits(self, streams: Streams) -> Tensor:
        """Return the logits of each row's next token. Shapes: ``[rows, vocab]``."""
        return self._layers[0].norm(streams.mixed(), self.weights.norm) @ self.weights.head

    def _embed(self, chunk: Chunk) -> Tensor:
        """Return the embedding of a chunk's tokens and images. Shapes: ``[rows, hidden]``."""
        rows = self.weights.embedding[chunk.state.tokens[chunk.start : chunk.stop]]
        for image in chunk.state.images:
            span = image.span
            start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
            if start < stop:
                assert self.weights.vision is not None
                embedded = image_rows(self.weights.vision, image)
                embedded = embedded[start - span.start : stop - span.start]
                before, after = rows[: start - chunk.start], rows[stop - chunk.start :]
                rows = torch.cat((before, embedded, after))
        return rows

    def _run(
        self,
        spec: LayerSpec,
        streams: Streams,
        chunks: Sequence[Chunk],
        selections: list[Selection],
        losses: list[Tensor] | None,
    ) -> Streams:
        """Compute one layer: attention to chosen entries and the window at once, then feed forward.

        ``selections`` has one for each chunk; index sources write it, layers above read it.
        """
        layer = self._layers[spec.layer]
        positions = torch.cat([chunk.positions for chunk in chunks])
        projected = layer.project(streams.mixed(), positions)
        outputs = []
        for number, (chunk, own) in enumerate(rows_of(chunks)):
            state = chunk.state
            state.write_window(spec.layer, chunk.start, projected.window[own])
            if spec.index_source == spec.layer:
                selections[number] = self._indexer.choose(
                    spec,
                    layer,
                    projected.rows(own),
                    chunk.positions,
                    state.entries,
                    selections[number],
                )
            picks, scores = selections[number].picks, selections[number].scores
            sources = [state.read_window(spec.layer, chunk.start, chunk.stop)]
            if picks is not None and spec.owner is not None:
                sources.append(read_entries(state.entries, spec, picks))
            attended, shares = ops.attend(projected.queries[own], sources)
            outputs.append(attended)
            if losses is not None and spec.index_source == spec.layer:
                assert picks is not None
                assert scores is not None
                losses.append(ops.choice_loss(scores, picks, shares[-1]))
        weights = layer.weights
        closed = layer.close(torch.cat(outputs), positions)
        streams = streams.advance(closed, weights.attention_mix, self.config)
        return streams.advance(layer.feed(streams.mixed()), weights.ffn_mix, self.config)

    def _write_global(self, spec: LayerSpec, streams: Streams, chunks: Sequence[Chunk]) -> None:
        """Write the global entries of an owner, for the groups completed by these rows.

        The main entry is the rotated latent; the indexer key is projected from the latent before
        rotation. Neither can be computed from the other.
        """
        layer = self._layers[spec.layer]
        weights = layer.weights.owner
        assert weights is not None
        inputs = layer.norm(streams.mixed(), layer.weights.norm)
        values = inputs @ weights.values
        scores = values if weights.gate is None else inputs @ weights.gate
        for chunk, own in rows_of(chunks):
            first, pooled, shares = chunk.state.push_groups(
                spec.layer, chunk.start, values[own], scores[own]
            )
            if not len(pooled):
                continue
            latent = pooled[:, 0] if weights.gate is None else ops.pool_groups(pooled, shares)
            latent = layer.norm(latent, weights.norm)
            # An entry has the first position of its group.
            positions = (first + torch.arange(len(latent))) * spec.ratio
            main = layer.rotate(latent, positions)
            index = layer.norm(latent.detach() @ weights.index_key, weights.index_norm)
            index = layer.rotate(index, positions)
            chunk.state.entries.write(f"main_r{spec.ratio}", spec.layer, first, main)
            chunk.state.entries.write(f"index_r{spec.ratio}", spec.layer, first, index)
