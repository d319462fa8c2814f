"""What caches cost: every preset by hand, the published ratios, the disk beside the prediction."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvstore import ConfigError
from kvstore.cli import main as cli
from kvstore.footprint.cost import (
    Question,
    blocks_to_measure,
    compare,
    even_turn,
    persistent_bytes,
    saving_turn,
)
from kvstore.footprint.measure import measure
from kvstore.layout import Layout, layout
from kvstore.layout.presets import PRESETS
from kvstore.output.sizes import size_text
from tests.builders import mixed_layout, windowed_layout

G, W, T = "GLOBAL", "WINDOW", "TRANSIENT"

EXPECTED: dict[str, tuple[float, int, list[tuple[str, str, float, int]]]] = {
    # name: bytes a token, bytes of a window, (group, lifetime, entries a token, bytes of an entry).
    "deepseek-v4.1-flash": (
        890,
        1_351_680,
        [
            ("main_r2", G, 1.5, 288),
            ("index_r2", G, 1.5, 68),
            ("main_r1", G, 1, 288),
            ("index_r1", G, 1, 68),
            ("window", W, 20, 528),
            ("decoder_window", T, 20, 528),
            ("pair_ring", T, 3, 4096),
            ("draft", T, 3, 1024),
        ],
    ),
    # 21 x 652 / 4 + 20 x 584 / 128; 43 x 584 x 128
    "deepseek-v4-flash": (
        3514.25,
        3_214_336,
        [
            ("main_r4", G, 5.25, 584),
            ("index_r4", G, 5.25, 68),
            ("main_r128", G, 0.15625, 584),
            ("window", W, 43, 584),
        ],
    ),
    # 30 x 652 / 4 + 31 x 584 / 128; 61 x 584 x 128
    "deepseek-v4-pro": (
        5031.4375,
        4_559_872,
        [
            ("main_r4", G, 7.5, 584),
            ("index_r4", G, 7.5, 68),
            ("main_r128", G, 0.2421875, 584),
            ("window", W, 61, 584),
        ],
    ),
    "deepseek-v3.2": (48_068, 0, [("latent", G, 61, 656), ("index", G, 61, 132)]),
    "deepseek-v3": (70_272, 0, [("latent", G, 61, 1152)]),
    "deepseek-v1-67b": (389_120, 0, [("k", G, 95, 2048), ("v", G, 95, 2048)]),
    "llama-3.1-8b": (131_072, 0, [("k", G, 32, 2048), ("v", G, 32, 2048)]),
    "llama-3.1-70b": (327_680, 0, [("k", G, 80, 2048), ("v", G, 80, 2048)]),
    "qwen3-32b": (262_144, 0, [("k", G, 64, 2048), ("v", G, 64, 2048)]),
    "gpt-oss-20b": (
        24_576,
        3_145_728,
        [
            ("k", G, 12, 1024),
            ("v", G, 12, 1024),
            ("k_window", W, 12, 1024),
            ("v_window", W, 12, 1024),
        ],
    ),
    "gpt-oss-120b": (
        36_864,
        4_718_592,
        [
            ("k", G, 18, 1024),
            ("v", G, 18, 1024),
            ("k_window", W, 18, 1024),
            ("v_window", W, 18, 1024),
        ],
    ),
    # 10 full layers of 62, 52 with a window of 1,024
    "gemma-3-27b": (
        81_920,
        436_207_616,
        [
            ("k", G, 10, 4096),
            ("v", G, 10, 4096),
            ("k_window", W, 52, 4096),
            ("v_window", W, 52, 4096),
        ],
    ),
    "mistral-small": (163_840, 0, [("k", G, 40, 2048), ("v", G, 40, 2048)]),
    "kimi-k2": (70_272, 0, [("latent", G, 61, 1152)]),
    "smollm2-135m": (23_040, 0, [("k", G, 30, 384), ("v", G, 30, 384)]),
}

V41, V4 = layout("deepseek-v4.1-flash"), layout("deepseek-v4-flash")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """Return the JSON of a command that must succeed and say nothing on stderr."""
    assert cli.main(["footprint", *map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main(["footprint", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return the one line that a refused command says; nothing may be on stdout."""
    assert cli.main(["footprint", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# ---- what each model costs ---------------------------------------------------------------------


def test_every_preset_has_a_row_here() -> None:
    assert list(EXPECTED) == list(PRESETS)


def test_every_preset_costs_what_its_config_says_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = asked(capsys, *EXPECTED)["models"]
    found = {
        model["model"]: (
            model["bytes_per_token"],
            model["window_bytes"],
            [
                (g["name"], g["lifetime"], g["entries_per_token"], g["entry_bytes"])
                for g in model["groups"]
            ],
        )
        for model in models
    }
    assert found == EXPECTED
    for model in models:
        for group in model["groups"]:
            cost = group["entries_per_token"] * group["entry_bytes"]
            assert group["bytes_per_token"] == pytest.approx(cost, rel=1e-12)


def test_without_a_model_every_preset_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys) == asked(capsys, *PRESETS)
    out = printed(capsys)
    assert all(name in out for name in PRESETS)
    assert "main_r2" not in out  # the groups of fifteen models are no summary


# ---- the published ratios ----------------------------------------------------------------------


def test_the_comparison_has_the_published_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["deepseek-v4.1-flash", "deepseek-v4-flash", "deepseek-v3.2", "deepseek-v1-67b"]
    models = {m["model"]: m for m in asked(capsys, *names)["models"]}
    v41, v4, v32, v1 = (models[name] for name in names)
    assert v41["bytes_per_token"] == 890
    assert v41["ratio"] == 1
    assert round(v4["bytes_per_token"]) == 3514
    assert round(v4["ratio"], 2) == 3.95
    assert round(v32["ratio"], 1) == 54.0
    assert round(v1["ratio"]) == 437
    assert round(v4["first_saves"]["hbm"], 3) == 0.747
    out = printed(capsys, *names)
    assert [text for text in (" 3.95 ", " 54.0 ", " 437.2 ", " -74.7% ") if text not in out] == []


def test_the_published_ssd_saving_holds_up_to_a_turn_that_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One eighth of V4-Flash's bytes: 890 x 8 = 7,120 = 3,514.25 + 2 x 3,214,336 / T, so T = 1,782.9."""
    names = ["deepseek-v4.1-flash", "deepseek-v4-flash"]
    longest = 2 * 3_214_336 / (7120 - 3514.25)
    for turn, saved in ((1782, 0.875), (1783, 0.875), (2048, 0.866), (6000, 0.806)):
        v4 = asked(capsys, *names, "--turn-tokens", str(turn))["models"][1]
        assert round(v4["first_saves"]["ssd"], 3) == saved
        assert (v4["first_saves"]["ssd"] >= 0.875) == (turn <= longest)
        told = v4["first_saves"]["ssd_published_up_to_turn_tokens"]
        assert told == pytest.approx(longest)
        assert v4["persistent_bytes_per_token"] == {
            "without_windows": 3514.25,
            "with_windows": pytest.approx(3514.25 + 6_428_672 / turn),
        }
    out = printed(capsys, *names)
    assert " -86.6% " in out  # at the default of 2,048
    assert " 1,783 " in out
    assert "T = 2,048 new tokens" in out
    # Where both snapshots weigh as much as its global KV, as the report puts it.
    assert re.search(r"global KV of\s+1,829\s+tokens; at\s+that T, SSD is -87.3%", out)


def test_a_saving_has_a_longest_turn_only_between_never_and_always() -> None:
    v3 = layout("deepseek-v3")
    assert saving_turn(V41, v3) is None  # always
    assert saving_turn(v3, V41, Fraction(1, 2)) is not None  # only in very short turns
    assert saving_turn(v3, layout("kimi-k2")) is None  # never: no windows to leave out
    turn = saving_turn(V41, V4)
    assert turn is not None
    assert 1 - V41.bytes_per_token / persistent_bytes(V4, 1) > Fraction(7, 8)
    assert V41.bytes_per_token * 8 == V4.bytes_per_token + 2 * V4.window_bytes / turn


def test_never_and_any_turn_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "deepseek-v3", "kimi-k2", "llama-3.1-8b", "deepseek-v4-flash")
    assert re.search(r"kimi-k2 .* \+0.0% .* never", out)
    assert re.search(r"deepseek-v4-flash .* \+1,900%", out)
    assert "any turn" in printed(capsys, "deepseek-v4.1-flash", "deepseek-v3")


def test_the_turn_where_windows_weigh_as_much_as_the_rest() -> None:
    assert round(even_turn(V4)) == 1829
    assert even_turn(layout("deepseek-v3")) == 0
    assert persistent_bytes(V4, 1000) - V4.bytes_per_token == Fraction(6_428_672, 1000)


# ---- totals and options ------------------------------------------------------------------------


def test_a_context_is_added_up_in_whole_entries(capsys: pytest.CaptureFixture[str]) -> None:
    models = asked(capsys, "deepseek-v4.1-flash", "gpt-oss-20b", "--tokens", "1048576")["models"]
    assert models[0]["context"] == {
        "tokens": 1_048_576,
        "global_bytes": 933_232_640,
        "window_bytes": 1_351_680,
        "stored_tokens": 1_048_576,
        "stored_bytes": 933_232_640,
    }
    assert models[1]["context"]["global_bytes"] == 24_576 << 20
    # 101 tokens are 50 pairs and, of layer 20, 101 entries; no block of 128 is whole.
    odd = asked(capsys, "deepseek-v4.1-flash", "--tokens", "101")["models"][0]["context"]
    assert odd["global_bytes"] == 50 * 3 * 356 + 101 * 356
    assert odd["window_bytes"] == 101 * 20 * 528
    assert (odd["stored_tokens"], odd["stored_bytes"]) == (0, 0)
    out = printed(capsys, "deepseek-v4.1-flash", "--tokens", "1048576")
    assert re.search(r"1,048,576 tokens .*global.*window", out)
    assert re.search(r"890 MiB .* 1.29 MiB .* 890 MiB", out)


def test_a_block_and_the_break_even_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "deepseek-v4.1-flash", "--block-tokens", "256", "--prefill-tps", "1e4")
    assert found["models"][0]["block_bytes"] == 227_840
    assert found["models"][0]["break_even_bytes_per_second"] == 8_900_000
    assert " 8.9 MB/s " in printed(capsys, "deepseek-v4.1-flash", "--prefill-tps", "1e4")
    assert " 16 MB/s " in printed(capsys, "deepseek-v4.1-flash")


def test_json_has_the_promised_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "deepseek-v4.1-flash", "smollm2-135m")
    for model in found["models"]:
        assert {"model", "bytes_per_token", "window_bytes", "groups", "ratio"} <= model.keys()
        assert "measured_ssd_bytes_per_token" not in model
        assert isinstance(model["window_bytes"], int)
        for group in model["groups"]:
            fields = {"name", "lifetime", "entries_per_token", "entry_bytes", "bytes_per_token"}
            assert group.keys() == fields
            assert group["lifetime"] in ("GLOBAL", "WINDOW", "TRANSIENT")
    assert [m["model"] for m in found["models"]] == ["deepseek-v4.1-flash", "smollm2-135m"]


def test_a_model_is_one_row_as_often_as_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    models = asked(capsys, "smollm2-135m", "smollm2-135m")["models"]
    assert [m["ratio"] for m in models] == [1, 1]


def test_tables_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "A-model-with-a-name-longer-than-any-column"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS["gemma-3-27b"]))
    options = ["--tokens", "999999999999", "--prefill-tps", "9e9"]
    out = printed(capsys, *options) + printed(capsys, *PRESETS, folder / "config.json", *options)
    assert max(map(len, out.splitlines())) <= 80
    # No number is folded: every row begins with a name.
    assert not [line for line in out.splitlines() if re.match(r"│ +│ .*\d", line)]
    assert "A-model-with-a-na..." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens must be positive and below"),
        (["--tokens", "-5"], "--tokens must be positive"),
        (["--tokens", "9" * 40], "--tokens must be positive and below"),
        (["--block-tokens", "0"], "--block-tokens must be positive"),
        (["--block-tokens", "127"], "must be a multiple of 2, found 127"),
        (["--turn-tokens", "0"], "--turn-tokens must be positive"),
        (["--prefill-tps", "nan"], "--prefill-tps must be positive"),
        (["--prefill-tps", "inf"], "--prefill-tps must be positive"),
        (["--prefill-tps", "0"], "--prefill-tps must be positive"),
        (["--tokens", "many"], "Invalid value"),
    ],
)
def test_a_number_that_means_nothing_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "deepseek-v4.1-flash", *options)


# ---- configs that are files --------------------------------------------------------------------


def test_a_config_file_costs_what_its_preset_costs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = []
    for name, config in PRESETS.items():
        paths.append(tmp_path / name / "config.json")
        paths[-1].parent.mkdir()
        paths[-1].write_text(json.dumps(config))
    found = asked(capsys, *paths)["models"]
    named = asked(capsys, *PRESETS)["models"]
    assert [m.pop("model") for m in found] == list(map(str, paths))
    assert [m.pop("model") for m in named] == list(PRESETS)
    assert found == named
    out = printed(capsys, paths[0].parent, paths[1])  # a folder is as good as the file in it
    assert "deepseek-v4-flash" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json: not a readable JSON file"),
        (b"\x80\x04", "config.json: not a readable JSON file"),
        (b"[" * 200_000, "config.json: not a readable JSON file"),
        (b'{"num_hidden_layers": ' + b"9" * 9999 + b"}", "config.json: not a readable JSON file"),
        (b"7", "config.json: a JSON int, expected an object with a model_type"),
        (b"{}", "the config must have a model_type, found None"),
        (b'{"model_type": ["x"], "text_config": null}', "must have a model_type, found ['x']"),
        (b'{"model_type": "llama", "num_attention_heads": NaN}', "found nan"),
        (
            b'{"model_type": "mamba2", "ssm_state_size": 128}',
            "'mamba2' keeps a recurrent or convolution state",
        ),
        (
            b'{"model_type": "t5", "is_encoder_decoder": true}',
            "'t5' caches keys and values of another",
        ),
        (
            b'{"model_type": "llama", "num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": 1234567890}',
            "config.json: config field num_hidden_layers must be an integer in [1, 4096], found 1234567890",
        ),
    ],
)
def test_what_is_no_config_is_one_line_and_status_2(
    content: bytes, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert message in refused(capsys, tmp_path / "config.json")


def test_one_bad_model_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = [str(tmp_path), "smollm2-135m", "deepseek-v4-flsh", "qwen3-32b"]
    for options in ([], ["--measure", "--block-tokens", "16"]):
        assert cli.main(["footprint", *names, *options, "--json"]) == 2
        given = capsys.readouterr()
        found = json.loads(given.out)
        assert [m["bytes_per_token"] for m in found["models"]] == [23_040, 262_144]
        assert [m["model"] for m in found["refused"]] == [str(tmp_path), "deepseek-v4-flsh"]
        assert [line[:9] for line in given.err.splitlines()] == ["kvstore: "] * 2
        assert "a folder without a config.json" in given.err
        assert "did you mean deepseek-v4-flash" in given.err
    assert cli.main(["footprint", *names]) == 2
    assert "smollm2-135m" in capsys.readouterr().out


def test_a_block_size_that_one_model_cannot_have_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["deepseek-v4.1-flash", "smollm2-135m"]
    assert cli.main(["footprint", *names, "--block-tokens", "3", "--json"]) == 2
    given = capsys.readouterr()
    assert [m["model"] for m in json.loads(given.out)["models"]] == ["smollm2-135m"]
    assert "must be a multiple of 2, found 3" in given.err


def test_a_dtype_is_for_every_entry_and_fixed_formats_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["gpt-oss-20b", "deepseek-v3", "deepseek-v4.1-flash"]
    assert cli.main(["footprint", *names, "--dtype", "u8", "--json"]) == 2
    given = capsys.readouterr()
    found = json.loads(given.out)["models"]
    assert [m["bytes_per_token"] for m in found] == [24_576 // 2, 70_272 // 2]
    assert found[0]["window_bytes"] == 128 * 24_576 // 2
    assert "deepseek-v4.1-flash: deepseek_v41_text has fixed entry formats" in given.err
    assert cli.main(["footprint", "llama-3.1-8b", "--dtype", "int3"]) == 2
    assert "unknown dtype 'int3', expected one of u8" in capsys.readouterr().err


# ---- blocks on a disk ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_disk_holds_little_more_than_is_predicted(name: str) -> None:
    """The tolerance is what docs/format.md puts beside the entries, and nothing else.

    A frame has 144 bytes, 4 a token and 8 a part (a layer), and takes whole pages of 4,096 bytes. The
    trees of a dozen blocks are eight pages at most.
    """
    described = layout(name)
    is_fat = described.bytes_per_token > 20_000
    block_tokens = max(16, described.alignment) if is_fat else 128
    blocks = 12
    found = measure(described, block_tokens, blocks)
    assert (found.blocks, found.tokens) == (blocks, blocks * block_tokens)
    predicted = EXPECTED[name][0] * found.tokens
    layers = len({layer for group in described.global_groups for layer in group.layers})
    beside = blocks * (144 + 4 * block_tokens + 8 * layers) + 4096 * (blocks + 8)
    assert predicted < found.live_bytes <= predicted + beside
    assert found.live_bytes <= found.file_bytes


def test_a_thousand_blocks_of_v41_take_one_percent_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """896 bytes are whole pages (28 a block); the rest is less than 4 bytes a token of trees."""
    found = asked(capsys, "deepseek-v4.1-flash", "--measure")["models"][0]
    assert found["measured"]["blocks"] == 1000
    assert found["measured"]["tokens"] == 128_000
    measured = found["measured_ssd_bytes_per_token"]
    assert 896 < measured < 900
    assert found["measured"]["file_bytes_per_token"] < 903
    assert measured != found["bytes_per_token"]


def test_what_is_measured_is_shown_beside_what_was_predicted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = printed(capsys, "smollm2-135m", "--block-tokens", "1024", "--measure")
    # 22.5 MiB a block: as many as are 128 MiB.
    assert re.search(r"smollm2-135m .* 5 .* 23,040 .* 23,0\d\d.* \+0\.\d\d%", out)


def test_a_progress_bar_is_told_of_every_block(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    measure(mixed_layout(), 64, 120, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 120), (50, 120), (100, 120), (120, 120)]


def test_so_many_blocks_are_written_as_fit() -> None:
    assert blocks_to_measure(V41, 128) == 1000
    assert blocks_to_measure(layout("llama-3.1-8b"), 128) == 8
    assert blocks_to_measure(layout("deepseek-v1-67b"), 1024) == 1
    with pytest.raises(ConfigError, match=r"4,096 tokens of deepseek-v1-67b is 1.48 GiB; .* 512 M"):
        blocks_to_measure(layout("deepseek-v1-67b"), 4096)


def test_a_block_too_large_is_refused_before_any_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, "llama-3.1-70b", "--block-tokens", "2048", "--measure")
    assert "a block of 2,048 tokens of llama-3.1-70b is 640 MiB" in message


def test_windows_are_measured_by_nobody() -> None:
    """A block holds GLOBAL entries alone: the disk does not know that there are windows."""
    small: Layout = windowed_layout(8)
    large = windowed_layout(4096)
    assert measure(small, 16, 4).live_bytes == measure(large, 16, 4).live_bytes


# ---- the chart ---------------------------------------------------------------------------------


def test_a_chart_has_a_bar_for_each_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "f.svg"
    printed(capsys, *PRESETS, "--plot", file)
    root = ET.fromstring(file.read_bytes())
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("}text")]
    assert [text for text in texts if text in PRESETS] == list(PRESETS)
    assert "389,120  (437.2x)" in texts
    assert len([node for node in root.iter() if node.tag.endswith("}rect")]) == 1 + len(PRESETS)
    assert [path.name for path in tmp_path.iterdir()] == ["f.svg"]


def test_a_chart_that_cannot_be_written_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "cannot be written" in refused(capsys, "smollm2-135m", "--plot", tmp_path)
    assert "cannot be written" in refused(capsys, "smollm2-135m", "--plot", tmp_path / "no" / "f")
    assert list(tmp_path.iterdir()) == []


# ---- the pure part -----------------------------------------------------------------------------


def test_a_layout_of_ones_own_is_compared_as_well() -> None:
    mixed = mixed_layout()
    found = compare([("mixed", mixed), ("v41", V41)], Question(block_tokens=4, turn_tokens=1))
    assert found["models"][0]["bytes_per_token"] == 43.5
    assert found["models"][1]["ratio"] == pytest.approx(890 / 43.5)
    with pytest.raises(ConfigError, match="mixed has entries of 4 tokens"):
        compare([("mixed", mixed)], Question(block_tokens=6))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.00 KiB"),
        (113_920, "111 KiB"),
        (1_351_680, "1.29 MiB"),
        (933_232_640, "890 MiB"),
        (1 << 20, "1.00 MiB"),
        (1023.999 * 1024, "1,024 KiB"),
        (1 << 60, "1,024 PiB"),
        (1 << 70, "1,048,576 PiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size: float, text: str) -> None:
    assert size_text(size) == text
