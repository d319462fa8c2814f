"""Benchmark of codec quality: comparisons, pairing, and continuation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.codec import quality as codec_quality
from bench.codec.quality import (
    BASELINE,
    RESTORED,
    SCORED,
    Ledger,
    Runner,
    Setting,
    bytes_per_token,
    corpus,
    interval,
    picture,
    run,
    settings,
    student,
    summarise,
    table,
    window,
)
from kvstore.engine.transformers import TransformersAdapter
from tests.engine.tiny import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model

EXACT = Setting("f32", "f32")
TOKENS = np.random.default_rng(3).integers(0, VOCAB, RESTORED + 2 * SCORED + 1)


def test_settings_are_each_format_on_k_on_v_and_on_both() -> None:
    names = [setting.name for setting in settings(["f32", "nvfp4"], ["k", "v", "both"])]
    assert names == ["f32 K+V", "nvfp4 K", "nvfp4 V", "nvfp4 K+V"]
    assert settings(["fp8"], ["v"]) == [Setting("f32", "fp8")]


def test_scored_stretches_tile_the_text_half_prose_half_code() -> None:
    def encode(text: str) -> list[int]:
        return [ord(text[0])] * 5000

    tokens = corpus(encode, 3)
    assert len(tokens) == RESTORED + 3 * SCORED + 1
    assert len(set(tokens[: len(tokens) // 2])) == len(set(tokens[len(tokens) // 2 :])) == 1
    ramp = np.arange(len(tokens))
    targets = [window(ramp, context)[RESTORED + 1 :] for context in range(3)]
    assert np.concatenate(targets).tolist() == list(range(RESTORED + 1, len(tokens)))
    with pytest.raises(SystemExit, match="ask for fewer"):
        corpus(encode, 40)


def measure(tmp_path: Path, chosen: list[Setting], **known: float) -> dict[str, float]:
    with Runner(tiny_model(), chosen, tmp_path) as runner:
        given = {(1, name): nats for name, nats in known.items()}
        return dict(run(runner, TOKENS, chosen, 1, given))


def test_exact_entries_leave_the_loss_alone_and_lossy_ones_do_not(tmp_path: Path) -> None:
    chosen = [EXACT, *settings(["bf16", "nvfp4"], ["k", "v", "both"])]
    nats = measure(tmp_path, chosen)
    assert nats.pop("f32 K+V") == nats[BASELINE]
    baseline = nats.pop(BASELINE)
    assert len(set(nats.values()) - {baseline}) == 6
    off = {name: abs(value - baseline) for name, value in nats.items()}
    assert off["bf16 K+V"] < off["nvfp4 K+V"]


def test_the_baseline_is_the_loss_of_the_whole_context_at_once(tmp_path: Path) -> None:
    nats = measure(tmp_path, [])[BASELINE]
    tokens = torch.from_numpy(window(TOKENS, 1))
    with torch.inference_mode():
        logits = tiny_model()(input_ids=tokens[None, :-1]).logits[0, RESTORED:].double()
    expected = torch.nn.functional.cross_entropy(logits, tokens[RESTORED + 1 :], reduction="sum")
    assert nats == pytest.approx(float(expected), rel=1e-5)


def test_a_store_that_gives_back_other_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TransformersAdapter.capture

    def forged(*arguments: Any) -> Any:
        entries = honest(*arguments)
        entries["v"][1, 7, 3] ^= 1
        return entries

    monkeypatch.setattr(TransformersAdapter, "capture", forged)
    with pytest.raises(SystemExit, match="other keys and values"):
        measure(tmp_path, [EXACT])


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    chosen = settings(["fp8"], ["k", "v"])
    assert set(measure(tmp_path, chosen, **{BASELINE: 1.0, "fp8 K": 2.0})) == {"fp8 V"}
    assert not measure(tmp_path, chosen, **{BASELINE: 1.0, "fp8 K": 2.0, "fp8 V": 3.0})


def test_results_outlive_the_process_and_never_mix_with_another_text(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Ledger(path, {"text": "a"}).add(3, "fp8 K", 1.25)
    again = Ledger(path, {"text": "a"})
    assert again.measured == {(3, "fp8 K"): 1.25}
    with pytest.raises(SystemExit, match="name another file"):
        Ledger(path, {"text": "b"})
    assert not Ledger(None, {}).measured


def test_a_line_cut_short_by_a_kill_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Ledger(path, {"text": "a"}).add(3, "fp8 K", 1.25)
    with path.open("a") as file:
        file.write('{"context": 4, "sett')
    cut = Ledger(path, {"text": "a"})
    assert cut.measured == {(3, "fp8 K"): 1.25}
    cut.add(4, "fp8 K", 2.5)
    assert Ledger(path, {"text": "a"}).measured == {(3, "fp8 K"): 1.25, (4, "fp8 K"): 2.5}


def test_differences_are_paired_by_context() -> None:
    measured = {(c, BASELINE): 100.0 * c for c in range(1, 9)}
    measured |= {(c, "fp8 K"): 100.0 * c + 2.0 for c in (2, 5)}
    sizes = {"fp8 K": 30.0, "bf16 K+V": 40.0, "f32 K+V": 80.0}
    measured |= {(1, "f32 K+V"): 100.0}
    chosen = [EXACT, *settings(["fp8"], ["k", "v"])]
    exact, row = summarise(measured, chosen, sizes, scored=10)
    assert (exact.is_exact, exact.difference, row.is_exact) == (True, 0.0, False)
    assert (row.difference, *(row.interval or ())) == pytest.approx((0.2, 0.2, 0.2))
    assert exact.interval is None
    assert row.baseline_loss == pytest.approx(35.0)
    assert (row.scored_tokens, row.saved) == (20, 0.25)
    assert row.perplexity_ratio == pytest.approx(math.exp(0.2))
    assert len(table([exact, row])) == 3
    assert "fp8" in picture([exact, row])


@pytest.mark.parametrize("count", [3, 6, 40])
def test_an_interval_covers_the_mean_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(1)
    ends = [interval(rng.normal(1.0, 2.0, count)) for _ in range(2000)]
    covered = sum(end is not None and end[0] <= 1.0 <= end[1] for end in ends)
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)
    assert interval(np.array([1.0])) is None


def test_students_t_is_that_of_the_tables() -> None:
    found = [student(freedom) for freedom in (1, 2, 3, 5, 10, 30, 195)]
    assert found == pytest.approx([12.706, 4.303, 3.182, 2.571, 2.228, 2.042, 1.972], abs=0.005)


def test_bytes_count_what_is_left_alone_as_bf16() -> None:
    model = tiny_model()
    values = LAYERS * KV_HEADS * HEAD_DIM
    assert bytes_per_token(model, Setting("bf16", "bf16")) == 4 * values
    assert bytes_per_token(model, EXACT) == 8 * values
    fp8 = LAYERS * (KV_HEADS * HEAD_DIM + 4)
    assert bytes_per_token(model, Setting("fp8", "f32")) == fp8 + 2 * values


def test_an_exact_format_that_was_not_exact_fails_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = {(0, BASELINE): 5.0, (0, "f32 K+V"): 5.0000001}
    rows = summarise(measured, [EXACT], {"f32 K+V": 2.0, "bf16 K+V": 1.0})
    chosen = codec_quality.options(["--json"])
    with pytest.raises(SystemExit, match="bug of kvstore"):
        codec_quality.report(rows, {"text": "t"}, 1, chosen)
    assert json.loads(capsys.readouterr().out)["rows"][0]["setting"] == "f32 K+V"
