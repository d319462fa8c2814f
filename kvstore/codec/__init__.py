"""Codecs: the values of entries to bytes and back, one codec per layer group.

This package knows numbers and bytes. It knows no tokens, no blocks and no tier. Importing it loads
the C kernels but not torch.
"""

from __future__ import annotations

from kvstore.codec import native
from kvstore.codec.packed import Kernel, PackedCodec
from kvstore.codec.protocol import Codec
from kvstore.codec.raw import DTYPES, RawCodec
from kvstore.errors import ConfigError
from kvstore.layout import LayerGroup

_PACKED = (*native.FP4_FORMATS, *native.FP8_FORMATS)
__all__ = ["Codec", "codec_for"]


def codec_for(group: LayerGroup) -> Codec:
    """Return the codec of a group's entry format.

    Raises:
        ConfigError: for a format that kvstore stores as bytes but cannot encode or decode.
    """
    if group.entry_format in DTYPES:
        return RawCodec(group)
    if group.entry_format in _PACKED:
        return PackedCodec(group, Kernel(group.entry_format, group.scale_rule))
    known = ", ".join([*DTYPES, *_PACKED])
    raise ConfigError(
        f"group {group.name!r}: entry format {group.entry_format!r} has no codec, "
        f"expected one of {known}; its entries can be stored and read as bytes"
    )
