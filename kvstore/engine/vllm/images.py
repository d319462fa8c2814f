"""Digests of images by content, because vLLM's names do not identify images.

A client may choose a name (``uuid``), also that of another image. With prefix caching and the processor's
cache off, vLLM numbers images, from 1 in every process.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.hasher import MultiModalHasher

NAMES = 1 << 16
"""Most recorded names. vLLM caches at most some thousands of encoder outputs."""


@dataclass(frozen=True, slots=True)
class _Shown:
    data: weakref.ref[Any]
    digest: bytes


class Images:
    """Digests of images by the model's input. Threads: one.

    vLLM caches encoder outputs by name. So only the first content of a name has a digest: rows of a
    later one may have been computed from the first.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, _Shown] = OrderedDict()

    def digest(self, feature: Any) -> bytes | None:
        """Return the digest of the content of a request's feature, None for unknown content.

        Cost: one SHA-256 over the processor's tensors, once while vLLM keeps them.
        """
        data = feature.data
        # With an address, the data is in shared memory, which only workers read.
        if data is None or "address" in data:
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
