"""Images in a prompt: embeddings of patch features, and digests.

All positions of an image have the same token, so token ids do not identify the image. A block's hash
covers the image's digest and the position in it, and a recomputed row needs the same features there.

    start  (h rows of: w image rows, newline)  end
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvstore
from kvstore.reference.weights import VisionWeights

PREPROCESSING = b"kvstore.reference.vision.1"
"""Part of every digest, so that images with another preprocessing never match."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Patch features of an image, and its start in the prompt.

    Shapes:
        patches float32 ``[height, width, vision_hidden]``, height and width multiples of ``ratio``.
    """

    start: int
    patches: NDArray[np.float32]
    ratio: int = 3
    span: kvstore.ImageSpan = field(init=False)
    """Token range, and a digest of content, size and preprocessing."""

    def __post_init__(self) -> None:
        """Compute the span. Raises ``ValueError`` for features that do not divide into squares."""
        if self.patches.ndim != 3 or any(n < 1 or n % self.ratio for n in self.patches.shape[:2]):
            msg = (
                f"patches must be [height, width, features] with height and width multiples of "
                f"{self.ratio}, found shape {list(self.patches.shape)}"
            )
            raise ValueError(msg)
        height, width = (size // self.ratio for size in self.patches.shape[:2])
        shape = f"{self.patches.shape} {self.ratio}".encode()
        content = np.ascontiguousarray(self.patches, np.float32).tobytes()
        digest = hashlib.sha256(PREPROCESSING + shape + content).digest()
        stop = self.start + 2 + height * (width + 1)
        object.__setattr__(self, "span", kvstore.ImageSpan(self.start, stop, digest))


def unshuffle(patches: Tensor, ratio: int) -> Tensor:
    """Join the features of each square of patches.

    Shapes:
        patches ``[h * ratio, w * ratio, features]``; returns ``[h, w, ratio * ratio * features]``.
    """
    height, width, features = patches.shape
    squares = patches.reshape(height // ratio, ratio, width // ratio, ratio, features)
    return squares.transpose(1, 2).flatten(2)


def image_rows(weights: VisionWeights, image: Image) -> Tensor:
    """Return the embeddings of an image's tokens. Shapes: ``[tokens, hidden]``."""
    patches = torch.from_numpy(image.patches).to(weights.project.dtype)
    rows = unshuffle(patches, image.ratio) @ weights.project
    newlines = weights.newline.expand(len(rows), 1, -1)
    body = torch.cat((rows, newlines), dim=1).flatten(0, 1)
    return torch.cat((weights.start[None], body, weights.end[None]))
