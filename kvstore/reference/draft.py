"""DSpark speculative decoding: draft layers propose the next tokens, and the model verifies them.

Draft layers read windows only. Their window rows are projected from the attention inputs of a few decoder
layers at the same token, so a hit cannot restore them: like decoder windows, they exist from the decoder's
first row on. All positions of a draft are computed in one pass, with noise for the unknown tokens; a Markov
head then makes each choice depend on the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.layer import Layer
from kvstore.reference.residual import Streams
from kvstore.reference.state import Chunk, SequenceState, rows_of
from kvstore.reference.weights import Weights

MIN_CONFIDENCE = 0.5
"""Least probability that a draft is correct up to its last token."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed next tokens.

    Shapes:
        confidence ``[len(tokens)]``: the probability of each token, given that earlier ones are correct.
    """

    tokens: tuple[int, ...]
    confidence: Tensor

    def trusted(self, least: float = MIN_CONFIDENCE) -> tuple[int, ...]:
        """Return the tokens to verify: the longest prefix that is correct with probability ``least``."""
        likely = self.confidence.cumprod(dim=0) >= least
        return self.tokens[: int(likely.long().cumprod(dim=0).sum())]


class Drafter:
    """Draft layers, which share embedding and head of the model."""

    def __init__(self, config: ReferenceConfig, weights: Weights) -> None:
        assert weights.draft is not None
        self._config = config
        self._model = weights
        self._weights = weights.draft
        self._layers = [Layer(config, 0, layer) for layer in weights.draft.layers]

    def remember(self, inputs: Tensor, chunks: Sequence[Chunk]) -> None:
        """Write the draft layers' window rows of tokens computed by the decoder.

        Shapes:
            inputs ``[rows, targets * hidden]``: the attention inputs of the target layers, mean over
            streams, rows of all chunks in order.
        """
        weights = self._weights
        fused = self._layers[0].norm(inputs @ weights.project, weights.project_norm)
        for number, layer in zip(self._config.draft_layers, self._layers, strict=True):
            for chunk, own in rows_of(chunks):
                rows = layer.window_rows(fused[own], chunk.positions)
                chunk.state.write_window(number, chunk.start, rows)

    def propose(self, state: SequenceState, token: int, position: int) -> Proposal:
        """Propose tokens after ``token``, which is at ``position`` and not yet computed."""
        hidden = self._hidden(state, token, position)
        weights = self._weights
        logits = hidden @ self._model.head
        tokens, confidence = [], []
        for row in range(len(hidden)):
            previous = weights.markov_in[token]
            token = int((logits[row] + previous @ weights.markov_out).argmax())
            tokens.append(token)
            confidence.append((torch.cat((hidden[row], previous)) @ weights.confidence).sigmoid())
        return Proposal(tuple(tokens), torch.cat(confidence))

    def _hidden(self, state: SequenceState, token: int, position: int) -> Tensor:
        """Compute the draft layers for ``token`` and noise. Shapes: ``[dspark_block_size, hidden]``."""
        config = self._config
        ids = torch.full((config.dspark_block_size,), config.dspark_noise_token_id)
        ids[0] = token
        positions = position + torch.arange(len(ids))
        streams = Streams.start(self._model.embedding[ids], config.hc_mult)
        for number, layer in zip(config.draft_layers, self._layers, strict=True):
            weights = layer.weights
            projected = layer.project(streams.mixed(), positions)
            # Each position reads the window before the draft, and the whole draft.
            before = state.read_window(number, position - 1, position)
            draft = projected.window.expand(len(ids), -1, -1)
            values, readable = before.values, before.readable
            sources = [
                ops.Keys(values.expand(len(ids), -1, -1), readable.expand(len(ids), -1)),
                ops.Keys(draft, torch.ones(draft.shape[:2], dtype=torch.bool)),
            ]
            attended, _ = ops.attend(projected.queries, sources)
            closed = layer.close(attended, positions)
            streams = streams.advance(closed, weights.attention_mix, config)
            streams = streams.advance(layer.feed(streams.mixed()), weights.ffn_mix, config)
        return self._layers[0].norm(streams.mixed(), self._weights.norm)
