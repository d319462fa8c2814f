"""Old module names, importable with a ``DeprecationWarning`` that names the new module. See docs/upgrade.md."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

MOVED = {
    "kvstore.assembly": "kvstore.cache.prefix_cache",
    "kvstore.block": "kvstore.identity.block",
    "kvstore.block_store": "kvstore.blocks.block_store",
    "kvstore.hash": "kvstore.identity.hash",
    "kvstore.namespace": "kvstore.identity.namespace",
    "kvstore.pages": "kvstore.tier.engine_pages",
    "kvstore.presets": "kvstore.layout.presets",
    "kvstore.replay": "kvstore.layout.replay",
}
REMOVED_IN = "0.3"


class _MovedModules(MetaPathFinder, Loader):
    """Finds a moved module. It is last in the path, so it is not used for imports that succeed without it."""

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        message = f"{name} is now {MOVED[name]}; {REMOVED_IN} removes the old name"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self)

    @override
    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])


def install() -> None:
    """Make the old names importable."""
    sys.meta_path.append(_MovedModules())
