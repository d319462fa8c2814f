"""Stands for torchvision, whose wheel would replace the CPU build of torch.

SGLang imports it for image preprocessing on the way to its cache classes. Nothing here works: what
is named exists, and fails when it is used.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _AnyName(type):
    """A class that has every attribute, as enums of names are asked for theirs on import."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Missing(metaclass=_AnyName):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("torchvision is a stub here: images are not part of these tests")


class _Stub(ModuleType):
    """A submodule that has every name."""

    __path__: list[str] = []  # noqa: RUF012 - a package, so that submodules are looked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (_Missing,), {})


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    """Finds every submodule."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith("torchvision."):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name.startswith("__"):
        raise AttributeError(name)
    return import_module(f"torchvision.{name}")
