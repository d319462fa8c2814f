"""The secret of a store: 32 random bytes in a file of its directory; block hashes depend on it."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Literal

from kvstore.errors import ConfigError, LayoutMismatch, StoreError
from kvstore.identity.hash import secret_fingerprint
from kvstore.tier.ssd.directory import prepare, refuse_links, require_store, tighten
from kvstore.tier.ssd.files import LOOK, SECRET_FILE, VERSION_FILE, write_file
from kvstore.tier.ssd.opening import BIRTH_SECONDS
from kvstore.tier.ssd.owner_lock import busy, try_lock
from kvstore.tier.ssd.version_file import has_format, read_format

SECRET_BYTES = 32  # as long as the digests that use it. Source: RFC 2104, section 3.
_RESTORE = "restore the secret of this store or archive, without which no block is found, or use another path"


def secret_for(
    path: Path, role: Literal["auto", "owner", "reader"], *, is_wanted: bool
) -> bytes | None:
    """Return the secret of the store at ``path``, created for a new store; None if none is wanted.

    Raises:
        LayoutMismatch: if the store has a secret and none is wanted, or vice versa.
        ConfigError: if ``path`` cannot be a store's, or other users may read the secret.
        StoreBusy: if another process owns the directory and does not create the store in time.
        StoreError: if the secret is missing or not that of the store.
    """
    deadline = time.monotonic() + BIRTH_SECONDS
    try:
        while not (path / VERSION_FILE).exists():
            if not is_wanted:
                return None
            if role == "reader":
                require_store(path)
            prepare(path)
            if _make_secret(path):
                return _read_secret(path)
            if time.monotonic() > deadline:
                raise busy(path)
            time.sleep(0.02)
        named = _fingerprint_in(read_format(path))
        if named is not None and bool(named) != is_wanted:
            has, other = ("a", "with") if named else ("no", "without")
            raise LayoutMismatch(
                f"{path} has {has} secret that its hashes depend on: open it {other} secret=True, or "
                "use another path; it was left untouched"
            )
        return _secret_named(path, named) if is_wanted else None
    except OSError as error:
        if not is_wanted:
            return None  # the opening fails with the same error, and reports more
        msg = f"the secret of {path} cannot be created: {error.strerror}; free disk space or use another path"
        raise StoreError(msg) from error


def secret_of(path: Path, text: str) -> bytes | None:
    """Return the secret of a store of format ``text``, which may not exist yet; None if it has none.

    Raises:
        LayoutMismatch: if the store at ``path`` has another format.
        ConfigError, StoreError: as ``secret_for``.
    """
    has_format(path, text)
    named = _fingerprint_in(text)
    return _secret_named(path, named) if named else None


def _fingerprint_in(text: str) -> str | None:
    """Return the fingerprint in a format text, empty for no secret; None if the text is damaged."""
    try:
        return str(json.loads(text).get("secret", ""))
    except (ValueError, AttributeError, RecursionError):
        return None


def _secret_named(path: Path, named: str | None) -> bytes:
    secret = _read_secret(path)
    if named is not None and secret_fingerprint(secret) != named:
        raise StoreError(
            f"{path / SECRET_FILE} is another secret: its fingerprint is "
            f"{secret_fingerprint(secret)[:16]}, expected {named[:16]}; {_RESTORE}"
        )
    return secret


def _make_secret(path: Path) -> bool:
    """Create the secret of a new store; False if another process owns the directory and created none yet.

    An existing secret is kept: it was placed there to import an archive, or left by a process killed at creation.
    """
    if (path / SECRET_FILE).exists():
        return True
    lock = try_lock(path)
    if lock is None:
        return False
    try:
        if not (path / SECRET_FILE).exists() and not (path / VERSION_FILE).exists():
            write_file(path, SECRET_FILE, os.urandom(SECRET_BYTES))
    finally:
        os.close(lock)
    return True


def _read_secret(path: Path) -> bytes:
    """Return the secret of a store. It is never created here: with a new one no block would be found.

    Raises:
        ConfigError: if the file belongs to another user, is accessible to others, or is not a regular file.
        StoreError: if it is missing or has another size.
    """
    tighten(path)
    file = path / SECRET_FILE
    try:
        fd = os.open(file, LOOK)
    except FileNotFoundError as error:
        msg = f"{file} is missing, the secret that hashes depend on: {_RESTORE}"
        raise StoreError(msg) from error
    except OSError as error:
        refuse_links(path)
        msg = f"{file} cannot be read: {error.strerror}; let this user read it, or use another path"
        raise StoreError(msg) from error
    try:
        refuse_links(path)
        facts, owner = os.fstat(fd), path.stat().st_uid
        if facts.st_uid != owner:
            msg = f"{file} belongs to user id {facts.st_uid}, expected {owner}, the owner of the directory: {_RESTORE}"
            raise ConfigError(msg)
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = stat.S_IMODE(facts.st_mode)
            msg = f"{file} is accessible to others (mode {mode:04o}); run chmod 600 on it, unless they may know it"
            raise ConfigError(msg)
        secret = os.read(fd, SECRET_BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != SECRET_BYTES:
        raise StoreError(f"{file} has {facts.st_size} bytes, expected {SECRET_BYTES}: {_RESTORE}")
    return secret
