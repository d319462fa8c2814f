"""Residual of a row: one stream with additions, or several mixed streams (mHC).

Single-pass hyper-connections read and write the streams of a row once per sub-layer F:

    X_{l+1} = B_l X_l + C_l F_l(A_{l-1} X_l),    (A, B, C)_l = H(X_l)

A sub-layer reads with coefficients A of the previous one. So a split of the model, such as that between
encoder and decoder, passes on the streams and these coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.weights import MixWeights


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams of some rows, and the read coefficients of the next sub-layer.

    Shapes:
        values ``[rows, n, hidden]``, read ``[rows, n]``: A of the previous sub-layer.
    """

    values: Tensor
    read: Tensor

    @classmethod
    def start(cls, embedded: Tensor, count: int) -> Streams:
        """Return ``[rows, hidden]`` embeddings in each of ``count`` streams, read by their mean."""
        values = embedded[:, None].expand(-1, count, -1)
        return cls(values, embedded.new_full((len(embedded), count), 1 / count))

    def mixed(self) -> Tensor:
        """Return the input of the next sub-layer: A X. Shapes: ``[rows, hidden]``."""
        return (self.read[..., None] * self.values).sum(dim=1)

    def advance(
        self, output: Tensor, weights: MixWeights | None, config: ReferenceConfig
    ) -> Streams:
        """Return the streams after a sub-layer; without ``weights``, add its output to the one stream.

        Shapes:
            output ``[rows, hidden]``: F(A X).
        """
        if weights is None:
            return Streams(self.values + output[:, None], self.read)
        count = config.hc_mult
        flat = ops.rms_norm(self.values.flatten(1), None, config.rms_norm_eps)
        logits = flat @ weights.project + weights.bias
        read, write, mix = logits.tensor_split([count, 2 * count], dim=-1)
        mix = mix.reshape(-1, count, count)
        kept = ops.sinkhorn(mix, config.hc_sinkhorn_iters, config.hc_eps) @ self.values
        # Twice a sigmoid: a logit of 0 is a factor of 1, a plain addition.
        values = kept + 2 * write.sigmoid()[..., None] * output[:, None]
        return Streams(values, read.sigmoid() + config.hc_eps)

    def rows(self, start: int, stop: int | None = None) -> Streams:
        """Return rows ``[start, stop)``; a negative start counts from the end."""
        return Streams(self.values[start:stop], self.read[start:stop])

    @staticmethod
    def join(passes: Sequence[Streams]) -> Streams:
        """Return the rows of several passes, in order."""
        return Streams(
            torch.cat([rows.values for rows in passes]), torch.cat([rows.read for rows in passes])
        )
