"""Types of the C module. kvstore_native.h is the reference."""

from typing import Any

class CData:
    """A C pointer, struct or number."""

    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __add__(self, items: int) -> CData: ...

class PackStats(CData):
    """A ``struct kvstore_pack_stats *``; cffi reads its fields through the pointer."""

    nan_blocks: int
    inf_values: int

class PackError(CData):
    """A ``struct kvstore_pack_error *``."""

    difference: float
    value: float

class Tree(CData):
    """A ``struct kvstore_tree``."""

    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int

class TreeLevel(CData):
    """A ``struct kvstore_tree_level *``."""

    key: CData
    key_bytes: int

class TreeWalk(CData):
    """A ``struct kvstore_tree_walk *``."""

    file: int
    pages: int
    transaction: int
    used: CData
    used_pages: int
    below: CData
    values: CData
    named: Any
    below_room: int
    value_room: int
    named_room: int
    below_count: int
    value_count: int
    named_count: int
    entries: int
    page: int

class FFI:
    """The part of cffi's FFI object that kvstore uses."""

    NULL: CData
    errno: int

    def cast(self, ctype: str, value: int | CData) -> CData: ...
    def new(self, ctype: str, init: object = None) -> Any: ...
    def memmove(self, target: CData, source: bytes, size: int) -> None: ...
    def buffer(self, data: CData, size: int) -> Any: ...
    def sizeof(self, ctype: str) -> int: ...
    def from_buffer(self, ctype: str, buffer: object, require_writable: bool = False) -> Any: ...

class Lib:
    """The functions and constants of kvstore_native.h."""

    KVSTORE_OK: int
    KVSTORE_ERR_DTYPE: int
    KVSTORE_ERR_FORMAT: int
    KVSTORE_ERR_RULE: int
    KVSTORE_ERR_GLOBAL_SCALE: int
    KVSTORE_ERR_SHAPE: int
    KVSTORE_ERR_NULL: int
    KVSTORE_ERR_STRIDE: int
    KVSTORE_ERR_OVERLAP: int
    KVSTORE_ERR_LEVEL: int
    KVSTORE_ERR_ALIGN: int
    KVSTORE_ERR_INDEX: int
    KVSTORE_ERR_SUM: int
    KVSTORE_ERR_RANGE: int
    KVSTORE_INT32: int
    KVSTORE_UINT32: int
    KVSTORE_INT64: int
    KVSTORE_UINT64: int
    KVSTORE_TREE_VALUES: int
    KVSTORE_TREE_NAMED: int
    KVSTORE_TREE_FREE: int
    KVSTORE_TREE_READ: int
    KVSTORE_TREE_CUT: int
    KVSTORE_TREE_USE: int
    KVSTORE_TREE_KIND: int
    KVSTORE_TREE_FORM: int
    KVSTORE_TREE_ORDER: int
    KVSTORE_TREE_NODE: int
    KVSTORE_TREE_LIST: int
    KVSTORE_TREE_COUNTERS: int
    KVSTORE_F32: int
    KVSTORE_F16: int
    KVSTORE_BF16: int
    KVSTORE_NVFP4: int
    KVSTORE_MXFP4: int
    KVSTORE_MXFP8: int
    KVSTORE_FP8: int
    KVSTORE_RULE_V41: int
    KVSTORE_RULE_TORCHAO: int
    KVSTORE_RULE_FLOOR: int
    KVSTORE_RULE_EVEN: int
    KVSTORE_RULE_RCEIL: int
    KVSTORE_RULE_AMAX: int
    KVSTORE_LEVEL_PORTABLE: int
    KVSTORE_LEVEL_AVX2: int
    KVSTORE_LEVEL_AVX512: int

    def kvstore_native_version(self) -> int: ...
    def kvstore_level(self) -> int: ...
    def kvstore_codec_bytes(self) -> int: ...
    def kvstore_codec_prepare(
        self,
        codec: CData,
        dtype: int,
        entry_format: int,
        rule: int,
        global_scale: float,
        level: int,
        streamed_bytes: int,
        /,
    ) -> int: ...
    def kvstore_pack(
        self,
        codec: CData,
        values: CData,
        rows: int,
        row_values: int,
        value_stride: int,
        codes: CData,
        code_stride: int,
        scales: CData,
        scale_stride: int,
        stats: CData,
        error: CData,
        /,
    ) -> int: ...
    def kvstore_unpack(
        self,
        codec: CData,
        codes: CData,
        code_stride: int,
        scales: CData,
        scale_stride: int,
        rows: int,
        row_values: int,
        values: CData,
        value_stride: int,
        /,
    ) -> int: ...
    def kvstore_gather(
        self,
        codec: CData,
        entries: CData,
        index: CData,
        rows: int,
        row_values: int,
        values: CData,
        value_stride: int,
        /,
    ) -> int: ...
    def kvstore_block_hashes(
        self,
        root: CData,
        tokens: CData,
        blocks: int,
        block_tokens: int,
        level: int,
        digests: CData,
        /,
    ) -> int: ...
    def kvstore_identify(
        self,
        root: CData,
        tokens: CData,
        kind: int,
        count: int,
        block_tokens: int,
        level: int,
        ids: CData,
        digests: CData,
        /,
    ) -> int: ...
    def kvstore_xxh3_64(self, data: CData, size: int, level: int, total: CData, /) -> int: ...
    def kvstore_read_part(
        self,
        part: CData,
        part_bytes: int,
        total: int,
        segments: CData,
        count: int,
        level: int,
        streamed_bytes: int,
        /,
    ) -> int: ...
    def kvstore_write_part(
        self,
        part: CData,
        part_bytes: int,
        segments: CData,
        count: int,
        level: int,
        total: CData,
        /,
    ) -> int: ...
    def kvstore_read_frames(
        self,
        frames: CData,
        file: int,
        offsets: CData,
        count: int,
        hashes: CData,
        ids: CData,
        first_block: int,
        buffer: CData,
        level: int,
        streamed_bytes: int,
        done: CData,
        /,
    ) -> int: ...
    def kvstore_check_level(
        self, walk: TreeWalk, pages: CData, count: int, kind: int, is_leaf: int, /
    ) -> int: ...
    def kvstore_leaf_rows(
        self,
        level: TreeLevel,
        value: CData,
        key_bytes: int,
        value_bytes: int,
        rows: CData,
        byte_count: CData,
        /,
    ) -> int: ...

ffi: FFI
lib: Lib
