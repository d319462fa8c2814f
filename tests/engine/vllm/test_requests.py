"""Requests with wishes, requests that are stopped, and a store that fails, inside vLLM."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, StreamingUpdate

import kvstore
from kvstore.cache.jobs import Jobs
from kvstore.engine.vllm import worker as worker_module
from kvstore.engine.vllm.groups import engine_layout
from kvstore.engine.vllm.images import Images
from kvstore.engine.vllm.messages import WorkerReport
from kvstore.engine.vllm.scheduler import SchedulerSide
from kvstore.transfer.job import Job
from tests.engine.vllm.engine import BLOCK, ask, connectors, engine, prompt, save_model
from tests.stores import writer_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def blocks(llm: Any) -> int:
    store = connectors(llm)[1]._stores[0]
    store.flush()
    return int(store.stats()["tiers"]["ssd"]["blocks"])


def test_wishes_of_requests(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(model, tmp_path / "s") as llm:
        _, worker = connectors(llm)
        store = worker._stores[0]
        # Nothing is kept of a request that does not want it.
        ask(llm, [prompt(300, seed=1)], hints={"store": False})
        assert blocks(llm) == 0
        # A hint that nobody understands costs the hint, not the request.
        ask(llm, [prompt(300, seed=2)], hints={"forever": True})
        assert blocks(llm) == 2
        [said] = [r for r in caplog.records if "unknown hints forever" in r.getMessage()]
        assert said.exc_info is None, "one line that says what was wrong"
        ask(llm, [prompt(300, seed=3)], hints={"ttl": 60})
        ask(llm, [prompt(300, seed=4)], hints={"pin": True})
        store.flush()
        expiries = {}
        for seed in (2, 3, 4):
            prefix = store.probe(prompt(300, seed=seed)).prefix
            record = writer_of(store).ssd.record(prefix.key(1))
            assert record is not None
            expiries[seed] = record
        assert not expiries[2].expires
        assert expiries[3].expires
        store.unpin(prompt(300, seed=4))  # raises nothing: it was pinned

        # Logits of every row, or a fresh computation: vLLM must run the whole prompt.
        for options in ({"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}):
            llm.reset_prefix_cache()
            assert ask(llm, [prompt(300, seed=2)], **options)[0][1] == 0
        llm.reset_prefix_cache()
        assert ask(llm, [prompt(300, seed=2)])[0][1] == 256


def test_events_name_what_was_stored(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, tmp_path / "s") as llm:
        scheduler, worker = connectors(llm)
        side = scheduler.scheduler_side
        side._sends_events = True
        events: list[Any] = []
        side_take = scheduler.take_events

        def take() -> tuple[()]:
            events.extend(side_take())
            return ()

        monkeypatch.setattr(scheduler, "take_events", take)
        ask(llm, [prompt(300, seed=1)])
        [stored] = events
        assert isinstance(stored, BlockStored)
        prefix = worker._stores[0].probe(prompt(300, seed=1)).prefix
        assert stored.block_hashes == list(prefix.hashes)
        assert stored.token_ids == prompt(256, seed=1)
        assert (stored.parent_block_hash, stored.block_size) == (None, BLOCK)
        llm.reset_prefix_cache(reset_connector=True)
        events.extend(side_take())
        assert isinstance(events[-1], AllBlocksCleared)


def test_new_weights_make_everything_a_miss_for_good(model: str, tmp_path: Path) -> None:
    ids = [prompt(300, seed=1)]
    with engine(model, tmp_path / "s") as llm:
        [(tokens, _)] = ask(llm, ids)
        ask(llm, ids, salt="s")
        generation = connectors(llm)[1]._stores[0].namespace.generation
        assert llm.reset_prefix_cache(reset_connector=True)
        assert ask(llm, ids) == [(tokens, 0)]
        assert connectors(llm)[1]._stores[0].namespace.generation == generation + 1
        llm.reset_prefix_cache()
        assert ask(llm, ids) == [(tokens, 256)], "stored anew under the new weights"
    with engine(model, tmp_path / "s") as llm:
        # The new weights were in memory only, and the old blocks were given up.
        assert ask(llm, ids) == [(tokens, 0)]
        assert ask(llm, ids, salt="s") == [(tokens, 0)]
        llm.reset_prefix_cache()
        assert ask(llm, ids, salt="s") == [(tokens, 256)]


@pytest.mark.parametrize("is_fixed", [False, True])
def test_an_engine_that_slept_finds_what_was_stored_where_weights_are_fixed(
    model: str, tmp_path: Path, *, is_fixed: bool
) -> None:
    extra = {"fixed_weights": is_fixed}
    with engine(model, tmp_path / "s", extra=extra) as llm:
        core = llm.llm_engine.engine_core.engine_core
        [(tokens, _)] = ask(llm, [prompt(300)])
        core.sleep(1)  # a CPU gives nothing up, but the connector is told alike
        core.wake_up()
        assert ask(llm, [prompt(300)]) == [(tokens, 256 if is_fixed else 0)]


def test_preempted_requests_answer_alike(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(250 + 10 * seed, seed=seed) for seed in range(6)]
    with engine(model, enable_prefix_caching=False) as llm:
        cold = [tokens for tokens, _ in ask(llm, prompts, count=150)]
    with engine(model, tmp_path / "s", num_gpu_blocks_override=12, max_model_len=600) as llm:
        worker = connectors(llm)[1].worker_side
        seen: set[str] = set()
        begin, run_save = worker.begin, Jobs._save

        def slow(jobs: Jobs, job: Job, save: Any) -> None:
            time.sleep(0.05)  # a disk that is slower than the engine
            run_save(jobs, job, save)

        monkeypatch.setattr(Jobs, "_save", slow)

        def watch(plan: Any) -> None:
            seen.update(plan.preempted)
            begin(plan)
            for name in plan.preempted:
                assert all(save.job.is_cancelled for save in worker._saves.get(name, ()))

        monkeypatch.setattr(worker, "begin", watch)
        assert [tokens for tokens, _ in ask(llm, prompts, count=150)] == cold
        assert seen, "the case that this is about"
    with engine(model, tmp_path / "s", max_model_len=600) as llm:
        found = ask(llm, prompts, count=150)
        assert [tokens for tokens, _ in found] == cold
        assert all(cached for _, cached in found)


def test_aborted_requests_leave_nothing_behind(model: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    with engine(model, tmp_path / "s", max_num_batched_tokens=200) as llm:
        core = llm.llm_engine
        ask(llm, [prompt(700, seed=1)])
        llm.reset_prefix_cache()
        names = [f"r{number}" for number in range(4)]
        places = [(700, 1), (900, 2), (700, 1), (600, 3)]
        for name, (length, seed) in zip(names, places, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt(length, seed)}, params)
            core.step()  # a load is under way, or a prefill
            if name in ("r0", "r2"):
                core.abort_request([name])
        core.step()
        core.abort_request(names)
        scheduler = core.engine_core.engine_core.scheduler
        for _ in range(50):
            if not scheduler.has_requests():
                break
            core.step()
        assert not scheduler.requests
        sides = connectors(llm)
        assert not sides[0].scheduler_side._tracked
        assert not sides[0].scheduler_side._ending
        assert not sides[1].worker_side._loads
        assert not sides[1].worker_side._saves
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_hit_is_the_least_of_all_ranks(tmp_path: Path) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    layout = engine_layout(
        KVCacheConfig(8, [], [KVCacheGroupSpec(["model.layers.0.attn"], spec)]), "one"
    )
    base = kvstore.Namespace(model="m", tenant='["", null]')
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                kvstore.PrefixCache.open(
                    tmp_path / f"r{rank}",
                    layout=layout.layout,
                    namespace=base,
                    block_tokens=layout.block_tokens,
                )
            )
            for rank in range(2)
        ]
        ids = prompt(600)
        for rank, count in zip(ranks, (512, 256), strict=True):
            pages = np.zeros((1, count // 16, 16 * 64 * 4), np.uint8)
            rank.store(ids[:count], {"kv": pages})
            rank.flush()
        side = SchedulerSide(layout, ranks, base, "", sends_events=False)
        params = SamplingParams(max_tokens=1)
        request = Request("r", ids, params, None)
        side.add(request)
        assert side.matched(request, 0) == 256
        assert side.matched(request, 96) == 160
        assert side.matched(request, 512) == 0
        # A save is over when both ranks have answered, and counts as far as the slower one came.
        side.admit(request, (tuple(range(40)),), 0)
        plan = side.plan([("r", 600)], (), lambda _: (list(range(40)),))
        [save] = plan.saves
        assert (save.start, save.stop) == (0, 512)
        side.take_report(WorkerReport({"r": [512]}), (), ())
        assert side.finish(request, (tuple(range(40)),)), "one rank still reads the blocks"


def scheduler_side(stack: ExitStack, path: Path, **options: Any) -> SchedulerSide:
    """Return a scheduler's side over a store of its own."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    layout = engine_layout(
        KVCacheConfig(8, [], [KVCacheGroupSpec(["model.layers.0.attn"], spec)]), "one"
    )
    base = kvstore.Namespace(model="m", tenant='["", null]')
    store = stack.enter_context(
        kvstore.PrefixCache.open(
            path, layout=layout.layout, namespace=base, block_tokens=layout.block_tokens
        )
    )
    return SchedulerSide(layout, [store], base, "", **{"sends_events": False, **options})


def image(offset: int, length: int, name: str, value: float | None = 1.0) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    data = None
    if value is not None:
        element = MultiModalFieldElem(torch.full((4, 4), value), MultiModalBatchedField())
        data = MultiModalKwargsItem({"pixel_values": element})
    return MultiModalFeatureSpec(data, "image", name, place)


def go_on(request: Request, ids: list[int], images: list[MultiModalFeatureSpec]) -> None:
    """Give a session its next input, as vLLM's scheduler does."""
    scheduler = SimpleNamespace(hash_block_size=16, log_stats=False)
    update = StreamingUpdate(images, ids, 1, 0.0, request.sampling_params)
    Scheduler._update_request_as_session(scheduler, request, update)


def test_the_next_input_of_a_session_is_stored_as_what_it_is(tmp_path: Path) -> None:
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path)
        request = Request("r", prompt(127), SamplingParams(max_tokens=1), None, resumable=True)
        table = [list(range(40))]
        side.add(request)
        side.admit(request, (tuple(table[0]),), 0)
        assert not side.plan([("r", 127)], (), lambda _: table).saves
        request.num_computed_tokens = 127
        request.append_output_token_ids(5)
        assert side.matched(request, 0) == 0, "after it looked at all tokens"
        go_on(request, [6], [])  # in place of the 5, which was never run
        [save] = side.plan([("r", 1)], (), lambda _: table).saves
        assert save.tokens.tolist() == [*prompt(127), 6]
        request.num_computed_tokens = 128
        side.take_report(WorkerReport({"r": [128]}), (), ())
        # Pictures of one size have equal tokens.
        picture = image(10, 100, "picture")
        go_on(request, [1] * 128, [picture])
        [save] = side.plan([("r", 128)], (), lambda _: table).saves
        [span] = save.images
        assert (span.start, span.stop) == (138, 238)
        assert span.digest == Images().digest(picture)


@pytest.mark.parametrize("fails", [False, True])
def test_an_image_that_cannot_be_named_costs_hits_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path)
        params = SamplingParams(max_tokens=1)
        nameless = [image(10, 100, "picture", 1.0 if fails else None)]
        if fails:
            monkeypatch.setattr(Images, "digest", _raise)
        request = Request("r", prompt(300), params, None, mm_features=nameless)
        table = [list(range(40))]
        side.add(request)
        assert side.matched(request, 0) == 0
        side.admit(request, (tuple(table[0]),), 0)
        assert not side.plan([("r", 300)], (), lambda _: table).saves
        side.finish(request, (tuple(table[0]),))
        counts = side.stats().data
        assert counts["digest_faults" if fails else "unknown_images"] == 1


def test_an_adapter_loaded_in_place_is_another_one(tmp_path: Path) -> None:
    adapter = tmp_path / "a"
    adapter.mkdir()
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path / "s")
        found = []
        for number, (weights, in_place) in enumerate([(b"1", False), (b"2", False), (b"2", True)]):
            (adapter / "adapter_model.safetensors").write_bytes(weights)
            lora = LoRARequest("a", 1, str(adapter), load_inplace=in_place)
            request = Request(
                str(number), prompt(300), SamplingParams(max_tokens=1), None, lora_request=lora
            )
            side.add(request)
            found.append(side._tracked[str(number)].namespace)
        assert found[0] == found[1], "vLLM goes on with what it loaded"
        assert found[0] != found[2]


def test_new_weights_on_a_disk_that_fails_hit_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path)
        [store] = side._readers
        store.store(prompt(256), {"kv": np.zeros((1, 16, 16 * 64 * 4), np.uint8)})
        store.flush()
        request = Request("r", prompt(300), SamplingParams(max_tokens=1), None)
        side.add(request)
        assert side.matched(request, 0) == 256
        monkeypatch.setattr(store, "scope", _raise)
        side.reset()
        assert side.matched(request, 0) == 0
        assert side.faults.counts["weight update_faults"] == 1


def test_blocks_that_come_free_soon_are_waited_for_a_moment(tmp_path: Path) -> None:
    now = 0.0
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path, clock=lambda: now)
        table = (tuple(range(40)),)
        for number in range(2):
            request = Request(str(number), prompt(300), SamplingParams(max_tokens=1), None)
            side.add(request)
            side.admit(request, table, 0)
            side.plan([(str(number), 300)], (), lambda _: table)
            assert not side.frees_blocks_soon(), "its blocks are its own"
            assert side.finish(request, table)
            assert side.frees_blocks_soon()
            now += 1.0
            assert not side.frees_blocks_soon(), "a disk that hangs must not hold up the engine"
        side.take_report(None, (), ["0", "1"])
        now -= 1.0
        assert not side.frees_blocks_soon()


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_reset_before_sleep_saves_no_block_that_is_gone_afterwards(
    tmp_path: Path, *, is_fixed: bool
) -> None:
    """An engine in this process resets between the end of its requests and its sleep."""
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path, has_fixed_weights=is_fixed)
        [store] = side._readers
        store.store(prompt(256), {"kv": np.zeros((1, 16, 16 * 64 * 4), np.uint8)})
        store.flush()
        table = (tuple(range(40)),)
        request = Request("r", prompt(300, seed=2), SamplingParams(max_tokens=1), None)
        side.add(request)
        side.admit(request, table, 0)
        side._tracked["r"].final = 300  # it has run, and its save is planned with the next step
        assert side.finish(request, table), "vLLM keeps its blocks until workers say so"
        side.reset()
        plan = side.plan([], (), lambda _: table)
        assert not plan.saves
        assert plan.awaited == {"r"}, "workers let go of its blocks at once"
        assert (plan.update is None) == is_fixed
        later = Request("s", prompt(300), SamplingParams(max_tokens=1), None)
        side.add(later)
        assert side.matched(later, 0) == (256 if is_fixed else 0)


def test_a_worker_that_lacks_its_store_is_promised_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        side = scheduler_side(stack, tmp_path)
        [store] = side._readers
        store.store(prompt(256), {"kv": np.zeros((1, 16, 16 * 64 * 4), np.uint8)})
        store.flush()
        request = Request("r", prompt(300), SamplingParams(max_tokens=1), None)
        side.add(request)
        assert side.matched(request, 0) == 256
        report = WorkerReport().aggregate(WorkerReport(lacks_store=True))
        assert not report.is_empty
        side.take_report(report, (), ())
        assert side.matched(request, 0) == 0


class _Stuck(Job):
    """A job on a disk that hangs, until it is cancelled."""

    def wait(self, timeout: float = 0.0) -> bool:
        return self.is_cancelled

    @property
    def done(self) -> bool:
        return self.is_cancelled

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_store_that_fails_costs_hits_and_nothing_else(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [prompt(300, seed=1), prompt(400, seed=2)]
    with engine(model, tmp_path / "s") as llm:
        worker = connectors(llm)[1].worker_side
        with monkeypatch.context() as patch:
            patch.setattr(kvstore.PrefixCache, "scope", _raise)
            cold = ask(llm, ids)  # neither lookup nor save
            assert [cached for _, cached in cold] == [0, 0]
        answers = [tokens for tokens, _ in cold]
        for work, name in (("save", "save"), ("load", "load"), ("lookup", "probe")):
            llm.reset_prefix_cache()
            with monkeypatch.context() as patch:
                patch.setattr(kvstore.cache.Scope, name, _raise)
                found = ask(llm, ids)
                assert [tokens for tokens, _ in found] == answers, work
            llm.reset_prefix_cache()
            assert [tokens for tokens, _ in ask(llm, ids)] == answers
        assert ("save", OSError) in worker.faults._logged
        assert ("load", OSError) in worker.faults._logged
        # A disk that hangs: the request waits for the deadline and is computed.
        llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "JOB_SECONDS", 0.0)
            patch.setattr(kvstore.cache.Scope, "load", lambda *_args, **_options: _Stuck())
            assert [tokens for tokens, _ in ask(llm, ids)] == answers
        assert not worker._loads


def _raise(*_args: Any, **_options: Any) -> Any:
    msg = "the disk is gone"
    raise OSError(msg)
