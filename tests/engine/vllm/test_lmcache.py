"""vLLM with LMCache's connector, LMCache's server, and this store below it: three processes and a restart.

LMCache is never imported here: it brings numba, and vLLM on a CPU cannot start an engine in a process
that has imported that.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

from tests.engine.vllm.engine import BLOCK, ask, engine, prompt, save_model
from tests.engine.vllm.test_processes import PROMPTS, hits, serve

pytestmark = pytest.mark.filterwarnings("ignore")

WAIT = 120.0
NO_STORE = Path("-")
CHUNKS = sum(length // BLOCK for length, _ in PROMPTS)
"""Chunks of all prompts that are whole."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """LMCache's server in a process of its own, with this store as its second tier."""

    def __init__(self, path: Path) -> None:
        self.port, self.http = free_port(), free_port()
        self.log = path.parent / "server.log"
        tier = {
            "type": "plugin",
            "module_path": "kvstore.engine.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {"path": str(path), "ssd_bytes": "64MiB", "revision": "1"},
        }
        code = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        command = [
            *(sys.executable, "-c", code, "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http)),
            *("--l1-size-gb", "0.2", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--chunk-size", str(BLOCK), "--supported-transfer-mode", "auto"),
            *("--l2-adapter", json.dumps(tier)),
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=path.parent)

    @property
    def tier(self) -> dict[str, Any]:
        """The server's status of this store; None before it answers."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=5) as reply:
                text = json.load(reply)
        except OSError:
            return {}
        return found(text)

    def until(self, objects: int) -> None:
        """Wait until so many objects are stored."""
        deadline = time.monotonic() + WAIT
        while self.tier.get("stored_object_count") != objects:
            assert time.monotonic() < deadline, (self.tier, self.log.read_text()[-3000:])
            time.sleep(0.1)


def found(status: Any) -> dict[str, Any]:
    """Return the part of a server's status that is of this store."""
    if isinstance(status, dict):
        if status.get("type") == "KVStoreL2Adapter":
            return status
        status = list(status.values())
    parts = [found(part) for part in status] if isinstance(status, list) else []
    return next((part for part in parts if part), {})


@contextmanager
def server(path: Path) -> Iterator[Server]:
    running = Server(path)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(60)


def connector(port: int) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
            },
        }
    }


def test_a_prompt_hits_after_a_restart_of_both_and_answers_as_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    model, store = save_model(tmp_path / "llama", "llama"), tmp_path / "store"
    with engine(model, enable_prefix_caching=False) as llm:
        cold = [tokens for tokens, _ in ask(llm, [prompt(*place) for place in PROMPTS])]
    with server(store) as first:
        first.until(0)
        assert serve(model, NO_STORE, connector(first.port)) == [(tokens, 0) for tokens in cold]
        first.until(CHUNKS)
    with server(store) as second:
        second.until(CHUNKS)
        again = serve(model, NO_STORE, connector(second.port))
        assert again == list(zip(cold, hits(), strict=True))
        assert second.tier["failed_tasks"] == 0
        assert second.tier["is_healthy"]
