"""Counts of the source tree: names, lines, classes, and depth of calls.

Question: how large and how deeply nested is the source?
Method:   lines and classes from the syntax trees of ``kvstore/``; a class's functions are those in its body. A
          call's depth is the largest number of nested frames of ``kvstore/`` during it, on all threads.
Run:      python -m bench.structure [--vllm MODEL] [--json]
          --vllm adds the deepest call of a request that is stored, and of one that is loaded; it needs vLLM and
          a model's folder. Another checkout: PYTHONPATH=CHECKOUT python bench/structure.py --root CHECKOUT
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np

import kvstore

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{Path(kvstore.__file__ or '').resolve().parent}/"
NATIVE = ("*.c", "*.h", "*.py", "*.pyi")


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def counts(root: Path) -> dict[str, Any]:
    """Count names, files, lines, and the largest classes of a checkout."""
    package = root / "kvstore"
    top = [p for p in package.iterdir() if not p.name.startswith(("__", "py.typed"))]
    modules = sorted(package.rglob("*.py"))
    native = [p for pattern in NATIVE for p in (root / "native").rglob(pattern)]
    native = [p for p in native if p.name != "_kvstore_native.c" and "build" not in p.parts]
    classes = [
        (node.end_lineno - node.lineno + 1, functions(node), f"{path.stem}.{node.name}")
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    longest = sorted(classes, reverse=True)[:5]
    widest = sorted(classes, key=lambda row: -row[1])[:5]
    return {
        "names at the top": len(top),
        "modules": len(modules),
        "lines of kvstore": sum(map(lines_of, modules)),
        "lines of native": sum(map(lines_of, native)),
        "lines of the largest module": max(map(lines_of, modules)),
        "classes over 400 lines": sum(lines > 400 for lines, _, _ in classes),
        "classes over 34 functions": sum(count > 34 for _, count, _ in classes),
        "largest classes": ", ".join(f"{name} {lines}" for lines, _, name in longest),
        "most functions": ", ".join(f"{name} {count}" for _, count, name in widest),
    }


def functions(node: ast.ClassDef) -> int:
    return sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)


class Depth:
    """The largest number of nested frames of the package, over all threads."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self.deepest = 0

    def hears(self, frame: FrameType, event: str, _: Any) -> None:
        """Count one call or one return: the profile function of a thread."""
        if event not in {"call", "return"} or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        depth = getattr(self._here, "depth", 0) + (1 if event == "call" else -1)
        self._here.depth = max(depth, 0)
        if depth > self.deepest:
            with self._lock:
                self.deepest = max(self.deepest, depth)


@contextmanager
def watched() -> Iterator[Depth]:
    depth = Depth()
    threading.setprofile(depth.hears)
    sys.setprofile(depth.hears)
    try:
        yield depth
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def depths() -> dict[str, int]:
    """Measure the deepest call of each operation."""
    group = kvstore.LayerGroup(name="kv", layers=(0, 1), values=64, entry_format="bf16")
    layout = kvstore.Layout(model="structure", groups=(group,))
    tokens = list(range(513))
    entries = {"kv": np.zeros((2, len(tokens), group.entry_bytes), dtype=np.uint8)}
    found: dict[str, int] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        with watched() as depth:
            done = work()
        found[f"deepest call: {name}"] = depth.deepest
        return done

    with tempfile.TemporaryDirectory() as folder:
        namespace = kvstore.Namespace(model="structure")

        def opened() -> kvstore.PrefixCache:
            sizes: dict[str, Any] = {"ssd_bytes": "64MiB", "device_bytes": 0}
            return kvstore.PrefixCache.open(
                f"{folder}/s", layout=layout, namespace=namespace, **sizes
            )

        def stored() -> None:
            with opened() as cache:
                cache.store(tokens, entries)
                cache.flush()
                cache.clear()

        stored()  # imports are no calls
        measure("open, store, flush, clear, close", stored)
        with opened() as cache:
            cache.store(tokens, entries)
            cache.flush()
            match = measure("lookup", lambda: cache.lookup(tokens))
            with match:
                measure("read", lambda: cache.read(match))
        trace = Path(folder) / "t.jsonl"
        trace.write_text(
            "".join(
                json.dumps(
                    {
                        "timestamp": n,
                        "input_length": 1024,
                        "output_length": 1,
                        "hash_ids": [0, 1 + n % 3],
                    }
                )
                + "\n"
                for n in range(50)
            )
        )
        main = _command()
        main(["simulate", str(trace), "--json"])
        measure("kvstore simulate", lambda: main(["simulate", str(trace), "--json"]))
    return found


def vllm_depths(model: str) -> dict[str, int]:
    """Measure the deepest call of two equal requests to vLLM, in one process: stored, then loaded."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    prompt = {"prompt_token_ids": [number % 97 for number in range(600)]}
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found, cached = {}, None
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="kvstore.engine.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"path": f"{folder}/s", "ssd_bytes": "256MiB"},
            ),
        )
        for name in ("stored", "loaded"):
            with watched() as depth:
                (answer,) = engine.generate([prompt], greedy, use_tqdm=False)
            found[f"deepest call: vLLM request, {name}"] = depth.deepest
            cached = answer.num_cached_tokens
            while not engine.reset_prefix_cache():
                engine.llm_engine.engine_core.get_output()
            get_kv_transfer_group().worker_side.flush()
        assert cached == 512, f"{cached} tokens were loaded"
        engine.llm_engine.engine_core.shutdown()
    return found


def _command() -> Callable[[list[str]], int]:
    """Return the command's function, of this tree or of one before its packages."""
    found = import_module("kvstore.cli")
    command = getattr(found, "main", None)
    if not callable(command):
        command = import_module("kvstore.cli.main").main
    return cast("Callable[[list[str]], int]", command)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--vllm", metavar="MODEL", help="a model's folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    place = Path(kvstore.__file__ or "").resolve().parents[1]
    if place != options.root.resolve():
        sys.exit(
            f"kvstore is imported from {place}: set PYTHONPATH={options.root} to measure that checkout"
        )
    rows = counts(options.root)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        rows |= depths()
        if options.vllm:
            rows |= vllm_depths(options.vllm)
    finally:
        sys.stdout = stdout
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        for name, value in rows.items():
            print(f"{name:32} {value:>8,}" if isinstance(value, int) else f"{name:32} {value}")


if __name__ == "__main__":
    main()
