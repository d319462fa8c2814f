"""Codecs: encode the values of entries to bytes and decode them, one codec per layer group.

Start with ``protocol``, then ``raw`` and ``quantized``. Imports ``layout`` and the C kernels, not torch; called
by ``frame`` and the device tier.
"""

from __future__ import annotations

from kvstore.codec import native
from kvstore.codec.protocol import Codec
from kvstore.codec.quantized import Kernel, QuantizedCodec
from kvstore.codec.raw import DTYPES, RawCodec
from kvstore.errors import ConfigError
from kvstore.layout import LayerGroup

_QUANTIZED = (*native.FP4_FORMATS, *native.FP8_FORMATS)
__all__ = ["Codec", "codec_for"]


def codec_for(group: LayerGroup) -> Codec:
    """Return the codec of a group's entry format. Raises ``ConfigError`` for a format without one."""
    if group.entry_format in DTYPES:
        return RawCodec(group)
    if group.entry_format in _QUANTIZED:
        return QuantizedCodec(group, Kernel(group.entry_format, group.scale_rule))
    known = ", ".join([*DTYPES, *_QUANTIZED])
    raise ConfigError(
        f"group {group.name!r}: entry format {group.entry_format!r} has no codec, "
        f"expected one of {known}; its entries can be stored and read as bytes"
    )
