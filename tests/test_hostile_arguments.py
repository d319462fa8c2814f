"""Every public callable with hostile arguments: a result, or an error of ours that says what is wrong.

One argument at a time is replaced. An error is ours if it is raised by a statement of the package,
and is a ``KVStoreError``, a ``ValueError`` or a ``TypeError``.
"""

from __future__ import annotations

import decimal
import fractions
import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore import (
    BlockStore,
    ImageSpan,
    KVStoreError,
    LayerGroup,
    Layout,
    Namespace,
    Pages,
    PrefixCache,
    ReplayHook,
    WindowSnapshot,
    fp4,
)
from tests.stores import BLOCK, NAMESPACE, WINDOWED, engine_pages, entries_of, tokens_of

PACKAGE = str(Path(kvstore.__file__).parent)


def endless() -> Iterator[int]:
    while True:
        yield 1


class Liar:
    """Says that it has items, and has none."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> int:
        raise IndexError(place)


def hostile() -> dict[str, Any]:
    """Values that no argument expects, made anew for each call."""
    knot: list[Any] = []
    knot.append(knot)
    masked = np.ma.array([1, 2, 3, 4, 5, 6, 7, 8] * 4, mask=[True] * 32)
    values: dict[str, Any] = {
        repr(plain): plain
        for plain in (
            *(
                None,
                True,
                False,
                0,
                1,
                -1,
                3,
                16,
                2**31,
                2**63,
                2**64,
                -(2**63),
                1.0,
                16.0,
                0.5,
                -0.5,
            ),
            *(
                math.nan,
                math.inf,
                -math.inf,
                1j,
                "",
                "x",
                "nope",
                "1e3",
                "-1",
                "\0",
                "\ud800",
                b"",
                b"x",
            ),
            *(
                (),
                [],
                {},
                [1],
                [-1],
                [True, False],
                [1.5],
                ["a"],
                [[1, 2], [3]],
                [None],
                {"k": None},
                {1: 2},
            ),
            *({"a", "b"}, range(3), ..., int, len, Namespace, Namespace(model="other")),
        )
    }
    values |= {
        "10**400": 10**400,
        "digits": "9" * 400,
        "object": object(),
        "knot": knot,
        "liar": Liar(),
        "bytearray": bytearray(16),
        "memoryview": memoryview(b"abcd"),
        "path": Path("nowhere"),
        "decimal": decimal.Decimal("16"),
        "fraction": fractions.Fraction(1, 3),
        "lambda": lambda *_: None,
        "iterator": iter([1, 2, 3]),
        "int8": np.int8(5),
        "float32": np.float32("nan"),
        "bool_": np.bool_(True),
        "array 0-d": np.array(3),
        "array int64": np.arange(32),
        "array int8": np.arange(32, dtype=np.int8),
        "array float": np.arange(32.0),
        "array bool": np.ones(32, bool),
        "array object": np.array([object()] * 3),
        "array text": np.array(["a", "b"]),
        "array dates": np.array(["2026-01-01"], "datetime64[D]"),
        "array 2-d": np.ones((2, 3), np.uint8),
        "array empty": np.empty((0, 4), np.uint8),
        "array masked": masked,
        "array records": np.zeros(3, [("a", "i4"), ("b", "f4")]),
        "array read only": np.frombuffer(b"abcdefgh", np.uint8),
        "tensor": torch.arange(32),
        "tensor float": torch.ones(4, 4),
        "tensor meta": torch.ones(4, 4, device="meta"),
        "tensor grad": torch.ones(3, requires_grad=True),
        "tensor sparse": torch.ones(2, 2).to_sparse(),
        "image": ImageSpan(0, 4, b"d"),
        "group": LayerGroup(name="k", layers=(0,), values=4, entry_format="u8"),
        "layout": WINDOWED,
    }
    return values


@dataclass(frozen=True)
class Target:
    """One public callable, and what makes arguments that it takes."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[], Mapping[str, Any]]
    finish: Callable[[Any], object] = lambda _: None
    """Undoes what a good call did."""


def is_ours(error: BaseException) -> bool:
    """Whether an error is one of the promised kinds, raised by a statement of the package."""
    if isinstance(error, KVStoreError):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        isinstance(error, ValueError | TypeError)
        and last.filename.startswith(PACKAGE)
        and (last.line or "").startswith("raise")
    )


def sweep(target: Target) -> tuple[int, list[str]]:
    """Call a target with each argument replaced by each hostile value; return calls and faults."""
    faults, calls = [], 0
    for name in target.arguments():
        for label, value in hostile().items():
            arguments = {**target.arguments(), name: value}
            calls += 1
            try:
                result = target.call(**arguments)
            except Exception as error:
                if not is_ours(error):
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    faults.append(
                        f"{target.name}({name}={label}): {error!r:.90} at {where.filename[-30:]}:{where.lineno}"
                    )
            else:
                target.finish(result)
    return calls, faults


# ---- values ------------------------------------------------------------------------------------


def value_targets() -> list[Target]:
    values = np.ones((2, 32), np.float32)
    nibbles, scales = fp4.pack(values, "nvfp4")
    kinds = {"entry_format": "nvfp4", "global_scale": 1.0}
    rows = {"window": np.zeros((3, 16, 16), np.uint8)}
    group = {
        "name": "k",
        "layers": (0, 1),
        "values": 16,
        "entry_format": "nvfp4",
        "lifetime": kvstore.Lifetime.GLOBAL,
        "tokens_per_entry": 1,
        "scale_rule": "",
    }
    return [
        Target("layout", kvstore.layout, lambda: {"source": "smollm2-135m", "dtype": "bf16"}),
        Target(
            "Layout", Layout, lambda: {"model": "m", "groups": WINDOWED.groups, "window_tokens": 16}
        ),
        Target("LayerGroup", LayerGroup, lambda: group),
        Target(
            "Namespace",
            Namespace,
            lambda: {
                "model": "m",
                "weights": "",
                "tokenizer": "",
                "adapter": None,
                "tenant": "",
                "generation": 0,
            },
        ),
        Target("weights_digest", kvstore.weights_digest, lambda: {"folder": "nowhere"}),
        Target("ImageSpan", ImageSpan, lambda: {"start": 0, "stop": 4, "digest": b"d"}),
        Target("Pages", Pages, lambda: {"tensors": {}, "page_ids": [0], "layout_tag": "entries"}),
        Target("WindowSnapshot", WindowSnapshot, lambda: {"start": 0, "stop": 16, "rows": rows}),
        Target(
            "fp4.pack",
            fp4.pack,
            lambda: {"values": values, **kinds, "scale_rule": "v41", "out": None, "stats": None},
        ),
        Target(
            "fp4.unpack",
            fp4.unpack,
            lambda: {
                "nibbles": nibbles,
                "scales": scales,
                **kinds,
                "dtype": "float32",
                "out": None,
            },
        ),
        Target(
            "fp4.gather",
            fp4.gather,
            lambda: {
                "nibbles": nibbles,
                "scales": scales,
                "index": [0],
                **kinds,
                "pages": None,
                "dtype": "float32",
                "out": None,
            },
        ),
        Target(
            "fp4.relative_error",
            fp4.relative_error,
            lambda: {"values": values, **kinds, "scale_rule": "v41"},
        ),
    ]


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report([sweep(target) for target in value_targets()], at_least=2500)


def report(results: list[tuple[int, list[str]]], at_least: int) -> None:
    faults = [fault for _, found in results for fault in found]
    calls = sum(count for count, _ in results)
    assert not faults, f"{len(faults)} of {calls} calls:\n" + "\n".join(faults)
    assert calls >= at_least


# ---- a cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
def test_openings(half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = iter(range(10**9))

    def options(function: Callable[..., Any], **known: Any) -> Callable[[], Mapping[str, Any]]:
        names = [name for name in inspect.signature(function).parameters if name != "path"]
        base = {**dict.fromkeys(names[half::2]), **known}
        return lambda: {"path": f"{half}-{next(places)}", **base}

    cache = options(
        PrefixCache.open,
        layout=WINDOWED,
        namespace=NAMESPACE,
        ssd_bytes="4MiB",
        role="auto",
        device_bytes=0,
    )
    blocks = options(BlockStore.open, block_bytes=4096, key_bytes=32, ssd_bytes="4MiB", role="auto")
    close = lambda opened: opened.close()  # noqa: E731
    targets = [
        Target("PrefixCache.open", PrefixCache.open, cache, close),
        Target("BlockStore.open", BlockStore.open, blocks, close),
    ]
    report([sweep(target) for target in targets], at_least=1000)


def cache_targets(cache: PrefixCache) -> list[Target]:
    tokens = tokens_of(5 * BLOCK)
    images = [ImageSpan(0, 4, b"d")]
    snapshot = WindowSnapshot(0, 2 * BLOCK, {"window": np.zeros((3, 2 * BLOCK, 16), np.uint8)})
    pages = engine_pages()
    found = cache.lookup(tokens)
    assert found.hit_tokens
    loaded = cache.load(found)
    given = {"tokens": tokens, "images": ()}
    queue = {"wait": 0.0, "ttl": None, "pin": False}
    hook: ReplayHook = lambda requests: []  # noqa: E731
    release = lambda result: result.release()  # noqa: E731
    leave = lambda match: cache.release("r")  # noqa: E731
    wait = lambda job: job.wait()  # noqa: E731
    return [
        Target(
            "scope", cache.scope, lambda: {"namespace": Namespace(model="quota"), "ssd_quota": None}
        ),
        Target(
            "store",
            cache.store,
            lambda: {**given, "entries": entries_of(WINDOWED, tokens), "start": 0, **queue},
        ),
        Target("unpin", cache.unpin, lambda: given),
        Target(
            "lookup",
            cache.lookup,
            lambda: {**given, "request_id": "r", "need_window": False},
            leave,
        ),
        Target("probe", cache.probe, lambda: {**given, "images": images}),
        Target("release", cache.release, lambda: {"request_id": "r"}),
        Target("read", cache.read, lambda: {"match": found, "timeout": 1.0}),
        Target("load", cache.load, lambda: {"match": found, "timeout": 1.0}, release),
        Target(
            "load into",
            cache.load,
            lambda: {"match": found, "into": pages, "start": 0, "timeout": 1.0},
            lambda result: result.wait() if hasattr(result, "wait") else result.release(),
        ),
        Target(
            "save",
            cache.save,
            lambda: {**given, "pages": pages, "start": 0, "stop": None, "after": None, **queue},
            wait,
        ),
        Target(
            "publish",
            cache.publish,
            lambda: {**given, "pages": loaded, "upto": BLOCK, "after": None, "start": 0},
        ),
        Target("put_window", cache.put_window, lambda: {**given, "snapshot": snapshot}),
        Target("window", cache.window, lambda: {"match": found, "hook": hook}),
        Target("windows", cache.windows, lambda: {"pairs": [(found, hook)]}),
        Target(
            "windows pair", lambda match: cache.windows([(match, hook)]), lambda: {"match": found}
        ),
        Target("observe_prefill", cache.observe_prefill, lambda: {"tokens": 16, "seconds": 0.5}),
        Target("clear", cache.clear, lambda: {"scope": cache.scope(Namespace(model="empty"))}),
        Target(
            "gather",
            cache.device.gather,
            lambda: {
                "pages": loaded,
                "group": "main",
                "layer": 1,
                "entry_indices": None,
                "dtype": "float32",
            },
        ),
        Target("allocate", cache.device.allocate, lambda: {"count": 1}, release),
    ]


def test_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore", UserWarning)  # of torch, about sparse tensors
    with PrefixCache.open(
        "s",
        layout=WINDOWED,
        namespace=NAMESPACE,
        block_tokens=BLOCK,
        ssd_bytes="4MiB",
        device_bytes="64KiB",
    ) as cache:
        tokens = tokens_of(5 * BLOCK)
        cache.store(tokens, entries_of(WINDOWED, tokens))
        cache.flush()
        results = []
        for target in cache_targets(cache):
            target.finish(target.call(**target.arguments()))  # the arguments themselves are good
            results.append(sweep(target))
        job = cache.load(cache.lookup(tokens), into=engine_pages())
        assert job.wait()
        results += [
            sweep(Target("Job.wait", job.wait, lambda: {"timeout": 1.0})),
            sweep(
                Target(
                    "Job.wait_group",
                    job.wait_group,
                    lambda: {"group": "main", "layer": 1, "timeout": 1.0},
                )
            ),
        ]
        report(results, at_least=3500)
        cache.store(tokens, entries_of(WINDOWED, tokens))
        cache.flush()
        assert cache.lookup(tokens).hit_tokens == 4 * BLOCK


def test_keyed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with BlockStore.open("s", block_bytes=64, key_bytes=16, ssd_bytes="4MiB") as store:
        source, target = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        keys = {"keys": ["a"]}
        put = {**keys, "sources": [source], "parents": None, "wait": 0.0}
        targets = [
            Target("put", store.put, lambda: put),
            Target("put source", lambda s: store.put(["b"], [s]), lambda: {"s": source}),
            Target("put parent", lambda p: store.put(["c"], [source], [p]), lambda: {"p": "a"}),
            Target("get", store.get, lambda: {**keys, "targets": [target]}),
            Target("get target", lambda t: store.get(["a"], [t]), lambda: {"t": target}),
            Target("exists", store.exists, lambda: keys),
            Target("block_id", store.block_id, lambda: {"key": "a"}),
            Target("pin", store.pin, lambda: keys),
            Target("unpin", store.unpin, lambda: keys),
            Target("delete", store.delete, lambda: keys),
            Target("key", lambda k: store.exists([k]), lambda: {"k": "a"}),
        ]
        report([sweep(target) for target in targets], at_least=1000)
        assert store.put(["z"], [source]) == [True]
