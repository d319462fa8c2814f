"""Build backend: setuptools, and generation of the cffi source.

pip calls these hooks (PEP 517 and 660) with this folder on the path. The C extension has the stable
ABI, so one binary works with every Python from 3.11 on.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import build_meta as _setuptools

NATIVE = Path(__file__).parent
GLUE = NATIVE / "src" / "_kvstore_native.c"
HEADER = NATIVE / "include" / "kvstore_native.h"


def write_glue() -> None:
    """Write the C side of the cffi module from the declarations in the public header."""
    from cffi import FFI  # a build requirement: absent when pip only asks for the hooks' names

    declarations = HEADER.read_text().split("/* cffi: begin */")[1].split("/* cffi: end */")[0]
    ffi = FFI()
    ffi.cdef(re.sub(r"^#.*$", "", declarations, flags=re.MULTILINE))
    ffi.set_source("_kvstore_native", '#include "kvstore_native.h"', py_limited_api=True)
    ffi.emit_c_code(str(GLUE))


def _with_glue(name):
    hook = getattr(_setuptools, name)

    def call(*args, **kwargs):
        write_glue()
        return hook(*args, **kwargs)

    return call


build_wheel = _with_glue("build_wheel")
build_editable = _with_glue("build_editable")
build_sdist = _setuptools.build_sdist
get_requires_for_build_wheel = _setuptools.get_requires_for_build_wheel
get_requires_for_build_editable = _setuptools.get_requires_for_build_editable
get_requires_for_build_sdist = _setuptools.get_requires_for_build_sdist
