"""Detection of file systems that are unsuitable for a store."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

_NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2"),
        *("gpfs", "beegfs", "glusterfs", "orangefs", "virtiofs"),
    }
)
"""Types whose mapped files and robust mutexes are not coherent between hosts. Source: LMDB's caveats."""
_LAYERED_TYPES = frozenset({"overlay", "aufs"})  # first writes copy files: docs/decisions/0020
_OCTAL = re.compile(r"\\([0-7]{3})")  # the kernel's escape of white space. Source: proc(5).


def check_file_system(path: Path) -> None:
    """Warn about a layered file system; raise ``ConfigError`` for a network one or FUSE (unreliable locks)."""
    kind = type_of(path)
    if kind in _NETWORK_TYPES or kind.startswith("fuse"):
        what = "FUSE" if kind.startswith("fuse") else "a network file system"
        raise ConfigError(
            f"{path} is on {what} ({kind}), expected a local disk, as a store is mapped and locked; "
            "choose another path, or open it with role='reader' if no process writes to it"
        )
    if kind in _LAYERED_TYPES:
        logger.warning(
            "%s is on %s, a container's own layer: it is removed with the container, and a reader that "
            "opened a store of its image does not see new blocks; use a volume",
            *(path, kind),
        )


def type_of(path: Path) -> str:
    """Return the type of the file system that ``path`` is on, empty if it is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return ""
    best, kind = "", ""
    resolved = str(path.resolve())
    for line in filter(None, mounts):
        # Names are bytes of any encoding, with any white space that the kernel does not escape.
        fields = [os.fsdecode(field) for field in line.split(b" ")]
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
        is_inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind
