"""Second process of the demo: loads the same model and restores blocks from the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.cli.demo.engines import BLOCK_TOKENS, ENGINES, Answer, Engine, Stopwatch
from kvstore.errors import KVStoreError, StoreError

SECOND_PROCESS_SECONDS = 1800.0
"""Longest run of the second process; hours of thrashing are a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Result of another process."""

    run: Answer
    pid: int
    disk_read_bytes: int | None
    """Bytes read from the disk, None if the system does not count them."""


def run_elsewhere(
    engine: Engine, store: Path, tokens: list[int], *, threads: int, drop_page_cache: bool = False
) -> Remote:
    """Run a prompt in a new process, with the same model and the store.

    Raises ``KVStoreError`` with the last line of its stderr if the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        work = Path(folder)
        job = {
            "engine": engine.name,
            "spec": dict(engine.spec),
            "store": str(store),
            "tokens": tokens,
            "drop_page_cache": drop_page_cache,
        }
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        # -P: a module in the current folder must not shadow an installed package.
        command = [sys.executable, "-P", "-m", "kvstore.cli.demo.process", str(work)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECOND_PROCESS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            msg = f"the second process did not finish in {SECOND_PROCESS_SECONDS:.0f} seconds"
            raise StoreError(msg) from error
        if done.returncode != 0 or not (work / "result.json").is_file():
            last = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
            msg = f"the second process failed with exit status {done.returncode}: {last[0]}"
            raise KVStoreError(msg)
        result = json.loads((work / "result.json").read_text(encoding="utf-8"))
        result["new_tokens"] = tuple(result["new_tokens"])
        logits = np.load(work / "logits.npy", allow_pickle=False)
        pid, read_bytes = result.pop("pid"), result.pop("disk_read_bytes")
        return Remote(run=Answer(logits=logits, **result), pid=pid, disk_read_bytes=read_bytes)


def _work(folder: Path) -> None:
    """Run the job in ``folder`` and write the result there."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    engine = ENGINES[job["engine"]](**job["spec"])
    store = Path(job["store"])
    warm_up(engine)
    if job["drop_page_cache"]:
        drop_page_cache(store)
    read_before = _disk_read_bytes()
    watch = Stopwatch()
    with engine.open(store) as cache:
        watch.lap("open")
        run = engine.run(cache, job["tokens"], watch, reuse=True)
    read_after = _disk_read_bytes()
    np.save(folder / "logits.npy", run.logits, allow_pickle=False)
    known = read_before is not None and read_after is not None
    result = {
        "pid": os.getpid(),
        "new_tokens": run.new_tokens,
        "hit_tokens": run.hit_tokens,
        "replay_tokens": run.replay_tokens,
        "stages": dict(run.stages),
        "disk_read_bytes": (read_after or 0) - (read_before or 0) if known else None,
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def warm_up(engine: Engine) -> None:
    """Run one forward over tokens unrelated to the prompt."""
    engine.forward(list(range(1, BLOCK_TOKENS + 1)))


def drop_page_cache(store: Path) -> None:
    """Drop a closed, flushed store from the page cache. Needs no privilege."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted(store.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _disk_read_bytes() -> int | None:
    """Return the bytes that this process has read from disks, None if they are not counted."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"]) if "read_bytes" in fields else None


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
