"""Digests of images by content: vLLM's names of images do not identify them.

A client may choose a name (``uuid``), even that of another image. With prefix caching and the processor's
cache off, vLLM numbers images, from one in every process.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.hasher import MultiModalHasher

NAMES = 1 << 16
"""Most remembered names: more than vLLM's cached encoder outputs, which are at most some thousands."""


@dataclass(frozen=True, slots=True)
class _Shown:
    data: weakref.ref[Any]
    digest: bytes


class Images:
    """Digests of images by the model's input.

    vLLM caches the encoder's outputs by name. So a name identifies its first content: rows of another
    content under that name may have been computed from the first, and it gets no digest.

    Threads: one.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, _Shown] = OrderedDict()

    def digest(self, feature: Any) -> bytes | None:
        """Return the digest of the content of a request's feature, None if the content is not known.

        Cost: one SHA-256 over the processor's tensors, once while vLLM keeps them.
        """
        data = feature.data
        if (
            data is None or "address" in data
        ):  # its data is in shared memory, which only workers read
            return None
        known = self._names.get(feature.identifier)
        if known is not None and known.data() is data:
            self._names.move_to_end(feature.identifier)
            return known.digest
        digest = _digest(feature)
        if digest is None or (known is not None and known.digest != digest):
            return None
        self._names[feature.identifier] = _Shown(weakref.ref(data), digest)
        self._names.move_to_end(feature.identifier)
        if len(self._names) > NAMES:
            self._names.popitem(last=False)
        return digest


def _digest(feature: Any) -> bytes | None:
    fields = {name: feature.data[name].data for name in sorted(feature.data)}
    if any(value is None for value in fields.values()):
        return None
    shown = MultiModalHasher.hash_kwargs(
        "sha256", modality=feature.modality, fields=fields, is_embed=feature.mm_position.is_embed
    )
    return bytes.fromhex(shown)
