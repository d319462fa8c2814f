"""Streams of trace files: plain, gzip or zstd; one file, a directory, a tar, or standard input."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import zstandard
from typing_extensions import override

from kvstore.errors import TraceError
from kvstore.output.files import PUBLIC, written

WINDOW_BYTES = 1 << 27
"""Largest accepted zstd window: that of ``zstd --long=27``, the decoder's own limit."""
CHUNK_BYTES = 1 << 14
"""Compressed bytes per step: about 3 MB of text, as traces compress 200 times."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
TAR_AT, TAR = 257, b"ustar"
BROKEN = (zstandard.ZstdError, gzip.BadGzipFile, zlib.error, EOFError, tarfile.TarError)
"""Exceptions of corrupt or truncated compressed bytes."""


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file and decompress it, by its first bytes; ``-`` is standard input.

    Raises:
        TraceError: if it cannot be opened or decompressed.
    """
    try:
        with _raw(path) as raw:
            yield _decompressed(raw)
    except FileNotFoundError:
        raise TraceError(path, "no such file or directory") from None
    except BROKEN as error:
        raise TraceError(path, f"cannot be decompressed: {error}") from error


@contextmanager
def _raw(path: Path) -> Iterator[io.BufferedReader]:
    if str(path) == "-":
        yield cast("io.BufferedReader", sys.stdin.buffer)
        return
    with path.open("rb") as file:
        yield file


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    magic = raw.peek(4)[:4]
    if magic.startswith(GZIP):
        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=raw)))
    if magic == ZSTD:
        return io.BufferedReader(_Zstd(raw), 1 << 18)
    return raw


class _Zstd(io.RawIOBase):
    """zstd frames as one stream; detects truncation, unlike the library's reader."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._frames = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = b""
        self._ready = memoryview(b"")

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(CHUNK_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            if self._frame is None:
                self._frame = self._frames.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def documents(path: Path) -> Iterator[tuple[str, io.BufferedReader]]:
    """Yield name and stream, valid until the next, of a file or of each file in a directory or tar, by name."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())
        if not files:
            raise TraceError(path, "is an empty directory")
        for file in files:
            with opened(file) as stream:
                yield str(file.relative_to(path)), stream
        return
    with opened(path) as stream:
        if stream.peek(TAR_AT + 5)[TAR_AT : TAR_AT + 5] != TAR:
            yield path.name, stream
            return
        with tarfile.open(fileobj=io.BytesIO(stream.read())) as tar:
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name.removeprefix("./"), cast("io.BufferedReader", content)


@contextmanager
def created(path: Path) -> Iterator[IO[bytes]]:
    """Write a file atomically, compressed if its name ends in .zst or .gz; ``-`` is standard output.

    Raises:
        StoreError: if it cannot be written.
    """
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    with written(path, PUBLIC) as file, _compressed(path, file) as stream:
        yield stream


@contextmanager
def _compressed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.suffix == ".zst":
        with zstandard.ZstdCompressor(level=10).stream_writer(file, closefd=False) as writer:
            yield cast("IO[bytes]", writer)
    elif path.suffix == ".gz":
        # No time in the header: the same trace always has the same bytes.
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as writer:
            yield cast("IO[bytes]", writer)
    else:
        yield file


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of a file's stored bytes, in hex; None for a stream.

    The digest of a directory is that of the output of ``sha256sum`` for its files, by name. Raises
    ``TraceError`` if it cannot be opened.
    """
    is_stream = path.exists() and not path.is_file() and not path.is_dir()  # a pipe
    if str(path) == "-" or is_stream:
        return None
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        lines = [
            f"{sha256_of(each)}  {each.relative_to(path)}\n"
            for each in sorted(path.rglob("*"))
            if each.is_file()
        ]
    except FileNotFoundError:
        raise TraceError(path, "no such file or directory") from None
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
