"""Matches and pages belong to the store and the namespace that made them; others refuse them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Match, WindowSnapshot
from kvstore.cache.scope import Scope
from tests.stores import (
    BLOCK,
    NAMESPACE,
    WINDOWED,
    engine_pages,
    entries_of,
    open_cache,
    tokens_of,
)

CALLS: dict[str, Callable[[Scope, Match], Any]] = {
    "read": lambda scope, match: scope.read(match),
    "load": lambda scope, match: scope.load(match),
    "load into": lambda scope, match: scope.load(match, into=engine_pages()),
    "window": lambda scope, match: scope.window(match, _hook),
    "windows": lambda scope, match: scope.windows([(match, _hook)]),
}


def _hook(requests: Any) -> list[WindowSnapshot]:
    return [
        WindowSnapshot(r.start, r.stop, {"window": np.zeros((3, r.stop - r.start, 16), np.uint8)})
        for r in requests
    ]


def stored(scope: Scope) -> Match:
    tokens = tokens_of(4 * BLOCK)
    scope.store(tokens, entries_of(WINDOWED, tokens))
    scope.flush()
    match = scope.lookup(tokens)
    assert match.hit_tokens == 3 * BLOCK
    return match


@pytest.mark.parametrize("name", CALLS)
def test_a_match_of_another_store_is_refused(name: str, tmp_path: Path) -> None:
    with (
        open_cache(tmp_path / "one", WINDOWED) as one,
        open_cache(tmp_path / "two", WINDOWED) as two,
    ):
        match = stored(one)
        CALLS[name](one, match)
        with pytest.raises(ValueError, match=r"of another store than .*two"):
            CALLS[name](two, match)


@pytest.mark.parametrize("name", CALLS)
def test_a_match_of_another_tenant_is_refused(name: str, tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        tenant = cache.scope(replace(NAMESPACE, tenant="b"))
        match = stored(tenant)
        CALLS[name](tenant, match)
        with pytest.raises(ValueError, match="of another namespace than"):
            CALLS[name](cache, match)


def test_two_scopes_of_one_namespace_share_matches(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", WINDOWED) as cache:
        assert cache.scope(NAMESPACE).read(stored(cache)).tokens == 3 * BLOCK


def test_a_match_outlives_a_new_generation(tmp_path: Path) -> None:
    with open_cache(tmp_path / "s", WINDOWED) as cache, stored(cache) as match:
        cache.bump_generation()
        assert cache.read(match).tokens == 3 * BLOCK


def test_pages_of_another_store_are_refused(tmp_path: Path) -> None:
    with (
        open_cache(tmp_path / "one", WINDOWED) as one,
        open_cache(tmp_path / "two", WINDOWED) as two,
        one.load(stored(one)) as loaded,
        one.device.allocate(1) as private,
    ):
        assert one.device.gather(loaded, "main", 1, None, "float32").shape[1] == 12
        with pytest.raises(ValueError, match=r"of another store than .*two"):
            two.device.gather(loaded, "main", 1, None, "float32")
        with pytest.raises(ValueError, match=r"of another store than .*two"):
            two.publish(tokens_of(BLOCK), private)
