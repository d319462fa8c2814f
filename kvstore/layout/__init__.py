"""What a model caches: its layer groups as values, and the layouts of models that configs describe."""

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
