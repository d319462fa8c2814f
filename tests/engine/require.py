"""Engines are not in the project's own environment: their suites skip, or fail where one is promised."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

import pytest

REQUIRED = "KVSTORE_REQUIRE_ENGINE"
"""The variable with the engine whose absence is a failure and not a skip."""


def engine(name: str, *modules: str) -> None:
    """Import ``modules`` of an engine, or skip (fail, if the engine is required) the test module."""
    stubs = Path(__file__).parent / name / "stubs"
    if stubs.is_dir() and str(stubs) not in sys.path:
        sys.path.append(str(stubs))  # at the end: a real package comes first
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in modules:
                importlib.import_module(module)
    except ImportError as error:
        if os.environ.get(REQUIRED) == name:
            raise
        reason = f"{name} is not installed here ({error}); see tests/engine/{name}/requirements.txt"
        pytest.skip(reason, allow_module_level=True)
