"""The command line: exit statuses, one line for an error, and nothing heavy before it is needed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvstore import StoreError
from kvstore.cli import main as cli
from kvstore.cli.demo import measure
from kvstore.cli.demo.report import STAGES, Report


def report(**changes: Any) -> Report:
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
        "ttft_parts": dict.fromkeys(STAGES, 0.02),
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
    return Report(**{**fields, **changes})


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

        monkeypatch.setattr(measure, "run_demo", run_demo)
        return calls

    return install


def test_help_and_the_command_line_itself_import_no_torch() -> None:
    code = (
        "import sys, kvstore.cli.main as c; assert c.main(['--help']) == c.main(['demo', '--help']) == 0;"
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
    assert "is 20.0 times faster, 100.0 ms instead of 2.00 s" in out
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


# ---- traces ------------------------------------------------------------------------------------

TRACE_ROWS = [
    {"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 7, "input_length": 8, "output_length": 0, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 12, "output_length": 5, "hash_ids": [0, 1, 3]},
]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({**row, "block_size": 4}) + "\n" for row in TRACE_ROWS))
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    assert cli.main([str(each) for each in arguments]) == status
    out, err = capsys.readouterr()
    assert (err == "") == (status == 0)
    return out if status == 0 else err


def test_simulate_prints_rows_and_what_they_say(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policy", "lru, optimal", "--size", "50%,2b,16KiB", "--bytes-per-token", "1024"]
    found = json.loads(printed(capsys, "simulate", trace_file, *arguments, "--json"))
    assert set(found) == {
        "schema", "trace", "parameters", "seed", "command", "version", "rows", "ceiling", "ceilings", "lru_curve",
        "recommendation", "hints",
    }  # fmt: skip
    assert found["schema"] == 1
    assert found["trace"]["sha256"] == hashlib.sha256(trace_file.read_bytes()).hexdigest()
    assert found["parameters"]["size"] == "50%,2b,16KiB"
    assert [(row["policy"], row["size_blocks"]) for row in found["rows"]] == [
        (policy, blocks) for policy in ("lru", "optimal") for blocks in (2, 2, 4)
    ]
    assert set(found["rows"][0]) == {
        "trace", "policy", "size_blocks", "size_fraction", "prefix_hit_ratio",
        "prefix_token_hit_ratio", "block_hit_ratio", "requests_with_hit_ratio", "window",
    }  # fmt: skip
    assert found["rows"][2]["prefix_hit_ratio"] == 0.5
    table = printed(capsys, "simulate", trace_file, *arguments)
    assert "optimal" in table
    assert "50.00%" in table
    assert "90% of infinite cache" in table


def test_simulate_has_an_object_for_each_of_several_traces(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(
        printed(capsys, "simulate", trace_file, trace_file, "--semantics", "flat",
                "--warmup", "0.5", "--policy", "lru", "--size", "2b", "--json")
    )  # fmt: skip
    assert [each["rows"][0]["window"] for each in found] == ["last_half", "last_half"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--policy", "mru"], "no policy named 'mru'"),
        (["--size", "5"], "expected a size such as 5%"),
        (["--size", "1GiB"], "needs the bytes per token: give --model or --bytes-per-token"),
        (["--block-size", "2"], "chat.jsonl, line 2: 2 block ids for 8 tokens|line 1"),
        (["--block-size", "-1"], "must be above 0 and below"),
        (["--bytes-per-token", "nan"], "must be above 0 and below"),
        (["--warmup", "1"], "the warm-up is a share of the requests"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--curve", "--size", "5%"], "--curve sets the sizes itself"),
        (["--model", "nothing"], "neither a preset"),
        (["--model", "smollm2-135m", "--bytes-per-token", "1"], "leave out --bytes-per-token"),
        (["--prefill-tps", "9"], "give --model or --bytes-per-token too"),
        (["--bytes-per-token", "9", "--bandwidth", "1GB/s"], "give --prefill-tps too"),
        (["--window-ttl", "300s"], "a window pool needs --window-tokens"),
        (
            ["--window-tokens", "9", "--window-bytes", "1MiB"],
            "needs the bytes per token: give --model or --bytes-per-token",
        ),
        (["--window-tokens", "9", "--window-bytes", "9b"], "as 2GiB or 10%"),
        (["--window-tokens", "0"], "must be above 0 and below"),
        (["--tier", "ssd=5"], "expected a size such as"),
        (["--exclusive", "--tier", "a=1b", "--tier", "b=1b,write=through"], "tiers are exclusive"),
        (["--format", "lmcache"], "line 1: expected a number as seq_len"),
    ],
)
def test_simulate_says_what_it_cannot_use(
    trace_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    size = (
        [] if "--block-size" in arguments else ["--policy", "lru"][: 2 * ("mru" not in arguments)]
    )
    if arguments == ["--block-size", "2"]:
        trace_file.write_text(json.dumps({**TRACE_ROWS[0], "input_length": 4}) + "\n")
    err = printed(capsys, "simulate", trace_file, *size, *arguments, status=2)
    assert re.search(fault, err)


def test_a_bad_trace_is_exit_two_with_its_line(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_file.write_text(trace_file.read_text() + "{}\n")
    for command in ("simulate", "info"):
        words = ["trace"] * (command == "info") + [command]
        err = printed(capsys, *words, trace_file, status=2)
        assert "chat.jsonl, line 4: expected" in err
        assert err.count("\n") == 1
    assert "TRACES is missing; see kvstore simulate --help" in printed(capsys, "simulate", status=2)


EVERYTHING = [
    *("--policy", "lru,arc,optimal", "--size", "50%", "--model", "deepseek-v4.1-flash"),
    *("--prefill-tps", "1000", "--bandwidth", "1GB/s", "--warmup", "0.25"),
    *("--tier", "device=1b@200GB/s", "--tier", "ssd=3b@3GB/s,write=on-evict", "--exclusive"),
    *("--window-ttl", "77s", "--window-bytes", "50%"),
]


def test_simulate_answers_everything_at_once_and_the_same_in_any_number_of_processes(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "simulate", trace_file, *EVERYTHING, "--json")
    assert text == printed(capsys, "simulate", trace_file, *EVERYTHING, "--json", "--jobs", "3")
    found = json.loads(text)
    assert found["rows"][0]["window"] == "last_75%"
    assert [cost["policy"] for cost in found["costs"]] == ["lru", "arc", "optimal"]
    assert {"mean", "p50", "p95", "p99"} == set(found["costs"][0]["ttft_seconds"])
    assert found["lru_curve"][-1]["size_bytes"] == 890 * 4 * found["lru_curve"][-1]["size_blocks"]
    assert [each["policy"] for each in found["hierarchies"]] == ["lru", "arc"]
    assert [tier["name"] for tier in found["hierarchies"][0]["tiers"]] == ["device", "ssd"]
    assert found["window_pool"]["window_tokens"] == 128
    assert found["window_pool"]["replay_seconds"] == found["window_pool"]["replayed_tokens"] / 1000
    said = " / ".join(found["recommendation"]["text"])
    for part in (
        "of an infinite cache's hits",
        "of SSD",
        "window TTL",
        "need no replay",
        "per day to ssd",
        "no queue",
    ):
        assert part in said
    table = printed(capsys, "simulate", trace_file, *EVERYTHING)
    for part in ("capacity gap", "busiest", "without replay", "Hints", "no cache", "last half"):
        assert part in table
    assert table.rstrip().endswith(found["recommendation"]["command"])


def test_the_command_that_is_recommended_shows_what_it_recommends(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, "simulate", trace_file, *EVERYTHING, "--json"))
    wanted = found["recommendation"]
    words = shlex.split(wanted["command"])
    assert words[:2] == ["kvstore", "simulate"]
    again = json.loads(printed(capsys, *words[1:], "--json"))
    choice = wanted["choice"]
    row, ceiling = again["rows"][0], again["ceiling"]
    assert len(again["rows"]) == 1
    for field in ("policy", "size_blocks", "prefix_token_hit_ratio"):
        assert row[field] == choice[field]
    assert row["prefix_hit_ratio"] >= 0.9 * ceiling["prefix_hit_ratio"]
    assert again["hierarchies"][0] == found["hierarchies"][0]
    assert again["window_pool"]["ttl_seconds"] == wanted["window"]["ttl_seconds"]
    assert again["window_pool"]["kept"] == wanted["window"]["kept"]


@pytest.mark.parametrize(
    "words", [[], ["--semantics", "flat"], ["--request-share", "0.4"], ["--warmup", "0.5"]]
)
@pytest.mark.parametrize("policy", ["lru,lfu,s3fifo,optimal", "s3fifo", "optimal"])
def test_table_json_and_page_have_one_decision_and_its_command(
    words: list[str], policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "t", tmp_path / "page"
    write_hot_and_once(path)
    given = [] if "flat" in words and policy.endswith("optimal") else ["--policy", policy]
    given = given or ["--policy", "lru,s3fifo"]
    arguments: list[str | Path] = [path, *given, "--size", "20b,50%", *words]
    found = json.loads(printed(capsys, "simulate", *arguments, "--json"))
    choice, command = found["recommendation"]["choice"], found["recommendation"]["command"]
    again = json.loads(printed(capsys, *shlex.split(command)[1:], "--json"))
    (row,) = again["rows"]
    assert (row["policy"], row["size_blocks"]) == (choice["policy"], choice["size_blocks"])
    assert row["prefix_token_hit_ratio"] == choice["prefix_token_hit_ratio"]
    assert row["prefix_hit_ratio"] == pytest.approx(
        choice["share_of_ceiling"] * again["ceiling"]["prefix_hit_ratio"]
    )
    assert choice["share_of_ceiling"] >= 0.9
    table = printed(capsys, "simulate", *arguments, "--html", page)
    (line,) = (line for line in table.splitlines() if line.startswith("- use "))
    size = f"{choice['size_blocks']:,} blocks"
    assert line.startswith(f"- use {choice['policy']} with {size}")
    assert command in table
    html = page.read_text()
    assert f"use {choice['policy']} with {size}" in html
    assert f"Size of {choice['policy']}" in html
    for words_before in ("was not among them", "on average", "is the policy to use"):
        assert words_before not in table + html


def write_hot_and_once(path: Path) -> None:
    """Four prompts that come again and again, and between them what comes once."""
    rows = []
    for number in range(300):
        ids = [10 * (number % 12 // 3) + each for each in range(3)]
        if number % 3:
            ids = [1000 + 10 * number + each for each in range(4)]
        rows.append(
            {"timestamp": number, "input_length": 4 * len(ids), "hash_ids": ids, "block_size": 4}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_curve_has_twelve_sizes(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        printed(capsys, "simulate", trace_file, "--curve", "--policy", "lru", "--json")
    )
    assert len(found["rows"]) == 12
    assert found["rows"][-1]["size_fraction"] == 1.0


def test_rows_are_written_as_csv_whole_or_not_at_all(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    arguments: list[str | Path] = ["--policy", "lru", "--size", "2b,50%", "--csv", out]
    found = json.loads(printed(capsys, "simulate", trace_file, *arguments, "--json"))
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["prefix_hit_ratio"] for row in rows] == [
        str(row["prefix_hit_ratio"]) for row in found["rows"]
    ]
    before = out.read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_text(trace_file.read_text() + "{}\n")
    assert cli.main(["simulate", str(trace_file), str(bad), *map(str, arguments)]) == 2
    said, err = capsys.readouterr()
    assert said == "", "the first trace was printed before the second was read"
    assert "bad.jsonl, line 4" in err
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl", "chat.jsonl", "rows.csv",
    ]  # fmt: skip


def test_the_digest_of_a_directory_is_that_of_its_files(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, "simulate", trace_file.parent, "--policy", "lru", "--json"))
    line = f"{hashlib.sha256(trace_file.read_bytes()).hexdigest()}  chat.jsonl\n"
    assert found["trace"]["sha256"] == hashlib.sha256(line.encode()).hexdigest()


def test_policies_are_listed_with_the_bound_last(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "policies", "--json"))
    assert [row["policy"] for row in found][:3] == ["lru", "arc", "s3fifo"]
    assert found[-1]["policy"] == "optimal"
    assert [row["online"] for row in found] == [True] * (len(found) - 1) + [False]
    assert "a bound" in found[-1]["summary"]
    assert "optimal" in printed(capsys, "policies")


def test_trace_commands_make_traces_that_are_read_again(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl.zst"

    def requests(*arguments: str | Path) -> int:
        found = json.loads(printed(capsys, "trace", *arguments, "--json"))
        facts = json.loads(printed(capsys, "trace", "info", out, "--json"))
        assert facts["requests"] == found["requests"]
        return int(facts["requests"])

    assert requests("convert", trace_file, out) == 3
    assert requests("head", trace_file, out, "--requests", "2") == 2
    assert requests("merge", trace_file, trace_file, "--output", out, "--spread", "9") == 6
    assert requests("sample", trace_file, out, "--share", "1") == 3
    assert "requests" in printed(capsys, "trace", "info", trace_file)
    err = printed(capsys, "trace", "head", trace_file, out, "--requests", "0", status=2)
    assert "--requests must be at least 1" in err


@pytest.mark.parametrize(
    "command",
    [
        ("head", "--requests", "1"),
        ("sample", "--share", "1"),
        ("merge", "--spread", "1"),
        ("convert",),
    ],
    ids=lambda command: command[0],
)
def test_commands_that_write_traces_take_the_options_of_reading(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    name, *options = command
    out = tmp_path / "out.jsonl"
    files = ["--output", out, trace_file] if name == "merge" else [trace_file, out]
    err = printed(capsys, "trace", name, *files, *options, "--format", "burstgpt", status=2)
    assert "expected Timestamp, Request tokens" in err, "read as BurstGPT"
    assert not out.exists()
    printed(capsys, "trace", name, *files, *options, "--format", "mooncake")
    assert out.exists()


def test_a_trace_goes_through_standard_streams(trace_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "trace", "head", "-", "-", "--requests", "1"],
        input=trace_file.read_bytes(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["hash_ids"] == [0, 1, 2]
    assert done.stderr == b""


def test_unchained_ids_are_refused_or_rekeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    rows = [{"timestamp": 0, "input_length": 8, "hash_ids": ids} for ids in ([1, 3], [2, 3])]
    path.write_text("".join(json.dumps({**row, "block_size": 4}) + "\n" for row in rows))
    commands: list[list[str | Path]] = [
        ["simulate", path],
        ["trace", "info", path],
        ["trace", "convert", path, "-"],
    ]
    for command in commands:
        assert "re-key them" in printed(capsys, *command, status=2)
    facts = printed(capsys, "trace", "info", path, "--unchained", "rekey", "--json")
    assert json.loads(facts)["distinct_blocks"] == 4


def test_anonymise_writes_numbers_and_keeps_its_key_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out, key = tmp_path / "log", tmp_path / "out", tmp_path / "key"
    text = "The quick brown fox jumps over the lazy dog."
    log.write_text(json.dumps({"timestamp": 5, "input": text, "session_id": "bob"}) + "\n")
    printed(capsys, "trace", "anonymise", log, out, "--key-file", key, "--block-size", "16")
    written = out.read_text()
    assert json.loads(written)["hash_ids"] == [0, 1]
    assert key.read_text().strip() not in written
    assert "bob" not in written
    assert "quick" not in written


def test_trace_commands_import_no_torch(trace_file: Path) -> None:
    code = (
        "import sys, kvstore.cli.main as c;"
        f"assert c.main(['simulate', {str(trace_file)!r}, '--json']) == 0;"
        "assert 'torch' not in sys.modules and 'lmdb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# ---- what people try ---------------------------------------------------------------------------


def a_trace(path: Path, requests: int = 4) -> Path:
    rows = [
        {"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [0, n]}
        for n in range(1, requests + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bytes-per-token", "0"], "--bytes-per-token must be above 0"),
        (["--bytes-per-token", "1e300"], "--bytes-per-token must be above 0 and below 2**60"),
        (["--prefill-tps", "nan", "--bytes-per-token", "1"], "--prefill-tps must be above 0"),
        (["--window-tokens", "0"], "--window-tokens must be above 0"),
        (["--size", ","], "--size must have at least one item"),
        (["--size", ""], "--size must have at least one item"),
        (["--policy", ""], "--policy must have at least one item"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace(tmp_path / "t.jsonl")
    assert cli.main(["simulate", str(trace), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spread", "nan"], "--spread must be seconds"),
        (["--spread", "1e300"], "--spread must be seconds"),
        (["--spread", "-1"], "--spread must be seconds"),
        (["--seed", "-1"], "--seed must be 0 or more"),
    ],
)
def test_draws_that_cannot_be_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, output = a_trace(tmp_path / "t.jsonl"), tmp_path / "out"
    given = ["trace", "merge", str(trace), "--output", str(output), *options]
    assert cli.main(given) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_key_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text(json.dumps({"timestamp": 0, "input": "hello, world"}) + "\n")
    key = tmp_path / "key"
    given = ["trace", "anonymise", str(tmp_path / "log")]
    assert (
        cli.main([*given, str(tmp_path / "out"), "--key-file", str(key), "--block-size", "4"]) == 0
    )
    before = key.read_bytes()
    assert cli.main([*given, str(key), "--key-file", str(key), "--block-size", "4"]) == 2
    assert "would overwrite the key" in capsys.readouterr().err
    assert key.read_bytes() == before


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_packed_trace_that_is_cut_off_is_one_line_and_status_2(
    pack: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = pack(a_trace(tmp_path / "t.jsonl", 2000).read_bytes())
    cut = tmp_path / "cut"
    for size in (len(packed) // 2, len(packed) - 3):
        cut.write_bytes(packed[:size])
        assert cli.main(["trace", "info", str(cut)]) == 2
        said = capsys.readouterr().err
        assert "cannot be decompressed" in said
        assert said.count("\n") == 1


def test_results_go_through_links_and_pipes_and_leave_them_there(tmp_path: Path) -> None:
    trace, place, link = a_trace(tmp_path / "t.jsonl"), tmp_path / "place", tmp_path / "link"
    link.symlink_to(place)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option in ("--csv", "--html"):
        assert cli.main(["simulate", str(trace), "--policy", "lru", option, str(link)]) == 0
        assert link.is_symlink()
        came: list[bytes] = []
        reader = threading.Thread(target=lambda came=came: came.append(pipe.read_bytes()))
        reader.start()
        assert cli.main(["simulate", str(trace), "--policy", "lru", option, str(pipe)]) == 0
        reader.join(30)
        assert came == [place.read_bytes()]
        assert pipe.is_fifo()
        assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace(tmp_path / "t.jsonl")
    for option in ("--csv", "--html"):
        for place in (tmp_path / "no" / "x", tmp_path):
            assert cli.main(["simulate", str(trace), "--policy", "lru", option, str(place)]) == 2
            assert f"{place} cannot be written: " in capsys.readouterr().err


def test_a_table_without_its_columns_is_told_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace(tmp_path / "t.jsonl")
    assert cli.main(["trace", "info", str(trace), "--format", "azure"]) == 2
    assert "line 1: has no column TIMESTAMP; expected" in capsys.readouterr().err
