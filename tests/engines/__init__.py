"""Tests inside real engines. They run where the engine is installed, and are skipped elsewhere."""

from __future__ import annotations

import importlib
import os
import warnings

import pytest


def need(engine: str, *modules: str) -> None:
    """Skip a module of tests without its engine; fail where it must be there.

    ``KVSTORE_REQUIRE_ENGINE`` names the engine that must be there. ``modules`` are imported as well,
    with the warnings of other people's code switched off.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in (engine, *modules):
                importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("KVSTORE_REQUIRE_ENGINE") == engine:
            raise
        pytest.skip(f"{engine} is not installed ({error})", allow_module_level=True)
