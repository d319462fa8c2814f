"""Errors of the medium by kind: damage of the file, transient conditions, and lack of space."""

from __future__ import annotations

import errno

import lmdb

DAMAGE = (
    *(lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError),
    *(lmdb.PanicError, lmdb.IncompatibleError, lmdb.NotFoundError, lmdb.BadValsizeError),
    *(lmdb.BadTxnError, lmdb.BadDbiError, lmdb.PageFullError, lmdb.CursorFullError),
)
"""Errors of a damaged file. Other LMDB errors (memory, space, descriptors) concern the machine: the store is kept."""
_TRANSIENT = (lmdb.ReadersFullError, lmdb.TlsFullError, lmdb.MapResizedError, lmdb.BadRslotError)
_TRANSIENT_CODES = frozenset(
    {
        *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.EBUSY),
        *(errno.ENOLCK, errno.ETIMEDOUT, errno.ESTALE),
    }
)
"""Slots, memory, descriptors and locks in use by others, and a server that does not answer."""
MEDIUM_ERRORS = (lmdb.Error, OSError)
"""All errors of the medium. Any other exception is a programming error and is not caught as one."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Codes of a full disk, a full quota, and a file of the largest size."""


def is_map_full(error: BaseException) -> bool:
    """Return whether a write found no free page in the map: nothing was written, nothing is damaged."""
    return isinstance(error, lmdb.MapFullError)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later, and no data is damaged."""
    return isinstance(error, _TRANSIENT) or code_of(error) in _TRANSIENT_CODES


def remedy(error: BaseException) -> str:
    """Return the advice for a reader whose read failed with ``error``."""
    if is_transient(error):
        return "try again when readers, memory or descriptors are free again"
    return "its owner repairs it at its next open"


def code_of(error: BaseException) -> int:
    """Return the system error code of ``error``, 0 for none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, lmdb.DiskError):
        return errno.ENOSPC
    return int(getattr(error, "code", 0))
