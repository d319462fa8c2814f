"""The directory of a store: who owns it, what it is for, its secret, and how a broken one is set aside.

It knows names, permissions and locks. It never opens the database.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from kvstore.errors import ConfigError, LayoutMismatch, StoreBusy, StoreError
from kvstore.frame.header import FORMAT_VERSION

logger = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
LOCK_FILE = "owner.lock"
_MAP_LOCK_FILE = "lock.mdb"
VERSION_FILE = "VERSION"
SECRET_FILE = "secret"  # noqa: S105 - the name of a file
SECRET_BYTES = 32
"""As long as the digests that are made under it. Source: RFC 2104, section 3."""
_PARTIAL_SECRET = "secret.partial"  # noqa: S105
_PARTIAL_FILE = "VERSION.partial"
"""``VERSION`` while it is written: left behind by a process that was killed just then."""
_FILES = (DATA_FILE, _MAP_LOCK_FILE, LOCK_FILE, VERSION_FILE, SECRET_FILE)
FORMAT_BYTES = 16 << 10
"""Largest text of a format: 5,000 layers. Laying out a frame costs their square."""
_FIRST_LINE = f"kvstore {FORMAT_VERSION}"
_COPY_FOLDER = "compacting"
"""Where a compacted copy is made: inside the store, as a rename must stay in one file system."""
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2"),
        *("gpfs", "beegfs", "glusterfs", "orangefs", "virtiofs"),
    }
)
"""Where mapped files and robust mutexes of several hosts do not agree. Source: LMDB's caveats."""
_LAYERED_FILE_SYSTEMS = frozenset({"overlay", "aufs"})
"""Where a file of a lower layer becomes another file when it is first written. docs/decisions/0020."""

_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How to open what may be anything: a pipe would be waited for, a link leads away."""
_LOCK_ATTEMPTS, _LOCK_PAUSE_SECONDS = 3, 0.01
"""``owner_pid`` holds a shared lock for a moment, which must not pass for an owner."""
_OCTAL = re.compile(r"\\([0-7]{3})")
"""How the kernel spells blanks, tabs, newlines and backslashes. Source: proc(5), mangle_path."""
_ASIDE = re.compile(r"\.bad-\d{8}T\d{6}")
"""What ``set_aside`` puts behind a store's name."""


def prepare(path: Path) -> None:
    """Make sure that ``path`` is a private directory that is a store or may become one.

    Raises:
        ConfigError: if it is a file, someone else's, writable by others, on a network or behind FUSE,
            or one of its files is a link.
        StoreError: if it holds something that is not a store. Nothing is touched.
    """
    if path.exists() and not path.is_dir():
        msg = f"{path} is a file, expected a directory for the store; choose another path"
        raise ConfigError(msg)
    _check_file_system(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in made:
            _sync(folder.parent)
    except OSError as error:
        msg = f"{path} cannot be created: {error.strerror}; choose a path you can write to"
        raise ConfigError(msg) from error
    owner = path.stat().st_uid
    if owner != os.geteuid():
        msg = (
            f"{path} belongs to user id {owner}, expected {os.geteuid()}, as whom this process runs; "
            f"run chown -R {os.geteuid()} on it, or use a directory of your own, in it if you may write there"
        )
        raise ConfigError(msg)
    refuse_links(path)
    require_store_or_empty(path)
    tighten(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        msg = (
            f"{path} is writable by others (mode {mode:04o}), expected a directory of the store's own; "
            "run chmod 700 on it, or use another path"
        )
        raise ConfigError(msg)
    _refuse_others_files(path)


def tighten(path: Path) -> None:
    """Take back what others may do in a store of our own, as where Kubernetes gave it to a group.

    ``fsGroup`` lets a group read and write everything in a volume, anew with each mount. A directory
    for everybody stays as it is unless it is a store: it may be anyone's.
    """
    with suppress(FileNotFoundError):
        facts = path.stat()
        shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_ours = facts.st_uid == os.geteuid() and not facts.st_mode & stat.S_ISVTX
        is_known = not facts.st_mode & stat.S_IWOTH or (path / VERSION_FILE).exists()
        if not (shared and is_ours and is_known):
            return
        path.chmod(stat.S_IMODE(facts.st_mode) & ~0o077)
        for name in _FILES:
            with suppress(FileNotFoundError):
                found = (path / name).lstat()
                if stat.S_ISREG(found.st_mode) and found.st_uid == facts.st_uid:
                    (path / name).chmod(0o600)
        message = "%s was writable by others (mode %04o): it is private again, its files too"
        logger.warning(message, path, stat.S_IMODE(facts.st_mode))


def _refuse_others_files(path: Path) -> None:
    """Raise ``ConfigError`` if a file of our store is someone else's, who may change it at any time."""
    for name in _FILES:
        with suppress(FileNotFoundError):
            owner = (path / name).lstat().st_uid
            if owner != os.geteuid():
                msg = (
                    f"{path / name} belongs to user id {owner}, expected {os.geteuid()}, whose directory "
                    f"it is; run chown {os.geteuid()} on it if you know how it came, or use another path"
                )
                raise ConfigError(msg)


def _check_file_system(path: Path) -> None:
    """Refuse to own a store where its locks and maps do not hold; warn where they may not."""
    kind = file_system(path)
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        what = "FUSE" if kind.startswith("fuse") else "a network file system"
        msg = (
            f"{path} is on {what} ({kind}), expected a local disk, as a store is mapped and locked; "
            "choose another path, or open it with role='reader' if nobody writes to it"
        )
        raise ConfigError(msg)
    if kind in _LAYERED_FILE_SYSTEMS:
        logger.warning(
            "%s is on %s, a container's own layer: it goes with the container, and a reader that "
            "opened a store of its image does not see what is stored; use a volume",
            *(path, kind),
        )


def refuse_links(path: Path) -> None:
    """Raise ``ConfigError`` if a file of a store is there but no plain file: it may lead anywhere."""
    for name in _FILES:
        with suppress(FileNotFoundError):
            mode = (path / name).lstat().st_mode
            if not stat.S_ISREG(mode):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                msg = (
                    f"{path / name} is {what}, expected a file of the store's own; link the directory "
                    "instead, or choose another path"
                )
                raise ConfigError(msg)


def require_store_or_empty(path: Path) -> None:
    """Raise ``StoreError`` if ``path`` holds files but is no store."""
    if not (path / VERSION_FILE).exists():
        known = {LOCK_FILE, _PARTIAL_FILE, SECRET_FILE, _PARTIAL_SECRET}
        names = (item.name for item in path.iterdir())
        strangers = sorted(n for n in names if n not in known and not _is_aside(path, n))
        # Looked at again: another process may have become its owner and made the store just now.
        if strangers and not (path / VERSION_FILE).exists():
            msg = f"{path} is not a kvstore store: it has no {VERSION_FILE} file but holds {strangers[0]!r}; choose a new or empty directory"
            raise StoreError(msg)


def require_store(path: Path) -> None:
    """Raise ``StoreError`` unless ``path`` is a store."""
    if not path.exists():
        msg = f"no store at {path}: there is no such directory"
        raise StoreError(msg)
    if not path.is_dir():
        msg = f"{path} is a file, expected a store's directory"
        raise StoreError(msg)
    if not (path / VERSION_FILE).exists() or not (path / DATA_FILE).exists():
        msg = f"{path} is not a kvstore store: it has no {VERSION_FILE} and {DATA_FILE}"
        below = sorted(item.parent.name for item in path.glob(f"*/{VERSION_FILE}"))
        if below:
            msg += f"; there are stores in it: {', '.join(below)}"
        raise StoreError(msg)


def read_format(path: Path) -> str:
    """Return the text that describes the layout of a store, its ``VERSION`` file's second line.

    Raises:
        ConfigError: if a file of the store is no plain file.
        StoreError: if the file is damaged or of another version.
    """
    refuse_links(path)  # a pipe would be read for ever
    most = len(_FIRST_LINE) + FORMAT_BYTES + len("\n\n")
    try:
        with (path / VERSION_FILE).open("rb") as file:
            text = file.read(most + 1)
        lines = text.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path / VERSION_FILE} cannot be read: {error}"
        raise StoreError(msg) from error
    if len(text) > most:
        msg = f"{path / VERSION_FILE} is damaged: it has more than {most} bytes, the most that a format takes"
        raise StoreError(msg)
    if len(lines) != 2 or lines[0] != _FIRST_LINE:
        found = lines[0][:40] if lines else "an empty file"
        msg = (
            f"{path} was written by another version: found {found!r}, expected {_FIRST_LINE!r}; "
            "use another path or remove the directory"
        )
        raise StoreError(msg)
    return lines[1]


def has_format(path: Path, format_text: str) -> bool:
    """Say whether there is a store for ``format_text``, or raise ``LayoutMismatch`` if for another."""
    if not (path / VERSION_FILE).exists():
        return False
    found = read_format(path)
    if found != format_text:
        msg = (
            f"{path} holds blocks of another layout and was left untouched: "
            f"{_difference(found, format_text)}. Use another path for this one."
        )
        raise LayoutMismatch(msg)
    return True


def claim_format(path: Path, format_text: str) -> None:
    """Record what a new store is for, or raise ``LayoutMismatch`` if an old one is for another."""
    if not has_format(path, format_text):
        if len(format_text.encode()) > FORMAT_BYTES:
            msg = (
                f"the layout takes {len(format_text.encode())} bytes to write down, expected at most "
                f"{FORMAT_BYTES}: join groups, or give them shorter names"
            )
            raise ConfigError(msg)
        # Before there is a database: one without its VERSION is nobody's store.
        _write(path, VERSION_FILE, _PARTIAL_FILE, f"{_FIRST_LINE}\n{format_text}\n".encode())


def _write(path: Path, name: str, partial_name: str, content: bytes) -> None:
    """Give a store a small file, durably: all of it or none. Its owner's business alone."""
    partial = path / partial_name
    _clear(partial)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / name)
    _sync(path)


def make_secret(path: Path) -> bool:
    """See to it that a new store has a secret; False if another process owns it and made none yet.

    One that is there already stays: put there to import an archive, or left by a process that was
    killed before it made the store.
    """
    if (path / SECRET_FILE).exists():
        return True
    lock = try_lock(path)
    if lock is None:
        return False
    try:
        if not (path / SECRET_FILE).exists() and not (path / VERSION_FILE).exists():
            _write(path, SECRET_FILE, _PARTIAL_SECRET, os.urandom(SECRET_BYTES))
    finally:
        os.close(lock)
    return True


def read_secret(path: Path) -> bytes:
    """Return the secret of a store. It is never made here: another one would find no block.

    Raises:
        ConfigError: if the file is someone else's, open to others, or no plain file.
        StoreError: if it is missing or no secret.
    """
    tighten(path)
    file = path / SECRET_FILE
    anew = "put back the one that the store, or the archive, is of, or use another path: none finds its blocks but that"
    try:
        fd = os.open(file, _LOOK)
    except FileNotFoundError as error:
        msg = f"{file} is missing, the secret that hashes are made under: {anew}"
        raise StoreError(msg) from error
    except OSError as error:
        refuse_links(path)
        msg = f"{file} cannot be read: {error.strerror}; let this user read it, or use another path"
        raise StoreError(msg) from error
    try:
        refuse_links(path)
        facts, owner = os.fstat(fd), path.stat().st_uid
        if facts.st_uid != owner:
            msg = f"{file} belongs to user id {facts.st_uid}, expected {owner}, whose directory it is: {anew}"
            raise ConfigError(msg)
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(facts.st_mode)
            msg = f"{file} is open to others (mode {mode:04o}); run chmod 600 on it, unless they may know it"
            raise ConfigError(msg)
        secret = os.read(fd, SECRET_BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != SECRET_BYTES:
        msg = f"{file} has {facts.st_size} bytes, expected {SECRET_BYTES}: {anew}"
        raise StoreError(msg)
    return secret


def sync_names(path: Path) -> None:
    """Make the names of a store's files, and its own, survive power loss: no sync of a file does."""
    _sync(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Sync a directory, unless it is one that this user may not read or that knows no sync."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


_SHOWN = 200
"""Characters of a format that makes no sense."""


def _difference(found: str, expected: str) -> str:
    """Say in what two formats differ, the fingerprint apart, which follows from the rest."""
    try:
        a, b = json.loads(found), json.loads(expected)
        names = [name for name in {**a, **b} if name not in ("fingerprint", "groups")]
        pairs = [(name, a.get(name), b.get(name)) for name in names]
        groups = [{group["name"]: group for group in each["groups"]} for each in (a, b)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"found {found[:_SHOWN]!r}, expected {expected}"
    pairs.append(("groups", sorted(groups[0]), sorted(groups[1])))
    for name in (name for name in groups[0] if name in groups[1]):
        one, other = groups[0][name], groups[1][name]
        pairs += [(f"{name}: {key}", value, other.get(key)) for key, value in one.items()]
    parts = [f"found {name} {x}, expected {y}" for name, x, y in pairs if x != y]
    return "; ".join(parts) or f"found fingerprint {a['fingerprint']}, expected {b['fingerprint']}"


def try_lock(path: Path) -> int | None:
    """Become the owner: return a descriptor that holds the lock, or None if another process does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path / LOCK_FILE, flags, 0o600)
    try:
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_ATTEMPTS - 1:
                    os.close(fd)
                    return None
                time.sleep(_LOCK_PAUSE_SECONDS)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def owner_pid(path: Path) -> int | None:
    """Return the process that owns the store now, None if nobody does."""
    try:
        fd = os.open(path / LOCK_FILE, _LOOK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
    return None


def busy(path: Path) -> StoreBusy:
    """Return the error that names the owner."""
    pid = owner_pid(path) or "unknown"
    msg = f"{path} is owned by process {pid}; open it with role='reader' or stop that process"
    return StoreBusy(msg)


def set_aside(path: Path) -> Path:
    """Rename a broken store to ``<name>.bad-<time>``, keep only that one, and return where it is.

    Its secret, if it has one, is in both: a broken database is no reason to change it.
    A directory that cannot be renamed, such as a mount point, gets it as a subdirectory.
    """
    for folder in (path.parent, path):
        with suppress(OSError):
            for older in [item for item in folder.iterdir() if _is_aside(path, item.name)]:
                shutil.rmtree(older, ignore_errors=True)
    name = f"{path.name}.bad-{time.strftime('%Y%m%dT%H%M%S')}"
    target = path.with_name(name)
    try:
        path.rename(target)
    except OSError:
        target = path / name
        target.mkdir(mode=0o700)
        for item in (DATA_FILE, _MAP_LOCK_FILE, VERSION_FILE):
            if (path / item).exists():
                (path / item).rename(target / item)
        _copy_secret(path, target)
        return target
    path.mkdir(mode=0o700)
    _copy_secret(target, path)
    return target


def _copy_secret(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        _write(target, SECRET_FILE, _PARTIAL_SECRET, (source / SECRET_FILE).read_bytes())


def _is_aside(path: Path, name: str) -> bool:
    start, rest = name[: len(path.name)], name[len(path.name) :]
    return start == path.name and _ASIDE.fullmatch(rest) is not None


def file_system(path: Path) -> str:
    """Return the type of the file system that ``path`` is on, empty where that is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return ""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in filter(None, mounts):
        # Names are bytes, of any encoding and with white space of every kind but these.
        fields = [os.fsdecode(field) for field in line.split(b" ")]
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind


# ---- exchanging the data file --------------------------------------------------------------------


def new_copy_folder(path: Path) -> Path:
    """Return an empty private folder in a store for a copy of its data file."""
    sweep(path)
    folder = path / _COPY_FOLDER
    folder.mkdir(mode=0o700)
    return folder


def sweep(path: Path) -> None:
    """Remove the copy that a process left behind which was killed while it compacted.

    Only the owner may: the copy is its own.
    """
    _clear(path / _COPY_FOLDER)


def _clear(place: Path) -> None:
    """Remove what is at a place that is the owner's alone, whatever it is; follow no link."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(place.lstat().st_mode):
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink()


def open_map_lock(path: Path) -> int:
    """Return a descriptor of the lock file of the database, for ``try_alone``.

    Closing it drops every lock that this process has on the file, those of LMDB too: it must stay
    open while the database is.
    """
    return os.open(path / _MAP_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def try_alone(path: Path, map_lock: int) -> None:
    """Keep other processes from opening the database until ``let_in``.

    Each process that has it open holds the first byte of its lock file, shared, and takes that
    before it reads. Source: ``mdb_env_setup_locks`` of LMDB 0.9.

    Raises:
        StoreBusy: if one has it open.
    """
    try:
        fcntl.lockf(map_lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except (BlockingIOError, PermissionError) as error:
        msg = f"{path} is open in another process that reads it; close it there first"
        raise StoreBusy(msg) from error


def let_in(map_lock: int, *, is_open: bool) -> None:
    """Let others open the database again; ``is_open`` keeps what LMDB holds in this process."""
    fcntl.lockf(map_lock, fcntl.LOCK_SH if is_open else fcntl.LOCK_UN, 1, 0)


def exchange(path: Path, folder: Path) -> None:
    """Put the data file in ``folder`` in place of the store's own: the old one or the new, never less.

    LMDB makes a copy as the user's umask has it.
    """
    (folder / DATA_FILE).chmod(0o600)
    (folder / DATA_FILE).replace(path / DATA_FILE)
    _sync(path)
