"""The command line: exit statuses, one line for an error, and nothing heavy before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import StoreError, cli, demo


def report(**changes: Any) -> demo.Report:
    fields: dict[str, Any] = {
        "engine": "transformers",
        "model": "m",
        "dtype": "float32",
        "threads": 2,
        "prompt_tokens": 300,
        "hit_tokens": 256,
        "replay_tokens": 0,
        "cold_ttft_s": 2.0,
        "warm_ttft_s": 0.1,
        "speedup": 20.0,
        "page_cache": "warm",
        "ttft_parts": dict.fromkeys(demo.STAGES, 0.02),
        "cold_disk_ttft_s": None,
        "cold_disk_parts": None,
        "cold_disk_page_cache": None,
        "pool_ttft_s": None,
        "bytes_per_token": 768.0,
        "ssd_bytes_per_token": 784.0,
        "same_tokens": True,
        "max_logit_diff": 0.0,
        "continuation": "[red]said",
        "replayed_same_tokens": None,
        "replayed_logit_diff": None,
        "unchunked_ttft_s": None,
        "unchunked_logit_diff": None,
    }
    return demo.Report(**{**fields, **changes})


@pytest.fixture
def demo_returns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Make the demo return a value, or raise it if it is an error; return the calls."""

    def install(outcome: Any) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def run_demo(*arguments: Any) -> Any:
            calls.append(arguments)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(demo, "run_demo", run_demo)
        return calls

    return install


def test_help_and_the_command_line_itself_import_no_torch() -> None:
    code = (
        "import sys, kvstore.cli as c; assert c.main(['--help']) == c.main(['demo', '--help']) == 0;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--engine" in done.stdout


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "kvstore", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout[0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--stroe", "x"], "Unknown option: --stroe"),
        (["demo", "--engine", "vllm"], 'Invalid value "vllm" for --engine'),
        (["dmeo"], 'Unknown command "dmeo"'),
        (["demo", "--text", "/does/not/exist"], "cannot read the text file /does/not/exist"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvstore: {complaint}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "complaint"),
    [
        (StoreError("the store\nis gone"), 2, "kvstore: the store is gone\n"),
        (ValueError("found 1, expected 2"), 2, "kvstore: found 1, expected 2\n"),
        (OSError(28, "No space left on device"), 2, "kvstore: [Errno 28] No space left"),
        (KeyboardInterrupt(), 130, "kvstore: interrupted\n"),
    ],
)
def test_every_error_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    complaint: str,
    demo_returns: Callable[[Any], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo_returns(error)
    assert cli.main(["demo"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(complaint)
    assert err.count("\n") == 1


def test_json_is_an_array_and_nothing_else_on_stdout(
    demo_returns: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_returns([report(), report(engine="reference")])
    assert cli.main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [entry["engine"] for entry in json.loads(out)] == ["transformers", "reference"]
    assert err == ""


def test_a_table_has_a_column_for_each_engine_and_a_sentence(
    demo_returns: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_returns([report(), report(engine="reference", continuation="")])
    assert cli.main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "transformers" in out
    assert "answered 20.0 times sooner, 100.0 ms instead of 2.00 s" in out
    assert "'[red]said'" in out  # shown as it is, not taken for markup


def test_a_check_that_fails_is_status_1_and_says_why(
    demo_returns: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_returns([report(same_tokens=False)])
    assert cli.main(["demo", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["same_tokens"] is False
    assert err == (
        "kvstore: transformers: the restored run continued with other tokens than the cold run\n"
    )


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ([], ("transformers", "reference")),
        (["--engine", "all"], ("transformers", "reference")),
        (["--engine", "reference"], ("reference",)),
    ],
)
def test_options_reach_the_demo(
    option: list[str],
    names: tuple[str, ...],
    demo_returns: Callable[[Any], list[tuple[Any, ...]]],
    tmp_path: Path,
) -> None:
    (tmp_path / "text").write_text("words")
    calls = demo_returns([report()])
    cli.main(["demo", *option, "--text", str(tmp_path / "text"), "--store", str(tmp_path)])
    assert calls[0][:3] == (names, "words", tmp_path)
