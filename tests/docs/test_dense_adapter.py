"""The example of docs/adapter.md, and the page's own checklist, line by line."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.cache import Scope
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import head_sum
from kvstore.tier.ssd.values import Put
from tests.stores import inside, tier_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "dense_adapter.py"
BLOCK = 16


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("dense_adapter", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def prompt(length: int, seed: int = 0) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, example.VOCAB, length).astype(np.uint32)


def open_store(path: Path, **options: Any) -> kvstore.PrefixCache:
    defaults: dict[str, Any] = {
        "layout": example.LAYOUT,
        "namespace": kvstore.Namespace(model="tiny", weights="seed 0"),
        "block_tokens": BLOCK,
        "ssd_bytes": "8MiB",
    }
    return kvstore.PrefixCache.open(path, **{**defaults, **options})


def run(cache: Scope, tokens: NDArray[np.uint32]) -> tuple[NDArray[np.float32], int]:
    logits, hit = example.DenseAdapter(example.TinyModel(), cache).prefill(tokens)
    return logits, hit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.PrefixCache]:
    with open_store(tmp_path / "s") as cache:
        yield cache


# ---- the page --------------------------------------------------------------------------------------


def test_the_page_shows_the_file_and_it_is_short() -> None:
    code = EXAMPLE.read_text()
    assert len(code.splitlines()) < 80
    page = (ROOT / "docs" / "adapter.md").read_text()
    assert f"```python\n{code}```" in page


def test_every_link_of_the_page_leads_somewhere() -> None:
    page = (ROOT / "docs" / "adapter.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("kvstore/reference/engine.py", ("_adopt", "_floors", "replay_hook", "_publish")),
        ("kvstore/engine/layers.py", ("StoredLayer",)),
        ("kvstore/cache/scope.py", ("bump_generation", "observe_prefill", "probe", "windows")),
        ("kvstore/errors.py", ("ConfigError", "LayoutMismatch", "StoreBusy", "StoreError")),
    ],
)
def test_what_the_page_names_exists(file: str, names: tuple[str, ...]) -> None:
    page, source = (ROOT / "docs" / "adapter.md").read_text(), (ROOT / file).read_text()
    for name in names:
        assert name in page
        assert re.search(rf"(def|class) {name}\b", source), name


def test_run_twice_it_hits(tmp_path: Path) -> None:
    said = [
        subprocess.run(
            [sys.executable, EXAMPLE, tmp_path / "s"], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    cold, warm = (
        re.fullmatch(r"(\d+) of 500 tokens restored, next token (\d+)\n", s) for s in said
    )
    assert cold is not None
    assert warm is not None
    assert (cold[1], warm[1]) == ("0", "384")
    assert cold[2] == warm[2]


# ---- the checklist ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_equal_logits_and_the_hit_that_there_must_be(tmp_path: Path, length: int) -> None:
    """Also the last token: a prompt of whole blocks computes its last one again."""
    tokens = prompt(length)
    with open_store(tmp_path / "s") as cache:
        cold, none = run(cache, tokens)
    with open_store(tmp_path / "s") as cache:
        warm, hit = run(cache, tokens)
    assert (none, hit) == (0, (length - 1) // BLOCK * BLOCK)
    np.testing.assert_array_equal(warm, cold)


def test_a_prompt_that_goes_on_restores_what_it_shares(store: kvstore.PrefixCache) -> None:
    first = prompt(40)
    longer = np.concatenate([first, prompt(40, seed=1)])
    run(store, first)
    store.flush()
    warm, hit = run(store, longer)
    assert hit == 32
    cold, _ = example.TinyModel().forward(longer, np.empty((2, 2, 0, example.WIDTH), np.float32))
    np.testing.assert_allclose(warm, cold, atol=1e-4)


def test_negative_control(store: kvstore.PrefixCache) -> None:
    """Other bytes in one block, with every checksum right, change the logits."""
    tokens = prompt(60)
    cold, _ = run(store, tokens)
    store.flush()
    ssd, prefix = tier_of(store), store.probe(tokens).prefix
    mine, other, record = (
        ssd.frame(prefix.key(1)),
        ssd.frame(prefix.key(2)),
        ssd.record(prefix.key(1)),
    )
    assert mine is not None
    assert other is not None
    assert record is not None
    forged = FrameFormat(store.layout, BLOCK).forge(mine, other)
    ssd.put([Put(prefix.key(1), replace(record, page=0, head_sum=head_sum(forged)), forged)])
    warm, hit = run(store, tokens)
    assert hit == 48
    assert np.abs(warm - cold).max() > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "somebody else"},
        {"adapter": "lora@1"},
        {"adapter": ""},
        {"weights": "seed 1"},
        {"tokenizer": "2"},
        {"generation": 1},
    ],
    ids=str,
)
def test_only_the_same_namespace_hits(store: kvstore.PrefixCache, other: dict[str, Any]) -> None:
    tokens = prompt(40)
    run(store, tokens)
    store.flush()
    assert run(store.scope(replace(store.namespace, **other)), tokens)[1] == 0
    assert run(store.scope(store.namespace), tokens)[1] == 32


@pytest.mark.parametrize("change", ["dtype", "block size"])
def test_another_dtype_or_block_size_is_refused(tmp_path: Path, change: str) -> None:
    with open_store(tmp_path / "s") as cache:
        run(cache, prompt(40))
    groups = tuple(replace(group, entry_format="f16") for group in example.LAYOUT.groups)
    options: dict[str, Any] = {"layout": replace(example.LAYOUT, groups=groups)}
    if change == "block size":
        options = {"block_tokens": 2 * BLOCK}
    with pytest.raises(kvstore.LayoutMismatch):
        open_store(tmp_path / "s", **options)


def before_read(
    cache: kvstore.PrefixCache, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let something happen between the adapter's lookup and its read."""
    read = cache.read

    def late(match: kvstore.Match) -> kvstore.Entries:
        do()
        return read(match)

    monkeypatch.setattr(cache, "read", late)


def test_an_eviction_between_lookup_and_read_shortens_the_hit(
    store: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(60)
    cold, _ = run(store, tokens)
    store.flush()
    before_read(store, store.clear, monkeypatch)
    warm, hit = run(store, tokens)
    assert hit == 0
    np.testing.assert_array_equal(warm, cold)


def test_a_damaged_block_shortens_the_hit(tmp_path: Path) -> None:
    tokens = prompt(60)
    with open_store(tmp_path / "s") as cache:
        cold, _ = run(cache, tokens)
        cache.flush()
        with cache.lookup(tokens) as match:
            third = cache.read(match)["v"][1, 40].tobytes()
    path = next(
        path
        for path in (tmp_path / "s").rglob("*")
        if path.is_file() and third in path.read_bytes()
    )
    data = bytearray(path.read_bytes())
    data[data.index(third)] ^= 1
    path.write_bytes(data)
    with open_store(tmp_path / "s") as cache:
        warm, hit = run(cache, tokens)
        assert cache.stats()["counters"]["corrupt_blocks"]["checksum"] == 1
    assert hit == 32
    np.testing.assert_allclose(warm, cold, atol=1e-4)  # cut at another place than the cold run


def test_aborts_between_lookup_and_read_leave_nothing_pinned(tmp_path: Path) -> None:
    now = 0.0
    tokens = prompt(60)
    with open_store(tmp_path / "s", clock=lambda: now) as cache:
        run(cache, tokens)
        cache.flush()
        for number in range(1000):
            cache.lookup(tokens, request_id=f"r{number}")
        now = 60.0
        cache.lookup(prompt(5))
        assert cache.stats()["counters"]["expired_leases"] == 1000
        assert not inside(cache).lookups._by_request
    assert run_again(tmp_path, tokens) == 48


def run_again(tmp_path: Path, tokens: NDArray[np.uint32]) -> int:
    with open_store(tmp_path / "s") as cache:
        return run(cache, tokens)[1]


def test_a_full_queue_drops_and_a_later_run_stores(tmp_path: Path) -> None:
    tokens = prompt(60)
    with open_store(tmp_path / "s") as cache:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inside(cache).writes, "store", lambda *_, **__: kvstore.Stored(0, 0, 3))
            cold, _ = run(cache, tokens)
        cache.flush()
        again, hit = run(cache, tokens)
        cache.flush()
        assert (hit, run(cache, tokens)[1]) == (0, 48)
    np.testing.assert_array_equal(again, cold)


def test_buffers_may_be_overwritten_right_after_a_store(store: kvstore.PrefixCache) -> None:
    tokens = prompt(3 * BLOCK)
    entries = {
        group.name: np.random.default_rng(1).integers(
            0, 256, (2, len(tokens), group.entry_bytes), np.uint8
        )
        for group in example.LAYOUT.groups
    }
    expected = {name: array.copy() for name, array in entries.items()}
    store.store(tokens, entries)
    for array in entries.values():
        array[...] = 0xAA
    store.flush()
    with store.lookup(np.append(tokens, np.uint32(1))) as match:
        found = store.read(match)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
