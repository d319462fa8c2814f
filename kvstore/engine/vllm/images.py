"""What an image of a request shows, by content: the names that vLLM gives images are only names.

A client may choose a name (``uuid``), also one that another image has; and with prefix caching and its
processor's cache off, vLLM counts images, from one again in every process.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.hasher import MultiModalHasher

NAMES = 1 << 16
"""Names that are remembered: more than the encoder outputs that vLLM keeps, some thousands at most."""


@dataclass(frozen=True, slots=True)
class _Shown:
    data: weakref.ref[Any]
    digest: bytes


class Images:
    """Digests of images by what the model is shown of them.

    vLLM keeps the encoder's outputs by name. So a name stands for the first content that it came with:
    another one under it may have been computed from the first, and gets no digest.

    Threads: one.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, _Shown] = OrderedDict()

    def digest(self, feature: Any) -> bytes | None:
        """Return the digest of what a feature of a request shows, or None where that is not known.

        Cost: one SHA-256 over the processor's tensors, once for as long as vLLM keeps them.
        """
        data = feature.data
        if data is None or "address" in data:  # in shared memory, which only workers read
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
        "sha256",
        modality=feature.modality,
        fields=fields,
        is_embed=feature.mm_position.is_embed,
    )
    return bytes.fromhex(shown)
