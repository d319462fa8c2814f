"""Training continues where it stopped, learns despite rounding, and reads its own model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.replay import train as train_reference
from bench.replay.train import DEPTHS, Schedule, Trainee, batch_of, load_model, read_text, train
from kvstore.reference.config import Mode
from kvstore.reference.engine import ReferenceEngine

SCHEDULE = Schedule(depth="shallow", steps=20, batch=1, tokens=40, rate=5e-3, seed=3)
TEXT = np.frombuffer(b"def square(x):\n    return x * x\n" * 40, np.uint8)


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(train_reference, "read_text", lambda: (TEXT, TEXT))
    monkeypatch.setattr(train_reference, "HELD_OUT_BATCHES", 1)


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    train(SCHEDULE, tmp_path / "whole", save=1, stop=2)
    train(SCHEDULE, tmp_path / "parts", save=1, stop=1)
    train(SCHEDULE, tmp_path / "parts", save=1, stop=2)

    whole, parts = (np.load(tmp_path / name / "state.npz") for name in ("whole", "parts"))
    assert sorted(whole.files) == sorted(parts.files)
    for name in whole.files:
        assert np.array_equal(whole[name], parts[name]), name
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    assert [json.loads(line)["step"] for line in logs[0].splitlines()] == [1, 2]
    assert (tmp_path / "whole" / "loss.svg").read_text().startswith("<svg")

    other = dataclasses.replace(SCHEDULE, rate=1e-3)
    with pytest.raises(ValueError, match="another --out"):
        train(other, tmp_path / "whole", save=1, stop=2)


def test_it_learns_a_text_by_heart() -> None:
    trainee = Trainee(SCHEDULE)
    losses = [
        trainee.learn(batch_of(TEXT, SCHEDULE, 0, step), SCHEDULE.rate_at(step))[0]
        for step in range(12)
    ]

    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


def test_a_gradient_reaches_every_number_that_is_read() -> None:
    trainee = Trainee(SCHEDULE)
    trainee.learn(batch_of(TEXT, SCHEDULE, 0, 0), 0.0)

    missed = [
        name
        for name, tensor in trainee.tensors.items()
        if tensor.grad is None or not bool(tensor.grad.isfinite().all()) or not tensor.grad.any()
    ]
    assert missed == []


def test_it_trains_on_the_numbers_that_the_engine_will_run(tmp_path: Path) -> None:
    """The loss of a sequence's last token is that of the engine's logits, entries in FP4 and all."""
    trainee = Trainee(SCHEDULE)
    for tensor in trainee.tensors.values():
        tensor.data = tensor.data.half().float()  # what a checkpoint holds
    trainee.save_model(tmp_path / "model.npz", SCHEDULE, 0)
    config, weights = load_model(tmp_path / "model.npz", tmp_path / "tables", torch.float32)
    engine = ReferenceEngine(
        config, weights=weights, dtype=torch.float32, tables=tmp_path / "tables"
    )
    sequence = batch_of(TEXT, dataclasses.replace(SCHEDULE, tokens=30), 0, 0)
    with torch.no_grad():
        whole = trainee.loss(sequence, None) * 30
        head = trainee.loss(sequence[:, :-1], None) * 29
    logits = engine.prefill(sequence[0, :-1]).logits
    last = torch.nn.functional.cross_entropy(logits, torch.tensor(int(sequence[0, -1])))

    assert config == DEPTHS["shallow"]
    assert float(whole - head) == pytest.approx(float(last), abs=1e-4)
    # Other weights are other blocks, whatever their config.
    assert (
        engine.namespace
        != ReferenceEngine(config, dtype=torch.float32, tables=tmp_path / "tables").namespace
    )


def test_depths_have_every_kind_of_layer_and_more_to_choose_from_than_is_chosen() -> None:
    for config in DEPTHS.values():
        assert {spec.mode for spec in config.layers} == set(Mode)
        pool = config.candidate_topk_blocks * config.candidate_block_size
        for spec in config.layers:
            if spec.ratio:
                assert 512 // spec.ratio >= 4 * config.index_topk
        assert 512 >= 4 * pool >= 16 * config.index_topk
    assert DEPTHS["deep"].last_owner >= 12


def test_what_is_held_out_is_never_trained_on() -> None:
    trained, held_out = read_text()

    assert len(trained) > 8 * len(held_out) > 1_000_000
    assert bytes(held_out[:2000]) not in bytes(trained)
