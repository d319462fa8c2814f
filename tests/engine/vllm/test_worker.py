"""WorkerSide over plain tensors: order of operations, reports and logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import kvstore
from kvstore.engine.faults import Faults
from kvstore.engine.vllm import KVStoreConnector, connector, log
from kvstore.engine.vllm.groups import engine_layout
from kvstore.engine.vllm.messages import Identity, StepPlan, Work
from kvstore.engine.vllm.worker import WorkerSide
from tests.engine.vllm.engine import prompt
from tests.streams import Stream

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "model.layers.0.self_attn.attn"
SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
CONFIG = KVCacheConfig(8, [], [KVCacheGroupSpec([NAME], SPEC)])
LAYOUT = engine_layout(CONFIG, "one")
BASE = kvstore.Namespace(model="m", tenant='["", null]')


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


class Worker:
    """A worker's side with eight blocks of random numbers and a store of its own."""

    def __init__(
        self,
        stack: ExitStack,
        path: Path,
        record: Callable[[torch.device], kvstore.Event | None] = lambda _: None,
    ) -> None:
        self.cache = torch.rand(8, 2, 128, 64)
        self.store = stack.enter_context(
            kvstore.PrefixCache.open(
                path,
                layout=LAYOUT.layout,
                namespace=BASE,
                block_tokens=LAYOUT.block_tokens,
                device_bytes=0,
            )
        )
        self.side = WorkerSide(LAYOUT, self.store, BASE, 0, writes=True, record=record)
        self.side.register({NAME: self.cache})
        stack.callback(self.side.close)

    def finish(self, name: str) -> None:
        """Wait for the saves and the load of a request, and collect their results."""
        underway = [*self.side._saves.get(name, ()), *filter(None, [self.side._loads.get(name)])]
        assert all(one.job.wait() for one in underway)
        self.side.finished(StepPlan())
        self.store.flush()  # what was saved is found when it is committed


def work(name: str, tokens: int, blocks: tuple[int, ...], start: int = 0) -> Work:
    ids = np.array(prompt(tokens + 1), np.uint32)
    return Work(
        request_id=name, namespace=BASE, tokens=ids, start=start, stop=tokens, blocks=(blocks,)
    )


def save(name: str, tokens: int, blocks: tuple[int, ...], start: int = 0) -> StepPlan:
    given = work(name, tokens, blocks, start)
    return StepPlan(saves=(replace(given, tokens=given.tokens[:-1]),))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_load_comes_after_what_the_device_has_queued(
    stack: ExitStack, tmp_path: Path, *, is_ordered: bool
) -> None:
    """vLLM zeroes new blocks, and runs steps of their last owner, on its own stream."""
    stream = Stream()
    worker = Worker(stack, tmp_path / "s", lambda _: stream.record() if is_ordered else None)
    kept = worker.cache[:2].clone()
    worker.side.save(save("a", 256, (0, 1)))
    worker.finish("a")
    stream.queue(worker.cache[5:7].zero_)
    worker.side.load(StepPlan(loads=(work("b", 256, (5, 6)),)))
    worker.finish("b")
    stream.run()
    assert worker.side.stats().data["loaded_tokens"] == 256
    assert torch.equal(worker.cache[5:7], kept) == is_ordered
    assert bool(worker.cache[5:7].any()) == is_ordered


def test_tokens_that_were_there_are_not_counted_as_saved(stack: ExitStack, tmp_path: Path) -> None:
    worker = Worker(stack, tmp_path / "s")
    for name, plan, saved in (
        ("a", save("a", 256, (0, 1)), 256),
        ("b", save("b", 384, (2, 3, 4)), 128),
        ("c", save("c", 384, (2, 3, 4)), 0),
        ("d", save("d", 512, (2, 3, 4, 5), 256), 128),
    ):
        worker.side.save(plan)
        worker.finish(name)
        assert worker.side.stats().data.get("saved_tokens", 0) == saved
        report = worker.side.take_report()
        assert report is not None
        assert report.saved == {name: [plan.saves[0].stop]}


def test_two_saves_of_a_request_end_in_either_order(stack: ExitStack, tmp_path: Path) -> None:
    """A save that ended is told from one in progress by identity: their tokens differ in length."""
    held = threading.Event()
    events: list[threading.Event | None] = [None, held]
    worker = Worker(stack, tmp_path / "s", lambda _: events.pop(0))
    worker.side.save(save("a", 128, (0,)))
    worker.side.save(save("a", 256, (0, 1), start=128))
    first, _ = worker.side._saves["a"]
    assert first.job.wait()
    worker.side.finished(StepPlan())
    assert len(worker.side._saves["a"]) == 1
    held.set()
    worker.finish("a")
    assert worker.store.probe(prompt(257)).hit_tokens == 256


def test_a_preempted_request_is_not_waited_for(stack: ExitStack, tmp_path: Path) -> None:
    """The engine is stopped meanwhile. Blocks that are not yet copied stay unsaved."""
    never = threading.Event()
    worker = Worker(stack, tmp_path / "s", lambda _: never)
    for name, blocks in (("a", (0, 1)), ("b", (2, 3))):
        worker.side.save(save(name, 256, blocks))
    worker.side.begin(StepPlan(preempted=frozenset({"a", "b"})))
    worker.cache.zero_()  # their blocks have other owners now
    worker.finish("a")
    counts = worker.side.stats().data
    assert "overdue_jobs" not in counts
    assert "saved_tokens" not in counts
    assert worker.store.lookup(work("c", 256, ()).tokens).hit_tokens == 0


def test_a_worker_without_its_store_says_so(stack: ExitStack, tmp_path: Path) -> None:
    worker = Worker(stack, tmp_path / "s")
    worker.side.store = None
    worker.side.load(StepPlan(loads=(work("a", 256, (0, 1)),)))
    report = worker.side.take_report()
    assert report is not None
    assert report.lacks_store
    assert report.failed == {"a"}


# ---- what it says ------------------------------------------------------------------------------


def as_in_a_server(monkeypatch: pytest.MonkeyPatch) -> tuple[logging.Logger, logging.Logger]:
    """Return the loggers of kvstore and vLLM, as long as nobody has configured any."""
    monkeypatch.setattr(logging.root, "handlers", [])
    loggers = logging.getLogger("kvstore"), logging.getLogger("vllm")
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        logger.setLevel(logging.NOTSET)  # forgets what it knew of levels
    return loggers


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_lines_appear_as_vllm_writes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _, vllm = as_in_a_server(monkeypatch)
    theirs = Lines()
    vllm.addHandler(theirs)
    vllm.propagate = False
    vllm.setLevel(logging.INFO)
    for _ in range(2):  # a scheduler's connector and a worker's, in one process
        log.log_as_vllm()
    logging.getLogger("kvstore.tier.ssd.tier").info("opened")
    root = Lines()
    logging.root.addHandler(root)
    log.log.error("lost")
    assert theirs.lines == ["INFO [kvstore.tier.ssd.tier] opened", "ERROR [kvstore.vllm] lost"]
    assert not root.lines


@pytest.mark.parametrize("name", ["kvstore", "root"])
def test_who_has_said_where_kvstore_logs_keeps_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, vllm = as_in_a_server(monkeypatch)
    theirs, mine = Lines(), Lines()
    vllm.addHandler(theirs)
    logging.getLogger(None if name == "root" else name).addHandler(mine)
    log.log_as_vllm()
    log.log.error("lost")
    assert mine.lines == ["ERROR [test_worker.py] lost"]
    assert not theirs.lines


def test_an_error_that_says_it_all_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    noted = Faults(log.log)
    noted.note("load", kvstore.StoreError("the disk is gone"))
    noted.note("load", ZeroDivisionError("a bug"))
    assert [record.exc_info is None for record in caplog.records] == [True, False]


# ---- opening -----------------------------------------------------------------------------------


def vllm_config(path: Path, **extra: Any) -> Any:
    """The fields of a ``VllmConfig`` that a connector reads before it opens its store."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={"path": str(path), **extra},
        kv_load_failure_policy="recompute",
        kv_role="kv_both",
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type="one"), enable_sleep_mode=False, is_diffusion=False
        ),
        attention_config=SimpleNamespace(use_non_causal=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        lora_config=None,
        kv_events_config=None,
    )


def spoil(path: Path, how: str) -> None:
    """Make a folder one that cannot be opened."""
    if how == "a file":
        path.parent.mkdir()
        path.write_text("not a folder")
    elif how == "writable by all":
        path.mkdir(parents=True)
        path.chmod(0o777)
    else:
        other = kvstore.Layout(
            model="other",
            groups=(kvstore.LayerGroup(name="kv", layers=(0,), values=8, entry_format="u8"),),
        )
        kvstore.PrefixCache.open(path, layout=other, namespace=BASE, device_bytes=0).close()


@pytest.mark.parametrize("how", ["a file", "writable by all", "another layout", "a bug"])
@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_store_that_cannot_be_opened_costs_hits_and_no_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: KVConnectorRole,
    how: str,
) -> None:
    monkeypatch.setattr(connector, "base_namespace", lambda *_: BASE)
    if how == "a bug":
        monkeypatch.setattr(kvstore.PrefixCache, "open", _raise)
    else:
        spoil(tmp_path / "s" / "rank-0-of-1", how)
    opened = KVStoreConnector(vllm_config(tmp_path / "s"), role, CONFIG)
    lines = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "cannot be opened, so nothing is loaded" in lines[0].getMessage()
    if role == KVConnectorRole.WORKER:
        opened.register_kv_caches({NAME: torch.zeros(8, 2, 128, 64)})
        opened.worker_side.load(StepPlan(loads=(work("a", 256, (0, 1)),)))
        opened.worker_side.save(save("b", 256, (2, 3)))
        assert opened.worker_side.finished(StepPlan())[1] == {"a"}
        assert opened.get_block_ids_with_load_errors() == {0, 1}
    else:
        opened.set_xfer_handshake_metadata({0: Identity(BASE)})
        request = SimpleNamespace(request_id="a")
        opened.on_new_request(request)
        assert opened.get_num_new_matched_tokens(request, 0) == (0, False)
    opened.shutdown()


def _raise(*_args: Any, **_options: Any) -> Any:
    msg = "'utf-8' codec can't decode byte 0xff"
    raise ValueError(msg)


def test_an_engine_that_can_sleep_is_told_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector, "base_namespace", lambda *_: BASE)
    for number, (extra, lines) in enumerate((({}, 1), ({"fixed_weights": True}, 0))):
        caplog.clear()
        config = vllm_config(tmp_path / str(number), **extra)
        config.model_config.enable_sleep_mode = True
        KVStoreConnector(config, KVConnectorRole.SCHEDULER, CONFIG).shutdown()
        assert sum("fixed_weights" in line for line in caplog.messages) == lines
