"""Computations of a layer without a cache: projections, rotation, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Projected:
    """Inputs of attention for some rows.

    Shapes:
        inputs ``[rows, hidden]``, latent ``[rows, q_lora_rank]``, queries ``[rows, heads, head_dim]``,
        window ``[rows, head_dim]``.
    """

    inputs: Tensor
    latent: Tensor
    queries: Tensor
    window: Tensor

    def rows(self, own: slice) -> Projected:
        """Return some of the rows."""
        return Projected(self.inputs[own], self.latent[own], self.queries[own], self.window[own])


class Layer:
    """One layer of the model, or of the drafter, which has compression ratio 0."""

    def __init__(self, config: ReferenceConfig, ratio: int, weights: LayerWeights) -> None:
        self.weights = weights
        self._config = config
        # Queries are multiplied with both window rows and global entries, so all three share a base.
        self._theta = config.compress_rope_theta if ratio else config.rope_theta

    def project(self, mixed: Tensor, positions: Tensor) -> Projected:
        """Return queries and window rows. Shapes: mixed ``[rows, hidden]``, positions ``[rows]``."""
        weights = self.weights
        inputs = self.norm(mixed, weights.norm)
        latent = self.norm(inputs @ weights.query_down, weights.query_norm)
        heads = self._config.num_attention_heads
        queries = (latent @ weights.query_up).reshape(len(mixed), heads, -1)
        queries = self.rotate(self.norm(queries, None), positions)
        return Projected(inputs, latent, queries, self.window_rows(inputs, positions))

    def window_rows(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return window rows. Shapes: inputs ``[rows, hidden]``; returns ``[rows, head_dim]``."""
        rows = self.norm(inputs @ self.weights.window, self.weights.window_norm)
        return self.rotate(rows, positions)

    def close(self, attended: Tensor, positions: Tensor) -> Tensor:
        """Return the output of attention.

        Entries are both keys and values, so their sum has absolute rotations. Rotating it back by the
        query's position leaves relative positions only.

        Shapes:
            attended ``[rows, heads, head_dim]``; returns ``[rows, hidden]``.
        """
        return self.rotate(attended, positions, back=True).flatten(1) @ self.weights.output

    def feed(self, mixed: Tensor) -> Tensor:
        """Return the output of the feed-forward sub-layer. Shapes: ``[rows, hidden]`` in and out."""
        weights = self.weights
        inputs = self.norm(mixed, weights.ffn_norm)
        return ops.swiglu(inputs, weights.gate, weights.up, weights.down)

    def norm(self, values: Tensor, weight: Tensor | None) -> Tensor:
        """``ops.rms_norm`` with the config's epsilon. Shapes: ``[..., width]`` in and out."""
        return ops.rms_norm(values, weight, self._config.rms_norm_eps)

    def rotate(self, values: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """``ops.rotate`` with this layer's base. Shapes: ``[rows, ..., width]`` in and out."""
        dims = self._config.qk_rope_head_dim
        return ops.rotate(values, positions, theta=self._theta, dims=dims, back=back)
