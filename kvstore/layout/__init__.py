"""Layouts: layer groups of a model's cache, with their entry formats and lifetimes.

Start with ``values``; ``source`` makes layouts of configs by the rules in ``models``. Imports ``identity``,
``checks`` and ``errors``; imported by ``codec``, ``frame`` and all above.
"""

from kvstore.layout.source import from_config, layout
from kvstore.layout.values import (
    DTYPE_FORMATS,
    FORMATS,
    SCALE_RULES,
    EntryFormat,
    LayerGroup,
    Layout,
    Lifetime,
)

__all__ = [
    "DTYPE_FORMATS",
    "FORMATS",
    "SCALE_RULES",
    "EntryFormat",
    "LayerGroup",
    "Layout",
    "Lifetime",
    "from_config",
    "layout",
]
