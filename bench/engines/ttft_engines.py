"""Engines of the benchmark of time to first token, each in its own process.

``python -m bench.engines.ttft_engines JOB`` runs in an engine's own environment, so imports are deferred. The
job is JSON; results are appended to a file of JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from typing_extensions import override

Connector = Literal["none", "kvstore", "example"]
"""Stores of an engine's prefix cache across restarts: none, kvstore, vLLM's example."""
WARM_UP_TOKENS = 200
SETTLE_SECONDS = 0.5
"""Pause after each prompt, so that background stores do not overlap with the next one."""
SSD_BYTES = "32GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of one process."""

    engine: str
    connector: Connector
    model: str
    """Folder of safetensors and config."""
    dtype: str
    store: str
    """Folder for files that outlive the process."""
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    """Length of the longest prompt plus one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """One first token: its time, its id, and the restored tokens of the prompt."""

    seconds: float
    token: int
    hit_tokens: int


VLLM_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Engine(Protocol):
    """Engine with one loaded model; one per process."""

    def start(self, job: Job) -> None:
        """Load the model, and open the store of the job's connector."""
        ...

    def first_token(self, prompt: Sequence[int]) -> First:
        """Run a prompt and return its most likely next token; the connector stores its blocks."""
        ...

    def stop(self) -> None:
        """Return when another process can find all stored blocks."""
        ...


class TransformersEngine(Engine):
    """kvstore's own adapter. The time is that of the prefill; storing comes after it."""

    @override
    def start(self, job: Job) -> None:
        import transformers

        import kvstore
        from kvstore.engine import smollm2
        from kvstore.engine.transformers import TransformersAdapter, model_layout

        transformers.utils.logging.set_verbosity_error()
        loaded = smollm2.load(Path(job.model), job.dtype)
        self._is_kept = job.connector == "kvstore"
        self._cache = kvstore.PrefixCache.open(
            job.store,
            layout=model_layout(loaded.model),
            namespace=loaded.namespace,
            ssd_bytes=SSD_BYTES,
            device_bytes=0,
            window_bytes=0,
        )
        self._adapter = TransformersAdapter(loaded.model, self._cache, store_wait=60.0)

    @override
    def first_token(self, prompt: Sequence[int]) -> First:
        began = time.perf_counter()
        made = self._adapter.prefill(prompt, reuse=self._is_kept)
        token = int(made.logits.argmax())
        seconds = time.perf_counter() - began
        if self._is_kept:
            self._adapter.keep(prompt, made.past, made.hit_tokens, made.windows)
            self._cache.flush()
        return First(seconds=seconds, token=token, hit_tokens=made.hit_tokens)

    @override
    def stop(self) -> None:
        self._cache.close()


class VllmEngine(Engine):
    """vLLM, in this process. The time is that of generating one token."""

    @override
    def start(self, job: Job) -> None:
        for name, value in VLLM_SETTINGS.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if job.connector == "kvstore":
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="kvstore.engine.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"path": job.store, "ssd_bytes": SSD_BYTES},
            )
        elif job.connector == "example":
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": job.store},
            )
        self._engine = LLM(
            model=job.model,
            dtype=job.dtype,
            enforce_eager=True,
            max_model_len=job.max_tokens,
            skip_tokenizer_init=True,
            **options,
        )
        self._sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    @override
    def first_token(self, prompt: Sequence[int]) -> First:
        began = time.perf_counter()
        [made] = self._engine.generate(
            [{"prompt_token_ids": list(prompt)}], self._sampling, use_tqdm=False
        )
        seconds = time.perf_counter() - began
        token = int(made.outputs[0].token_ids[0])
        return First(seconds=seconds, token=token, hit_tokens=int(made.num_cached_tokens or 0))

    @override
    def stop(self) -> None:
        core = self._engine.llm_engine.engine_core
        # The rest of the last request is saved in the next step, which an in-process engine runs on request.
        core.get_output()
        core.shutdown()


ENGINES: dict[str, type[Engine]] = {"transformers": TransformersEngine, "vllm": VllmEngine}


def work(job: Job, results: Path) -> None:
    """Run every prompt once, in order, after an unrelated warm-up."""
    engine = ENGINES[job.engine]()
    engine.start(job)
    highest = max((max(prompt) for prompt in job.prompts), default=1)
    engine.first_token([1 + i % highest for i in range(min(WARM_UP_TOKENS, job.max_tokens - 1))])
    with results.open("a", encoding="utf-8") as file:
        for prompt in job.prompts:
            time.sleep(SETTLE_SECONDS)
            file.write(json.dumps(asdict(engine.first_token(prompt))) + "\n")
            file.flush()
    engine.stop()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    work(Job(**json.loads(path.read_text(encoding="utf-8"))), path.with_suffix(".results"))
