"""Container of an archive: a tar, plain or compressed with zstd, read sequentially in bounded memory."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import zstandard

from kvstore.output.files import written

SKIPPED_BYTES = 1 << 30
"""Largest member that can be refused and skipped; a larger one ends the import."""
_WINDOW_BYTES = 128 << 20
"""Largest window of a zstd stream: above that of every level but --ultra. zstd recommends 8 MiB for decoders."""
_CHUNK = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FREE, _PINNED = 0o600, 0o400
"""Modes of a block that may be evicted, and of one that is pinned."""
_LAST_SECOND = 8**11 - 1
"""Largest time in a header, in the year 2242; later expiries are reduced to it."""


@contextmanager
def write_archive(file: Path) -> Iterator[IO[bytes]]:
    """Open a stream for the members of ``file``, written atomically, with zstd if it ends in ``.zst``."""
    with written(file) as raw:
        if file.suffix == ".zst":
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            with compressor.stream_writer(raw, closefd=False) as stream:
                yield cast("IO[bytes]", stream)
                _end(cast("IO[bytes]", stream))
        else:
            yield raw
            _end(raw)


def _end(stream: IO[bytes]) -> None:
    stream.write(b"\0" * 2 * tarfile.BLOCKSIZE)


def write_member(
    stream: IO[bytes], name: str, data: bytes, *, is_pinned: bool = False, expires: float = 0
) -> None:
    """Write one file. Its mode records the pin, its time the expiry (0: never)."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), _PINNED if is_pinned else _FREE
    if expires:  # negative in damaged records
        info.mtime = int(max(1.0, min(expires, _LAST_SECOND)))
    stream.write(info.tobuf(tarfile.USTAR_FORMAT))
    stream.write(data)
    stream.write(b"\0" * (-len(data) % tarfile.BLOCKSIZE))


@contextmanager
def read_archive(file: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open the tar in ``file``: its stream, and a function for the bytes of ``file`` read so far."""
    with file.open("rb") as raw:
        magic = raw.read(len(_ZSTD_MAGIC))
        raw.seek(0)
        if magic != _ZSTD_MAGIC:
            yield raw, raw.tell
            return
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        with decompressor.stream_reader(cast("IO[bytes]", raw), closefd=False) as stream:
            yield cast("IO[bytes]", stream), raw.tell


class ArchiveDamage(Exception):  # noqa: N818 - reported as ``damage``; never raised to a caller
    """Damage that ends the reading of an archive."""


@dataclass(frozen=True, slots=True)
class Member:
    """One header of a tar."""

    name: str
    size: int
    is_file: bool
    is_pinned: bool
    seconds: int


class Members:
    """Members of a tar, read sequentially, one header at a time, in bounded memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = 0
        """Unread bytes of the current member, padding included."""

    def __iter__(self) -> Iterator[Member]:
        while True:
            self._skip()
            block = self._exactly(tarfile.BLOCKSIZE)
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                return
            except (tarfile.HeaderError, ValueError) as error:
                raise ArchiveDamage(f"a header is damaged: {error}") from error
            if not 0 <= info.size <= SKIPPED_BYTES:
                raise ArchiveDamage(f"the member {info.name[:80]!r} claims {info.size} bytes")
            self._left = -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            yield Member(
                name=info.name,
                size=info.size,
                is_file=info.type in (tarfile.REGTYPE, tarfile.AREGTYPE),
                is_pinned=not info.mode & 0o200,
                seconds=max(0, min(int(info.mtime), _LAST_SECOND)),
            )

    def read(self, member: Member) -> bytearray:
        """Return the content of the current member; at most one call per member."""
        data = bytearray(self._exactly(member.size))
        self._left -= member.size
        return data

    def _skip(self) -> None:
        while self._left:
            self._left -= len(self._exactly(min(self._left, _CHUNK)))

    def _exactly(self, size: int) -> bytes:
        chunks, left = [], size
        try:
            while left:
                chunk = self._stream.read(min(left, _CHUNK))
                if not chunk:
                    raise ArchiveDamage("it ends too soon: it was cut short")
                chunks.append(chunk)
                left -= len(chunk)
        except zstandard.ZstdError as error:
            raise ArchiveDamage(f"it cannot be unpacked: {error}") from error
        return b"".join(chunks)
