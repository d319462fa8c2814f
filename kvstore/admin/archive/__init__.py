"""Archives: blocks of a store as one file, a tar of frames. docs/format.md, section 7, is normative.

``exporting`` writes one, ``importing`` reads one into a store; ``manifest`` is its first member, ``tar`` the
container. Export and import both verify blocks. No name in an archive is used as a path.
"""

from __future__ import annotations

from kvstore.admin.archive.exporting import export_store
from kvstore.admin.archive.importing import import_store
from kvstore.admin.archive.manifest import ARCHIVE_VERSION

__all__ = ["ARCHIVE_VERSION", "export_store", "import_store"]
