"""A store as one file: a tar of frames, and back. docs/format.md, section 7, is normative.

What comes out was verified, and what goes in is verified again: an archive may come from anywhere.
Its headers are read one by one and never followed, so nothing in it names a place on this machine.
"""

from __future__ import annotations

import json
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from kvstore.admin import inspect as admin
from kvstore.blocks.keys import KEYS_NAMESPACE, keys_root
from kvstore.errors import ConfigError, StoreError
from kvstore.frame.format import Frames, Header
from kvstore.identity.block import KEY_BYTES, BlockHash, BlockKey, block_key
from kvstore.identity.hash import namespace_digest
from kvstore.identity.namespace import Namespace
from kvstore.index.prefix_tree import KeyedIndex, Segment
from kvstore.output.files import written
from kvstore.output.sizes import size_bytes
from kvstore.policy.lru import Lru
from kvstore.store import generations
from kvstore.store.generations import LAST_GENERATION
from kvstore.store.integrity import frame_fault, stored_fault
from kvstore.store.namespaces import namespace_facts
from kvstore.store.open_store import OpenStore
from kvstore.store.opening import resolved
from kvstore.store.secret import secret_of
from kvstore.store.store_format import StoreFormat, format_text
from kvstore.tier.ssd.capacity import COMMIT_BYTES
from kvstore.tier.ssd.faults import MEDIUM_ERRORS
from kvstore.tier.ssd.records import Record
from kvstore.tier.ssd.tier import READ_BATCH
from kvstore.tier.ssd.values import BUSY
from kvstore.tier.ssd.version_file import FORMAT_BYTES
from kvstore.transfer.waiting import BARRIER_SECONDS

ARCHIVE_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 16 << 20
"""Largest manifest: some 30,000 namespaces."""
SKIPPED_BYTES = 1 << 30
"""Largest member that is refused and passed over; behind a larger one nothing is looked for."""
SEEN_BLOCKS = 1 << 16
"""Blocks whose hash an import remembers for the blocks that hang on them, some 200 bytes each; of
an older one it is read back."""
_WINDOW_BYTES = 128 << 20
"""Most memory that a zstd stream may ask for: its format's own recommendation for decoders is 8 MiB,
and 128 MiB what every level but --ultra stays below."""
_CHUNK = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_FREE, _PINNED = 0o600, 0o400
"""Modes of a block that may be evicted, and of one that is pinned."""
_LAST_SECOND = 8**11 - 1
"""Largest time in a header, in the year 2242. A later expiry becomes this one."""
_IDENTITY = ("model", "weights", "tokenizer", "adapter", "tenant", "generation")

Progress = Callable[[int, int], None]


# ---- writing -------------------------------------------------------------------------------------


def export_store(
    path: Path, file: Path, namespaces: Sequence[int], progress: Progress
) -> dict[str, Any]:
    """Write the blocks of a store to ``file``, a tar, compressed with zstd if it ends in ``.zst``.

    Every frame is verified; bad ones, and what hangs on them, are left out and counted. An owner
    may go on meanwhile: blocks that it evicts are counted as vanished. ``file`` is replaced when
    the new one is complete and synced. Without ``namespaces``, numbers as ``stats`` shows them, all
    are written. ``progress(done, total)`` is called now and then. Returns plain JSON values.

    Raises:
        ConfigError: for a namespace that the store does not name.
        StoreError: if there is no store, it cannot be read, or the file cannot be written.

    Cost: memory of 16 MB of frames and some 300 bytes a block.
    """
    with admin.opened(path) as store:
        facts = namespace_facts(store.ssd)
        for number in namespaces:
            if number not in facts:
                known = ", ".join(str(n) for n in sorted(facts)) or "none"
                msg = f"--namespace {number} is not in {path}, expected some of: {known}"
                raise ConfigError(msg)
        spaces = {n: facts[n] for n in sorted(set(namespaces) or set(facts))}
        with _written(file) as stream:
            _write_member(stream, MANIFEST, _manifest(store, spaces))
            result = _write_blocks(store, set(spaces) if namespaces else None, stream, progress)
            stream.write(b"\0" * 2 * tarfile.BLOCKSIZE)
    return {
        "path": str(path),
        "file": str(file),
        "file_bytes": file.stat().st_size,
        "namespaces": list(spaces),
        **result,
    }


@contextmanager
def _written(file: Path) -> Iterator[IO[bytes]]:
    """Give a stream whose bytes become ``file``, all of them or none."""
    with written(file) as raw:
        if file.suffix == ".zst":
            packer = zstandard.ZstdCompressor(write_checksum=True)
            with packer.stream_writer(raw, closefd=False) as stream:
                yield cast("IO[bytes]", stream)
        else:
            yield raw


def _write_member(
    stream: IO[bytes], name: str, data: bytes, *, mode: int = _FREE, seconds: int = 0
) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), mode, seconds
    stream.write(info.tobuf(tarfile.USTAR_FORMAT))
    stream.write(data)
    stream.write(b"\0" * (-len(data) % tarfile.BLOCKSIZE))


def _manifest(store: admin.OpenedStore, spaces: Mapping[int, Mapping[str, Any]]) -> bytes:
    lines = (_line(store.form, space, store.secret) for space in spaces.values())
    generations = {}
    for line in lines:
        text = store.ssd.fact(f"generation:{line}") if line else None
        if line and text is not None and text.isdigit():
            generations[line] = int(text)
    return json.dumps(
        {
            "kvstore_archive": ARCHIVE_VERSION,
            "kvstore": version("kvstore"),
            "format": store.ssd.options.format_text,
            "layout": (store.ssd.fact("layout") or b"").decode(errors="replace"),
            "namespaces": {str(number): space for number, space in spaces.items()},
            "generations": generations,
        },
        indent=1,
    ).encode()


def _named(space: Mapping[str, Any]) -> Namespace | None:
    """Return the identity that a store wrote down for a namespace, None if it is none."""
    try:
        return Namespace(**{name: space[name] for name in _IDENTITY})
    except (KeyError, ConfigError):
        return None


def _root(form: StoreFormat, space: Mapping[str, Any], secret: bytes | None) -> BlockHash | None:
    """Return what the first blocks of a namespace hang on, None if it names nothing."""
    if form.key_bytes:
        return keys_root(secret)
    namespace = _named(space)
    if namespace is None:
        return None
    return namespace_digest(form.layout.fingerprint, form.block_tokens, namespace, secret)


def _line(form: StoreFormat, space: Mapping[str, Any], secret: bytes | None) -> str | None:
    """Return the line of weights that generations of a namespace are recorded under."""
    first = _root(form, {**space, "generation": 0}, secret)
    return None if first is None or form.key_bytes else first.hex()


def _in_order(
    records: Mapping[BlockKey, Record], faults: dict[BlockKey, str]
) -> Iterator[tuple[BlockKey, bool]]:
    """Yield blocks in the order of their last use, each behind its parents.

    What was used after a block that hangs on it comes a second time, marked, at that place: so
    whoever goes through an archive in order has the same recency in the end. What hangs on nothing
    goes to ``faults``.
    """
    done: set[BlockKey] = set()
    for key in sorted(records, key=lambda key: (records[key].sequence, records[key].number)):
        if key in done:
            yield key, True
            continue
        chain = [key]
        while (record := records[chain[-1]]).number and record.parent not in done:
            above = records.get(record.parent)
            if above is None or above.number != record.number - 1:
                break
            chain.append(record.parent)
        else:
            done.update(chain)
            yield from ((key, False) for key in reversed(chain))
            continue
        faults[key] = "parent"


def _write_blocks(
    store: admin.OpenedStore, spaces: set[int] | None, stream: IO[bytes], progress: Progress
) -> dict[str, Any]:
    ssd, frames = store.ssd, store.frame_format
    records = {
        key: record
        for key, record in ssd.records()
        if spaces is None or record.namespace_id in spaces
    }
    faults: dict[BlockKey, str] = {}
    good: set[BlockKey] = set()
    size = max(1, min(READ_BATCH, COMMIT_BYTES // frames.frame_bytes))
    batch: list[BlockKey] = []

    def write(key: BlockKey, data: bytes) -> None:
        record = records[key]
        seconds = 0
        if record.expires:  # a damaged one may be negative: long ago
            seconds = int(max(1.0, min(record.expires, _LAST_SECOND)))
        mode = _PINNED if record.is_pinned else _FREE
        _write_member(stream, key.hex(), data, mode=mode, seconds=seconds)

    def finish() -> None:
        for key, data in _read(store, batch, records, faults):
            if records[key].number and records[key].parent not in good:
                faults[key] = "parent"
            else:
                write(key, data)
                good.add(key)
        batch.clear()
        progress(len(good) + len(faults), len(records))

    for key, is_use in _in_order(records, faults):
        if not is_use:
            batch.append(key)
        if is_use or len(batch) == size:
            finish()
        if is_use and key in good:
            write(key, b"")
    finish()
    reasons = Counter(faults.values())
    vanished = reasons.pop("missing", 0)
    return {
        "blocks": len(good),
        "bad_blocks": reasons.total(),
        "bad": dict(reasons),
        "vanished_blocks": vanished,
    }


def _read(
    store: admin.OpenedStore,
    keys: Sequence[BlockKey],
    records: Mapping[BlockKey, Record],
    faults: dict[BlockKey, str],
) -> list[tuple[BlockKey, bytes]]:
    """Return the frames of ``keys`` that are good; why others are not goes to ``faults``."""
    found: list[tuple[BlockKey, bytes]] = []
    done = 0
    while done < len(keys):
        first = done

        def take(i: int, frame: memoryview, first: int = first) -> str | None:
            key = keys[first + i]
            fault = stored_fault(
                store.frame_format, frame, key, records[key], keys_root=store.keys_root
            )
            if fault is None:
                found.append((key, bytes(frame)))
            return fault

        result = store.ssd.read(keys[first:], take)
        done += result.count
        if result.fault == BUSY:
            msg = f"the store at {store.ssd.path} cannot be read just now; nothing was exported: try again"
            raise StoreError(msg)
        if result.fault is not None:
            faults[keys[done]] = result.fault
            done += 1
    return found


# ---- reading -------------------------------------------------------------------------------------


class _Damage(Exception):  # noqa: N818 - found, counted and reported; never raised to a caller
    """The archive cannot be followed from here on."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    size: int
    is_file: bool
    is_pinned: bool
    seconds: int


class _Members:
    """The members of a tar, read forward, one header at a time, in bounded memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = 0
        """Bytes of the current member, padding included, that were not read yet."""

    def __iter__(self) -> Iterator[_Member]:
        while True:
            self._skip()
            block = self._exactly(tarfile.BLOCKSIZE)
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                return
            except (tarfile.HeaderError, ValueError) as error:
                msg = f"a header is damaged: {error}"
                raise _Damage(msg) from error
            if not 0 <= info.size <= SKIPPED_BYTES:
                msg = f"the member {info.name[:80]!r} claims {info.size} bytes"
                raise _Damage(msg)
            self._left = -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            yield _Member(
                name=info.name,
                size=info.size,
                is_file=info.type in (tarfile.REGTYPE, tarfile.AREGTYPE),
                is_pinned=not info.mode & 0o200,
                seconds=max(0, min(int(info.mtime), _LAST_SECOND)),
            )

    def read(self, member: _Member) -> bytearray:
        """Return the content of the current member, once."""
        data = bytearray(self._exactly(member.size))
        self._left -= member.size
        return data

    def _skip(self) -> None:
        while self._left:
            self._left -= len(self._exactly(min(self._left, _CHUNK)))

    def _exactly(self, size: int) -> bytes:
        parts, left = [], size
        try:
            while left:
                part = self._stream.read(min(left, _CHUNK))
                if not part:
                    msg = "it ends too soon: it was cut short"
                    raise _Damage(msg)
                parts.append(part)
                left -= len(part)
        except zstandard.ZstdError as error:
            msg = f"it cannot be unpacked: {error}"
            raise _Damage(msg) from error
        return b"".join(parts)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Give the tar inside ``file``, and how many bytes of ``file`` were read so far."""
    with file.open("rb") as raw:
        magic = raw.read(len(_ZSTD_MAGIC))
        raw.seek(0)
        if magic != _ZSTD_MAGIC:
            yield raw, raw.tell
            return
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        with unpacker.stream_reader(cast("IO[bytes]", raw), closefd=False) as stream:
            yield cast("IO[bytes]", stream), raw.tell


@dataclass(frozen=True, slots=True)
class _Manifest:
    form: StoreFormat
    frames: Frames
    text: str
    layout: str
    spaces: Mapping[int, Mapping[str, Any]]
    roots: Mapping[int, BlockHash]
    keys_root: BlockHash | None
    generations: Mapping[str, int]


def _read_manifest(file: Path, members: _Members, first: _Member | None, target: Path) -> _Manifest:
    """Return what an archive says about itself, as the store at ``target`` understands it.

    Raises:
        StoreError: if it is not an archive, or one of a store with a secret that ``target`` lacks.
        LayoutMismatch: if the store at ``target`` is for something else.
    """
    what = f"{file} is not an archive of a store"
    if first is None or first.name != MANIFEST or not first.is_file:
        msg = f"{what}: its first member is {first.name[:80] if first else None!r}, expected {MANIFEST!r}"
        raise StoreError(msg)
    if first.size > MANIFEST_BYTES:
        msg = f"{what}: its manifest has {first.size} bytes, expected at most {MANIFEST_BYTES}"
        raise StoreError(msg)
    try:
        found = json.loads(members.read(first))
        archive, text = found["kvstore_archive"], found["format"]
        given = dict(found["namespaces"])
        generations, layout = dict(found.get("generations", {})), str(found.get("layout", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"{what}: its manifest is damaged: {error!r}"
        raise StoreError(msg) from error
    if type(archive) is not int or archive != ARCHIVE_VERSION:
        msg = f"{file} was written by another version: found archive version {archive!r}, expected {ARCHIVE_VERSION}"
        raise StoreError(msg)
    if not isinstance(text, str) or len(text) > FORMAT_BYTES:
        msg = f"{what}: its format is no text of up to {FORMAT_BYTES} bytes"
        raise StoreError(msg)
    form, frames = admin.parse_frames(text)
    if text != format_text(
        form.layout, form.block_tokens, form.key_bytes, form.ssd_formats, form.secret
    ):
        msg = f"{what}: its format is not spelled as a store spells it"
        raise StoreError(msg)
    secret = secret_of(target, text)
    spaces, roots = {}, {}
    for number, space in given.items():
        root = _root(form, space, secret) if isinstance(space, dict) else None
        if (
            isinstance(number, str)
            and number.isascii()
            and number.isdigit()
            and len(number) <= 10
            and root is not None
        ):
            names = () if form.key_bytes else _IDENTITY
            spaces[int(number)] = {name: space[name] for name in names} or dict(KEYS_NAMESPACE)
            roots[int(number)] = root
    lines = {_line(form, space, secret) for space in spaces.values()}
    newest = {line: value for line, value in generations.items() if line in lines}
    for value in newest.values():
        if type(value) is not int or not 0 <= value < LAST_GENERATION:
            msg = (
                f"{what}: its {MANIFEST} takes a namespace to generation {str(value)[:40]}, expected an "
                f"integer in [0, {LAST_GENERATION}), so that new weights can have a later one"
            )
            raise StoreError(msg)
    above = keys_root(secret) if form.key_bytes else None
    return _Manifest(form, frames, text, layout, spaces, roots, above, newest)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A block that is in the target or on its way there."""

    hash: BlockHash
    number: int
    root: BlockHash


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one prompt that live and die alike: a ``Chain``."""

    root: BlockHash
    space: int
    above: bytes
    """Keys of the blocks over them, end to end."""
    parent: BlockHash
    expires: int
    is_pinned: bool
    headers: list[Header] = field(default_factory=list)
    frames: list[bytearray] = field(default_factory=list)

    @property
    def path(self) -> bytes:
        """Keys of all blocks from the root on."""
        return self.above + b"".join(block_key(header.block_hash) for header in self.headers)

    @property
    def first(self) -> int:
        """Number of the first of them."""
        return len(self.above) // KEY_BYTES

    def key(self, number: int) -> BlockKey:
        """Key of block ``number``."""
        if number < self.first:
            return BlockKey(self.above[number * KEY_BYTES : (number + 1) * KEY_BYTES])
        return block_key(self.hash_of(number))

    def hash_of(self, number: int) -> BlockHash:
        """Hash of one of them."""
        return self.headers[number - self.first].block_hash

    def parent_hash(self, number: int) -> BlockHash:
        """Hash of what one of them hangs on."""
        return self.hash_of(number - 1) if number > self.first else self.parent

    def has_images(self, number: int) -> bool:
        """Say whether an image touches it."""
        return self.headers[number - self.first].has_images

    def continues(self, header: Header, member: _Member) -> bool:
        """Say whether a block is the next of them."""
        last = self.headers[-1]
        alike = (self.space, self.expires, self.is_pinned)
        return (
            header.number == last.number + 1
            and header.parent_hash == last.block_hash
            and alike == (header.namespace_id, member.seconds, member.is_pinned)
        )


class _Import:
    """One import: what is checked, and what becomes of it."""

    def __init__(self, manifest: _Manifest, store: OpenStore, index: KeyedIndex) -> None:
        self._manifest = manifest
        self._store = store
        self._owned = store.owner("imports")
        self._index = index
        self._run: _Run | None = None
        self._seen: dict[BlockKey, _Seen] = {}
        self.refused: Counter[str] = Counter()
        self.expired = 0
        self.blocks = 0

    def take(self, member: _Member, members: _Members) -> None:
        """Store one member's block, or count why not."""
        if not member.is_file or _NAME.fullmatch(member.name) is None:
            self.refused["name" if member.is_file else "type"] += 1
            return
        key = BlockKey(bytes.fromhex(member.name))
        if not member.size:
            self._use(key)
            return
        self.blocks += 1
        if member.size > self._manifest.frames.frame_bytes:
            self.refused["size"] += 1
            return
        frame = members.read(member)
        if 0 < member.seconds <= time.time():
            self.expired += 1
            return
        fault = self._fault(key, frame, member)
        if fault is not None:
            self.refused[fault] += 1

    def _fault(self, key: BlockKey, frame: bytearray, member: _Member) -> str | None:
        """Add a block to the run, or return why it is refused."""
        manifest = self._manifest
        fault = frame_fault(manifest.frames, memoryview(frame), key, keys_root=manifest.keys_root)
        if fault is not None:
            return fault
        header = manifest.frames.form_of(frame).header(memoryview(frame))
        assert header is not None
        root = manifest.roots.get(header.namespace_id)
        if root is None:
            return "namespace"
        if self._run is not None and len(self._run.headers) >= self._store.ssd.commit_blocks:
            self.finish()
        if self._run is None or not self._run.continues(header, member):
            self.finish()
            above = self._above(header, root)
            if isinstance(above, str):
                return above
            self._run = _Run(
                *(root, header.namespace_id, above, header.parent_hash),
                expires=member.seconds,
                is_pinned=member.is_pinned,
            )
        self._run.headers.append(header)
        self._run.frames.append(frame)
        self._seen.pop(key, None)
        self._seen[key] = _Seen(header.block_hash, header.number, root)
        if len(self._seen) > SEEN_BLOCKS:
            del self._seen[next(iter(self._seen))]
        return None

    def _above(self, header: Header, root: BlockHash) -> bytes | str:
        """Return the keys over a block, or why it hangs on nothing that is there."""
        if not header.number:
            return b"" if header.parent_hash == root else "identity"
        key = block_key(header.parent_hash)
        path = self._path(key, root)
        parent = None if path is None else self._seen.get(key) or self._stored(key)
        if path is None or parent is None:
            return "parent"
        expected = _Seen(header.parent_hash, header.number - 1, root)
        return path if parent == expected and len(path) == header.number * KEY_BYTES else "identity"

    def _path(self, key: BlockKey, root: BlockHash) -> bytes | None:
        """Return the keys from the root to a block that is stored or queued, None for another."""
        keys: list[BlockKey] = []
        above: BlockKey | None = key
        with self._store.context.lock:
            while above:
                keys.append(above)
                below = above
                above = self._index.parents.get(below)
                if above is None:
                    above = self._owned.queued_parent(below)
                    if above == root[:KEY_BYTES]:
                        break
        return None if above is None else b"".join(reversed(keys))

    def _stored(self, key: BlockKey) -> _Seen | None:
        """Return what the target knows of a block that came long ago, or was there before."""
        self._owned.flush()
        record, frame = self._store.ssd.record(key), self._store.ssd.frame(key)
        if record is None or frame is None:
            return None
        header = self._manifest.frames.form_of(frame).header(memoryview(frame))
        root = self._owned.namespaces.root(record.namespace_id)
        if header is None or root is None:
            return None
        return _Seen(header.block_hash, header.number, root)

    def finish(self) -> None:
        """Queue the run that was gathered."""
        run, self._run = self._run, None
        if run is None:
            return

        def encode(header: Header) -> bytearray:
            frame = run.frames[header.number - run.first]
            self._manifest.frames.form_of(frame).renumber(frame, header.namespace_id)
            return frame

        self._owned.store(
            *(run, self._manifest.spaces[run.space], encode, run.first),
            wait=BARRIER_SECONDS,
            ttl=run.expires - time.time() if run.expires else None,
            is_pinned=run.is_pinned,
        )

    def _use(self, key: BlockKey) -> None:
        """Make a block that came before the most recent one."""
        self.finish()
        context = self._store.context
        with context.lock:
            is_queued = self._owned.queued_parent(key) is not None
        if is_queued:
            self._owned.flush()
        with context.lock:
            if key not in self._index.parents:
                return
            path = self._path(key, BlockHash(b""))  # it is stored, as all that it hangs on
            assert path is not None
            segment = self._index.settle(self._index.match(path))
            tick = context.next_sequence()
            self._index.touch(segment, tick)
            self._owned.note_use(key, tick)

    def keep_generations(self) -> None:
        """Take over generations that are newer than what is recorded."""
        ssd = self._store.ssd
        newer = {
            line: newest
            for line, newest in self._manifest.generations.items()
            if generations.recorded(ssd, line) < newest
        }
        if newer:
            generations.record(ssd, newer)

    def result(self) -> dict[str, Any]:
        """Return what became of the blocks as plain JSON values."""
        metrics, ssd = self._store.metrics, self._store.ssd
        return {
            "archive_blocks": self.blocks,
            "imported_blocks": metrics.stored_blocks,
            "present_blocks": metrics.present_blocks,
            "expired_blocks": self.expired,
            "refused_members": self.refused.total(),
            "refused": dict(self.refused),
            "dropped_blocks": metrics.dropped_blocks.total(),
            "dropped": dict(metrics.dropped_blocks),
            "evicted_blocks": metrics.evicted_blocks["ssd"],
            "blocks": ssd.block_count,
            "live_bytes": ssd.live_bytes,
            "capacity_bytes": ssd.capacity_bytes,
        }


def import_store(file: Path, path: Path, ssd_bytes: str, progress: Progress) -> dict[str, Any]:
    """Store the blocks of an archive in the store at ``path``, which is made if there is none.

    Each block is verified, and refused and counted if it is not intact, not what its name says,
    or hangs on nothing that is there. What is there already stays: the first writer wins. Blocks
    come in the archive's order of use and are newer than all that was there before; where the cap
    is too small the oldest go. Where the archive is damaged the import ends, and keeps what it has;
    ``damage`` says so. ``progress(done, total)`` counts bytes of the file.

    Raises:
        ConfigError: for a size that cannot work.
        LayoutMismatch: if the store at ``path`` is for something else; it is left untouched.
        StoreBusy: if a process owns it.
        StoreError: if ``file`` is no archive, or the medium fails.
        OSError: if ``file`` cannot be read.

    Cost: memory of the write queue (256 MiB at most) and some 200 bytes a block of the target.
    """
    path = resolved(path)
    capacity, total = size_bytes(ssd_bytes, "--ssd-bytes"), file.stat().st_size
    damage: str | None = None
    with _opened(file) as (stream, position):
        members = _Members(stream)
        walk = iter(members)
        try:
            manifest = _read_manifest(file, members, next(walk, None), path)
        except _Damage as error:
            msg = f"{file} is not an archive of a store: {error}"
            raise StoreError(msg) from error
        index = KeyedIndex(Lru[Segment]())
        with admin.owned(
            path, index=index, capacity_bytes=capacity, format_text=manifest.text
        ) as store:
            work = _Import(manifest, store, index)
            try:
                if store.ssd.fact("layout") is None:
                    store.ssd.set_fact("layout", manifest.layout.encode(errors="replace")[:1024])
                work.keep_generations()
                try:
                    for count, member in enumerate(walk):
                        work.take(member, members)
                        if not count % READ_BATCH:
                            progress(position(), total)
                except _Damage as error:
                    damage = str(error)
                work.finish()
                store.flush()
                result = work.result()
            except MEDIUM_ERRORS as error:
                msg = f"the import into {path} stopped: {error}; what was stored stays"
                raise StoreError(msg) from error
    progress(total, total)
    return {"file": str(file), "path": str(path), "damage": damage, **result}
