"""Runs of the demo and their comparison."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import numpy as np

from kvstore.cli.demo.engines import (
    Answer,
    Engine,
    EngineName,
    Say,
    Stopwatch,
    check_installed,
    load_engine,
)
from kvstore.cli.demo.process import Remote, run_elsewhere, warm_up
from kvstore.cli.demo.prompt import prompt
from kvstore.cli.demo.report import STAGES, Report

UNCHUNKED_BELOW_SECONDS = 5.0
"""Longest cold run that is repeated without chunks, which doubles the time."""


def demonstrate(engine: Engine, text: str | None, store: Path, say: Say) -> Report:
    """Run the demo of one engine with a store in ``store``, which is created if missing."""
    tokens = prompt(engine, text)
    warm_up(engine)
    with engine.open(store) as cache:
        cache.clear()
        say(f"{engine.name}: cold run of {len(tokens):,} tokens")
        cold = engine.run(cache, tokens, Stopwatch(), reuse=False)
        cache.flush()
        has_windows = bool(cache.layout.window_groups)
        pooled = engine.run(cache, tokens, Stopwatch(), reuse=True) if has_windows else None
        ssd_bytes = float(cache.stats()["tiers"]["ssd"]["bytes_per_token"])
        layout = cache.layout
        model = cache.namespace.model
    threads = int(sys.modules["torch"].get_num_threads())
    say(f"{engine.name}: second process")
    warm = run_elsewhere(engine, store, tokens, threads=threads)
    say(f"{engine.name}: third process, with the file dropped from the page cache")
    disk = (
        run_elsewhere(engine, store, tokens, threads=threads, drop_page_cache=True)
        if hasattr(os, "posix_fadvise")
        else None
    )
    unchunked_seconds, unchunked_difference = _unchunked(engine, tokens, cold)
    exact = pooled if pooled is not None else warm.run
    return Report(
        engine=engine.name,
        model=model,
        dtype=str(engine.spec.get("dtype", "float64")),
        threads=threads,
        prompt_tokens=len(tokens),
        hit_tokens=warm.run.hit_tokens,
        replay_tokens=warm.run.replay_tokens,
        cold_ttft_s=cold.ttft,
        warm_ttft_s=warm.run.ttft,
        speedup=cold.ttft / warm.run.ttft,
        ttft_parts={stage: warm.run.stages.get(stage, 0.0) for stage in STAGES},
        page_cache="warm",
        cold_disk_ttft_s=disk.run.ttft if disk else None,
        cold_disk_parts=dict(disk.run.stages) if disk else None,
        cold_disk_page_cache=_page_cache(disk, layout.bytes_per_token) if disk else None,
        pool_ttft_s=pooled.ttft if pooled else None,
        bytes_per_token=float(layout.bytes_per_token),
        ssd_bytes_per_token=ssd_bytes,
        same_tokens=exact.new_tokens == cold.new_tokens,
        max_logit_diff=exact.difference(cold),
        replayed_same_tokens=warm.run.new_tokens == cold.new_tokens if pooled else None,
        replayed_logit_diff=warm.run.difference(cold) if pooled else None,
        unchunked_ttft_s=unchunked_seconds,
        unchunked_logit_diff=unchunked_difference,
        continuation=engine.decode(warm.run.new_tokens),
    )


def _page_cache(remote: Remote, bytes_per_token: Fraction) -> str:
    """Return whether the page cache was dropped, judged by the bytes read from the disk."""
    if remote.disk_read_bytes is None:
        return "unknown"
    # Half of the payload, because of read-ahead and shared pages.
    wanted = remote.run.hit_tokens * bytes_per_token / 2
    return "dropped" if remote.disk_read_bytes >= wanted else "kept"


def _unchunked(
    engine: Engine, tokens: list[int], cold: Answer
) -> tuple[float, float] | tuple[None, None]:
    if cold.ttft > UNCHUNKED_BELOW_SECONDS or engine.name == "reference":
        return None, None  # the reference engine's results do not depend on chunks
    start = time.perf_counter()
    logits = engine.forward(tokens)
    return time.perf_counter() - start, float(np.abs(logits - cold.logits[0]).max())


def run_demo(
    names: tuple[EngineName, ...], text: str | None, store: Path | None, say: Say
) -> list[Report]:
    """Run the demo of each engine. A ``store`` directory is kept, a temporary one removed.

    A store holds one layout: with several engines each has a directory of its own in ``store``.
    Raises ``ConfigError`` if an engine or its weights are not installed, or the text is too short.
    """
    check_installed(names)
    reports = []
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
        for name in names:
            base = store if store is not None else Path(scratch)
            directory = base if len(names) == 1 else base / name
            reports.append(demonstrate(load_engine(name, say), text, directory, say))
    return reports
