"""Engram: rows of large tables, looked up by a hash of the last few tokens.

Rows are a function of token ids, so a prefix cache stores none of them: recomputing a row repeats the lookup
of its n-grams, in all tokens of the request. The tables are on disk, too large for memory; the rows of a
pass are prefetched before its first layer.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.reference import ops
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.formats import pack_mxfp8, unpack_mxfp8
from kvstore.reference.residual import Streams
from kvstore.reference.weights import EngramWeights

_MULTIPLIER_SEED = 10_007
"""Times the layer's id: the seed of its multipliers. Source: the release's Engram."""
_WRITTEN_ROWS = 1 << 14
"""Rows of a random table that are generated at a time."""


def fold(text: str) -> str:
    """Return a text with case, accents, width and white space folded; unchanged if nothing is left."""
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(char for char in plain if unicodedata.category(char) != "Mn").lower()
    words = re.sub(r"[ \t\r\n]+", " ", plain)
    return words if words == " " else words.strip() or text


def token_classes(vocab_size: int) -> NDArray[np.int64]:
    """Return the class of each token, ``[vocab]``: tokens of one class have the same n-grams.

    Classes are numbered by their first token. A token that is not text by itself has its own class.
    """
    numbers: dict[object, int] = {}
    classes = []
    for token in range(vocab_size):
        # Tokens below 256 are bytes; those of multi-byte characters do not fold.
        key: object = fold(chr(token)) if token < 0x80 else token
        classes.append(numbers.setdefault(key, len(numbers)))
    return np.array(classes, np.int64)


def _primes(start: int, count: int) -> list[int]:
    """Return the first ``count`` primes from ``start`` on."""
    found: list[int] = []
    number = max(2, start)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


@dataclass(frozen=True, slots=True)
class Addresses:
    """Table rows of the n-grams that end at a token, for one layer.

    The hash of an n-gram is the xor of the classes of its n tokens, each times an odd number. The row
    of a head is the hash modulo its own prime.

    Shapes:
        multipliers int64 ``[orders + 1]``, primes and offsets int64 ``[orders, heads]``.
    """

    multipliers: NDArray[np.int64]
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    classes: NDArray[np.int64]
    pad: int

    @property
    def row_count(self) -> int:
        """Rows of the table: the sum of all primes."""
        return int(self.primes.sum())

    def rows(self, tokens: Tensor, is_image: Tensor, positions: Tensor) -> Tensor:
        """Return the row of each order and head for the tokens at ``positions``.

        Positions before the first token, and those up to the last image before a token, are padding.

        Shapes:
            tokens int64 and is_image bool ``[capacity]``; returns int64 ``[rows, orders * heads]``.
        """
        reads = positions.numpy()[:, None] - np.arange(len(self.multipliers))
        is_hidden = (reads < 0) | is_image.numpy()[reads.clip(0)]
        is_hidden = np.logical_or.accumulate(is_hidden, axis=1)
        classes = np.where(is_hidden, self.pad, self.classes[tokens.numpy()[reads.clip(0)]])
        hashes = np.bitwise_xor.accumulate(classes * self.multipliers, axis=1)[:, 1:]
        rows = hashes[..., None] % self.primes + self.offsets
        return torch.from_numpy(rows.reshape(len(positions), -1))


def addresses(config: ReferenceConfig) -> dict[int, Addresses]:
    """Return the addresses of each Engram layer.

    Primes ascend from ``engram_vocab_size`` over layers, orders and heads, all distinct.
    """
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    classes = token_classes(config.vocab_size)
    # Products of a class and a multiplier must fit in 63 bits.
    bound = max(1, np.iinfo(np.int64).max // (int(classes.max()) + 1) // 2)
    layers = config.engram_layer_ids
    listed = np.array(_primes(config.engram_vocab_size, len(layers) * orders * heads))
    found = {}
    for layer, primes in zip(layers, listed.reshape(len(layers), orders, heads), strict=True):
        rng = np.random.default_rng(_MULTIPLIER_SEED * layer)
        ends = np.cumsum(primes).reshape(primes.shape)
        found[layer] = Addresses(
            multipliers=rng.integers(0, bound, orders + 1, dtype=np.int64) * 2 + 1,
            primes=primes,
            offsets=ends - primes,
            classes=classes,
            pad=int(classes[config.engram_pad_token_id]),
        )
    return found


def token_bytes(config: ReferenceConfig) -> int:
    """Return the bytes read from all tables for one token: a row per layer, order and head."""
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    return len(config.engram_layer_ids) * columns * _row_bytes(config)


def _row_bytes(config: ReferenceConfig) -> int:
    return config.engram_head_dim * 33 // 32


class Table(Protocol):
    """Table rows of one layer."""

    def prefetch(self, rows: Tensor, /) -> None:
        """Start fetching rows for a later ``gather``. Shapes: int64, any."""

    def gather(self, rows: Tensor, /) -> Tensor:
        """Return rows. Shapes: int64 ``[...]``; returns ``[..., engram_head_dim]``."""


class DiskTable:
    """Consecutive rows in MXFP8 in a mapped file. ``bytes_read`` counts gathered bytes."""

    def __init__(self, path: Path, row_count: int, row_bytes: int, dtype: torch.dtype) -> None:
        """Map the table. Raises ``ValueError`` if the file has another size."""
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != row_count * row_bytes:
                msg = f"{path} has {size} bytes, expected {row_count} rows of {row_bytes}; remove it to regenerate it"
                raise ValueError(msg)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Neighbours of a row are of other n-grams, so read-ahead would read unused rows.
        self._map.madvise(mmap.MADV_RANDOM)
        self._rows = np.frombuffer(self._map, np.uint8).reshape(row_count, row_bytes)
        self._dtype = dtype
        self.bytes_read = 0

    def prefetch(self, rows: Tensor) -> None:
        """Request the pages from the kernel, which fetches them while layers compute."""
        row_bytes = self._rows.shape[1]
        first = rows.numpy().ravel() * row_bytes // mmap.PAGESIZE
        last = (rows.numpy().ravel() * row_bytes + row_bytes - 1) // mmap.PAGESIZE
        for page in np.unique(np.concatenate([first, last])).tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)

    def gather(self, rows: Tensor) -> Tensor:
        """Return rows, decoded."""
        stored = self._rows[rows.numpy()]
        self.bytes_read += stored.nbytes
        return unpack_mxfp8(stored, self._dtype)


class TrainedTable:
    """Trainable rows in memory, rounded as on disk. Shapes: values ``[rows, engram_head_dim]``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def prefetch(self, rows: Tensor) -> None:
        """No-op."""

    def gather(self, rows: Tensor) -> Tensor:
        """Return rows, rounded as on disk."""
        exact = self.values[rows]
        stored = pack_mxfp8(exact.detach())
        return ops.straight_through(exact, unpack_mxfp8(stored, exact.dtype))


def random_rows(config: ReferenceConfig, row_count: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of a random table in chunks. Shapes: float32 ``[n, engram_head_dim]``."""
    rng = np.random.default_rng(seed)
    for start in range(0, row_count, _WRITTEN_ROWS):
        rows = min(_WRITTEN_ROWS, row_count - start)
        yield torch.from_numpy(rng.standard_normal((rows, config.engram_head_dim), np.float32))


def write_table(path: Path, chunks: Iterable[Tensor]) -> None:
    """Write a table atomically, in chunks. Shapes: chunks ``[n, engram_head_dim]``."""
    partial = path.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        for chunk in chunks:
            file.write(pack_mxfp8(chunk).tobytes())
    partial.replace(path)


def table_path(folder: Path, config: ReferenceConfig, layer: int, seed: int) -> Path:
    """Return the path of a layer's table in a folder of tables."""
    rows = addresses(config)[layer].row_count
    return folder / f"engram-{layer}-{rows}x{config.engram_head_dim}-{seed}.bin"


def open_tables(
    config: ReferenceConfig, folder: Path, *, seed: int, dtype: torch.dtype
) -> dict[int, DiskTable]:
    """Return the table of each Engram layer in ``folder``; create missing ones from ``seed``."""
    tables = {}
    for layer, where in addresses(config).items():
        rows, row_bytes = where.row_count, _row_bytes(config)
        path = table_path(folder, config, layer, seed)
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_table(path, random_rows(config, rows, seed * _MULTIPLIER_SEED + layer))
        tables[layer] = DiskTable(path, rows, row_bytes, dtype)
    return tables


class Engram:
    """N-gram lookups of a model, and their additions in layers."""

    def __init__(self, config: ReferenceConfig, tables: Mapping[int, Table]) -> None:
        if set(tables) != set(config.engram_layer_ids):
            msg = f"Engram needs a table for each of layers {config.engram_layer_ids}, found {sorted(tables)}"
            raise ValueError(msg)
        self._config = config
        self._addresses = addresses(config)
        self._tables = dict(tables)

    def locate(self, tokens: Tensor, is_image: Tensor, positions: Tensor) -> dict[int, Tensor]:
        """Return ``Addresses.rows`` of each layer, and prefetch them, except those of images."""
        found = {}
        for layer, where in self._addresses.items():
            found[layer] = where.rows(tokens, is_image, positions)
            self._tables[layer].prefetch(found[layer][~is_image[positions]])
        return found

    def add(
        self, layer: int, weights: EngramWeights, streams: Streams, rows: Tensor, is_image: Tensor
    ) -> Streams:
        """Add table rows to each stream, gated by the similarity of stream and row.

        Shapes:
            rows int64 ``[rows, orders * heads]``, is_image bool ``[rows]``: image rows stay unchanged.
        """
        values, eps = streams.values, self._config.rms_norm_eps
        text = ~is_image
        found = self._tables[layer].gather(rows[text]).flatten(1)
        here = values[text]
        keys = ops.rms_norm((found @ weights.keys).reshape(here.shape), weights.key_norm, eps)
        queries = ops.rms_norm(here, weights.query_norm, eps)
        gates = ((queries * keys).sum(dim=-1) / math.sqrt(here.shape[-1])).sigmoid()
        added = here + gates[..., None] * (found @ weights.values)[:, None]
        return Streams(values.masked_scatter(text[:, None, None], added), streams.read)
