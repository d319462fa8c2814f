"""Keys of LMCache's objects as keys of a block store.

A store's key is the object's whole key and a digest of its shapes and dtypes, which LMCache's key lacks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache.v1.distributed.api import ObjectKey

from kvstore.errors import ConfigError

KEY_BYTES = 1024
"""Most bytes of an encoded key: a model name and a salt of 128 characters each fit."""
_MAGIC = b"kvl1"
_SIZE = struct.Struct("<I")
_HASH_BYTES = 16
"""Fewest bytes of a chunk hash. LMCache's ``builtin`` and ``*_64bit`` hashes have 8 bytes: colliding
prompts can be constructed, and occur by chance on a full SSD."""
_RANK_LIMIT = 1 << 32
"""LMCache packs count and number of a worker into 8 bits each: with more workers, ranks collide."""


def encode_key(key: ObjectKey, layout: bytes) -> bytes:
    """Return the store's key of an object: each field after its length."""
    fields = [
        key.chunk_hash,
        key.model_name.encode(),
        b"%d" % key.kv_rank,
        b"%d" % key.object_group_id,
        key.cache_salt.encode(),
        layout,
    ]
    return _MAGIC + b"".join(_SIZE.pack(len(field)) + field for field in fields)


def decode_key(data: bytes) -> tuple[ObjectKey, bytes] | None:
    """Return the arguments of ``encode_key``, None for invalid bytes."""
    fields: list[bytes] = []
    at = len(_MAGIC)
    while at + _SIZE.size <= len(data) and len(fields) < 6:
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size + size
        fields.append(data[at - size : at])
    if not data.startswith(_MAGIC) or len(fields) != 6 or at != len(data):
        return None
    try:
        chunk, model, rank, group, salt, layout = fields
        key = ObjectKey(chunk, model.decode(), int(rank), int(group), salt.decode())
    except ValueError:
        return None
    return key, layout


def check_keys(keys: Sequence[ObjectKey]) -> None:
    """Raise ``ConfigError`` for a key that does not identify one prompt and one worker."""
    for key in keys:
        if len(key.chunk_hash) < _HASH_BYTES:
            msg = (
                f"a chunk's hash has {len(key.chunk_hash)} bytes, expected at least {_HASH_BYTES}: "
                "start LMCache with --hash-algorithm blake3, its default"
            )
            raise ConfigError(msg)
        if not 0 <= key.kv_rank < _RANK_LIMIT:
            msg = (
                f"kv rank {key.kv_rank:#x} belongs to more than 255 workers, whose ranks collide in "
                "LMCache's keys; use fewer workers"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Entry:
    """Stored object."""

    key: ObjectKey
    layout: bytes
    size: int

    @property
    def name(self) -> bytes:
        """Key of the object in its store."""
        return encode_key(self.key, self.layout)
