"""A dense model in vLLM: the same tokens with and without a store, whatever happens to it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine", "vllm.lora.request")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from kvstore.engine.vllm.messages import StepPlan, Work
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import head_sum
from kvstore.identity.block import BlockKey
from kvstore.tier.ssd.tier import SsdTier
from kvstore.tier.ssd.values import Put
from tests.engine.vllm.engine import BLOCK, ask, connectors, engine, prompt, save_model
from tests.stores import inside, writer_of

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (1, 5, 127, 128, 129, 255, 256, 257, 300, 384, 385, 700)
Answers = dict[int, tuple[int, ...]]


def hit_of(length: int) -> int:
    return (length - 1) // BLOCK * BLOCK


def each(llm: Any, lengths: tuple[int, ...] = LENGTHS) -> dict[int, tuple[tuple[int, ...], int]]:
    """Prompts of one length each that share nothing, in one batch."""
    prompts = [prompt(length, seed=length) for length in lengths]
    return dict(zip(lengths, ask(llm, prompts), strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def cold(model: str) -> Answers:
    """The answers of vLLM without any cache."""
    with engine(model, enable_prefix_caching=False) as llm:
        answers = {length: tokens for length, (tokens, _) in each(llm).items()}
        shared = list(range(100, 800, 100))
        found = ask(llm, [prompt(length, seed=0) for length in shared])
        return answers | {
            -length: tokens for length, (tokens, _) in zip(shared, found, strict=True)
        }


@pytest.fixture(scope="module")
def filled(model: str, cold: Answers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all those prompts, written by an engine that has ended."""
    store = tmp_path_factory.mktemp("store") / "s"
    with engine(model, store) as llm:
        for length, (tokens, cached) in each(llm).items():
            assert (tokens, cached) == (cold[length], 0), length
        ask(llm, [prompt(700, seed=0)])
        assert not connectors(llm)[0].scheduler_side._ending
    return store


def test_every_length_hits_all_its_blocks_after_a_restart(
    model: str, cold: Answers, filled: Path
) -> None:
    with engine(model, filled) as llm:
        for length, (tokens, cached) in each(llm).items():
            assert (tokens, cached) == (cold[length], hit_of(length)), length
        worker = connectors(llm)[1].worker_side
        assert not worker._loads
        assert not worker._saves
        assert not worker._awaited


def test_a_load_begins_where_the_local_cache_ends(
    model: str, cold: Answers, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks below are other requests' as well: not one byte of them changes."""
    with engine(model, filled) as llm:
        scheduler, worker = connectors(llm)
        pages = worker.worker_side._pages["kv"]
        loads: list[tuple[Work, list[torch.Tensor]]] = []
        start_load = worker.worker_side._start_load

        def watch(work: Work, after: Any) -> Any:
            below = list(work.blocks[0][: work.start // BLOCK])
            loads.append((work, [page[below].clone() for page in pages]))
            for page in pages:  # what a load must leave alone is worth noticing
                page[below] = 0x5A
            return start_load(work, after)

        monkeypatch.setattr(worker.worker_side, "_start_load", watch)
        found = ask(llm, [prompt(300, seed=0)], count=1)  # 256 of it are in the store
        assert found[0][1] == 256
        (work, _), *_ = loads
        assert (work.start, work.stop) == (0, 256)
        found = ask(llm, [prompt(500, seed=0)])
        work, kept = loads[1]
        assert (work.start, work.stop) == (256, 384)
        below = list(work.blocks[0][: work.start // BLOCK])
        for page in pages:
            assert bool((page[below] == 0x5A).all())
        assert found[0][1] == 384
        assert scheduler.scheduler_side is not None
        assert kept


def test_pages_of_32_tokens_with_blocks_of_128(
    model: str, cold: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local hit of 160 tokens ends inside a block of the store."""
    with engine(model, tmp_path / "s", block_size=32) as llm:
        assert ask(llm, [prompt(700, seed=0)]) == [(cold[-700], 0)]
    with engine(model, tmp_path / "s", block_size=32) as llm:
        worker = connectors(llm)[1].worker_side
        assert worker.engine.block_tokens == BLOCK
        salted = ask(llm, [prompt(200, seed=0)[:170] + [3] * 9], count=1)
        assert salted[0][1] == 128
        plans: list[StepPlan] = []
        load = worker.load

        def watch(plan: StepPlan) -> None:
            plans.append(plan)
            load(plan)

        monkeypatch.setattr(worker, "load", watch)
        # Locally there are 160 tokens of it: five pages.
        assert ask(llm, [prompt(500, seed=0)]) == [(cold[-500], 384)]
        assert [(w.start, w.stop) for plan in plans for w in plan.loads] == [(160, 384)]
        assert ask(llm, [prompt(n, seed=0) for n in (600, 700)]) == [
            (cold[-600], 512),
            (cold[-700], 640),
        ]


def test_chunks_that_end_inside_a_block_and_several_requests_in_a_step(
    model: str, cold: Answers, tmp_path: Path
) -> None:
    options = {"max_num_batched_tokens": 200, "max_num_seqs": 4}
    shared = range(300, 800, 100)
    for expected in (False, True):
        with engine(model, tmp_path / "s", **options) as llm:
            found = ask(llm, [prompt(length, seed=0) for length in shared])
            assert [tokens for tokens, _ in found] == [cold[-length] for length in shared]
            if expected:
                assert [cached for _, cached in found] == [hit_of(length) for length in shared]


def test_generated_tokens_are_stored_when_they_complete_a_block(model: str, tmp_path: Path) -> None:
    start = prompt(120, seed=9)
    with engine(model, tmp_path / "s") as llm:
        [(tokens, _)] = ask(llm, [start], count=40)
    with engine(model, tmp_path / "s") as llm:
        [(rest, cached)] = ask(llm, [start + list(tokens[:20])], count=20)
        assert (rest, cached) == (tokens[20:], BLOCK)


# ---- identity ----------------------------------------------------------------------------------


def save_adapter(folder: Path, seed: int) -> str:
    """Save a LoRA adapter of the value projections and return its folder."""
    folder.mkdir()
    torch.manual_seed(seed)
    name = "base_model.model.model.layers.{}.self_attn.v_proj.lora_{}.weight"
    weights = {}
    for layer in range(3):
        weights[name.format(layer, "A")] = torch.randn(8, 128)
        weights[name.format(layer, "B")] = torch.randn(64, 8)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_salt_adapter_and_tenant_keep_blocks_apart(
    model: str, cold: Answers, filled: Path, tmp_path: Path
) -> None:
    one, two = save_adapter(tmp_path / "a", 1), save_adapter(tmp_path / "b", 2)
    ids, hit = [prompt(300, seed=300)], 256
    with engine(model, filled, enable_lora=True, max_lora_rank=8) as llm:
        assert ask(llm, ids, salt="x") == [(cold[300], 0)]
        [(first, cached)] = ask(llm, ids, lora=LoRARequest("a", 1, one))
        assert cached == 0
        assert first != cold[300]
        assert ask(llm, ids, lora=LoRARequest("a", 2, two))[0][1] == 0
    with engine(model, filled, enable_lora=True, max_lora_rank=8) as llm:
        assert ask(llm, ids, salt="x") == [(cold[300], hit)]
        assert ask(llm, ids, salt="y") == [(cold[300], 0)]
        assert ask(llm, ids, lora=LoRARequest("a", 7, one)) == [(first, hit)]
        assert ask(llm, ids) == [(cold[300], hit)]
    with engine(model, filled, extra={"tenant": "t"}) as llm:
        assert ask(llm, ids) == [(cold[300], 0)]
        assert ask(llm, [prompt(257, seed=257)], salt="x") == [(cold[257], 0)]


def test_a_store_with_a_secret_hits_after_a_restart_and_not_without_it(
    model: str, cold: Answers, tmp_path: Path
) -> None:
    ids = [prompt(300, seed=300)]
    for extra, hit in (({"secret": True}, 0), ({"secret": True}, 256), ({}, 0)):
        with engine(model, tmp_path / "s", extra=extra) as llm:
            assert ask(llm, ids) == [(cold[300], hit)]


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"block_size": 64}, {"hf_overrides": {"rope_theta": 5e4}}]
)
def test_another_way_to_compute_is_a_miss(
    model: str, filled: Path, options: dict[str, Any]
) -> None:
    with engine(model, filled, **options) as llm:
        assert ask(llm, [prompt(300, seed=300)])[0][1] == 0


def test_another_models_folder_is_a_miss_and_stays_as_it_is(
    filled: Path, cold: Answers, tmp_path: Path
) -> None:
    before = (filled / "rank-0-of-1" / "VERSION").read_bytes()
    revision = save_model(tmp_path / "revision", "llama", seed=8)
    with engine(revision, filled) as llm:
        [(tokens, cached)] = ask(llm, [prompt(385, seed=385)])
        assert cached == 0
        assert tokens != cold[385]
    other = save_model(tmp_path / "other", "gpt_oss")
    with engine(other, filled) as llm:
        assert ask(llm, [prompt(300, seed=300)])[0][1] == 0
        llm.reset_prefix_cache()
        assert ask(llm, [prompt(300, seed=300)])[0][1] == 0
    assert (filled / "rank-0-of-1" / "VERSION").read_bytes() == before


# ---- damage ------------------------------------------------------------------------------------


def blocks_of(llm: Any, ids: list[int]) -> tuple[SsdTier, list[BlockKey]]:
    """The SSD tier of the worker's store, and the keys of a prompt's blocks."""
    store = connectors(llm)[1]._stores[0]
    prefix = store.probe(ids).prefix
    return writer_of(store).ssd, [prefix.key(number) for number in range(len(prefix.hashes))]


def overwrite(ssd: SsdTier, key: BlockKey, frame: bytearray) -> None:
    record = ssd.record(key)
    assert record is not None
    ssd.put([Put(key, dataclasses.replace(record, page=0, head_sum=head_sum(frame)), frame)])


def test_a_corrupted_block_shortens_the_hit(model: str, cold: Answers, filled: Path) -> None:
    with engine(model, filled) as llm:
        ssd, keys = blocks_of(llm, prompt(385, seed=385))
        damaged = bytearray(ssd.frame(keys[1]) or b"")
        damaged[-5] ^= 1
        overwrite(ssd, keys[1], damaged)
        found = ask(llm, [prompt(385, seed=385), prompt(257, seed=257)])
        assert [tokens for tokens, _ in found] == [cold[385], cold[257]]
        assert found[1][1] == 256
        stats = connectors(llm)[1]._stores[0].stats()
        assert stats["counters"]["corrupt_blocks"]["total"] == 1
        llm.reset_prefix_cache()
        # It was computed again, and stored again.
        assert ask(llm, [prompt(385, seed=385)]) == [(cold[385], 384)]


def test_a_forged_block_changes_the_tokens(model: str, cold: Answers, filled: Path) -> None:
    """The negative control: the comparison of tokens detects wrong bytes with valid checksums."""
    with engine(model, filled) as llm:
        ssd, keys = blocks_of(llm, prompt(385, seed=385))
        frame_format = inside(connectors(llm)[1]._stores[0]).format
        right, other = ssd.frame(keys[1]), ssd.frame(keys[0])
        assert isinstance(frame_format, FrameFormat)
        assert right is not None
        assert other is not None
        overwrite(ssd, keys[1], frame_format.forge(right, other))
        [(tokens, cached)] = ask(llm, [prompt(385, seed=385)])
        overwrite(ssd, keys[1], bytearray(right))
        assert cached == 384
        assert tokens != cold[385]
        llm.reset_prefix_cache()
        assert ask(llm, [prompt(385, seed=385)]) == [(cold[385], 384)]
