"""Options of the adapter, and digests of object layouts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from typing_extensions import override

import kvstore
from kvstore.engine.options import options_of


@dataclass(kw_only=True, eq=False)  # LMCache sets attributes of its own on it
class KVStoreL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc] # the engine is not typed
    """Options in ``adapter_params``."""

    path: str
    ssd_bytes: int | str = "16GiB"
    sizes: int = 1
    queue_tasks: int = 1024
    revision: str
    tenant: str = ""
    secret: bool = False

    @classmethod
    @override
    def from_dict(cls, d: Mapping[str, Any]) -> KVStoreL2AdapterConfig:
        """Return checked options. Raises ``ConfigError``, a ``ValueError``."""
        config = options_of(cls, "adapter_params", d, "revision")
        kvstore.size_bytes(config.ssd_bytes, "ssd_bytes")
        return config

    def layout(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> bytes:
        """Return a digest of revision, tenant, shapes and dtypes, which the object key does not have."""
        facts = [[list(shape) for shape in shapes], [str(dtype) for dtype in dtypes]]
        owner = ["kvstore.lmcache.1", self.revision, self.tenant]
        return hashlib.sha256(json.dumps([owner, facts]).encode()).digest()

    def opaque_layout(self, size: int) -> bytes:
        """Return the layout of an object made by a serde, which is plain bytes."""
        return self.layout([[size]], ["torch.uint8"])

    @classmethod
    @override
    def help(cls) -> str:
        """Return a description of the parameters."""
        return (
            "kvstore L2 adapter fields:\n"
            "- path (str): directory of the stores, on a local disk (required)\n"
            "- ssd_bytes (int or text such as '16GiB'): cap of all files together (default 16GiB)\n"
            "- sizes (int): different object sizes to expect; each gets an equal share of the cap "
            "(default 1)\n"
            "- queue_tasks (int): tasks that may wait (default 1024)\n"
            "- revision (str): digest or revision of weights and config, or 'unchecked' (required); "
            "another one never hits\n"
            "- tenant (str): keeps users of one directory apart"
        )
