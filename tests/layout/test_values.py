"""Layouts: bytes and lifetimes of known models, configs as they are found, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ConfigError
from kvstore.layout import FORMATS, LayerGroup, Layout, Lifetime, from_config, layout
from kvstore.layout.presets import PRESETS
from tests.builders import FORMAT_UNITS, mixed_layout, windowed_layout

V41 = layout("deepseek-v4.1-flash")
V41_CONFIG = PRESETS["deepseek-v4.1-flash"]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "float16",
}

COHERE2 = {"model_type": "cohere2"}


def changed(config: Any, **fields: Any) -> dict[str, Any]:
    return {**config, **fields}


def without(config: Any, *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def refusal(config: Any, **options: Any) -> str:
    with pytest.raises(kvstore.ConfigError) as caught:
        layout(config, **options)
    return str(caught.value)


# ---- DeepSeek-V4.1 -----------------------------------------------------------------------------


def test_v41_costs_exactly_890_bytes_a_token() -> None:
    assert V41.bytes_per_token == Fraction(890)
    assert isinstance(V41.bytes_per_token, Fraction)
    assert V41.bytes_per_token * 1_048_576 == 890 * 2**20
    assert V41.bytes_per_token * 128 == 113_920


def test_v41_groups_are_those_of_the_release() -> None:
    facts = {
        group.name: (
            group.layers,
            group.tokens_per_entry,
            group.entry_bytes,
            group.planes,
            group.lifetime,
        )
        for group in V41.groups
    }
    assert facts == {
        "main_r2": ((2, 8, 14), 2, 288, (256, 32), Lifetime.GLOBAL),
        "index_r2": ((2, 8, 14), 2, 68, (64, 4), Lifetime.GLOBAL),
        "main_r1": ((20,), 1, 288, (256, 32), Lifetime.GLOBAL),
        "index_r1": ((20,), 1, 68, (64, 4), Lifetime.GLOBAL),
        "window": (tuple(range(20)), 1, 528, (512, 16), Lifetime.WINDOW),
        "decoder_window": (tuple(range(20, 40)), 1, 528, (512, 16), Lifetime.TRANSIENT),
        "pair_ring": ((2, 8, 14), 1, 4096, (4096,), Lifetime.TRANSIENT),
        "draft": ((40, 41, 42), 1, 1024, (1024,), Lifetime.TRANSIENT),
    }


def test_v41_formats_and_scale_rules_are_those_of_the_release() -> None:
    assert [(g.entry_format, g.scale_rule) for g in V41.global_groups] == [
        ("nvfp4", "v41"),
        ("mxfp4", "rceil"),
        ("nvfp4", "v41"),
        ("mxfp4", "rceil"),
    ]


def test_v41_bytes_split_by_owner_and_by_kind_as_in_the_release() -> None:
    share = {group.name: group.bytes_per_token for group in V41.global_groups}
    assert share["main_r2"] + share["index_r2"] == 534
    assert share["main_r1"] + share["index_r1"] == 356
    assert share["main_r2"] + share["main_r1"] == 720
    assert share["index_r2"] + share["index_r1"] == 170


def test_v41_windows_are_pooled_for_the_encoder_only() -> None:
    assert V41.window_tokens == 128
    assert V41.window_bytes == 1_351_680
    assert [group.name for group in V41.window_groups] == ["window"]
    assert V41.alignment == 2


def test_v41_has_fixed_formats() -> None:
    assert "fixed entry formats" in refusal("deepseek-v4.1-flash", dtype="bfloat16")
    assert "fixed entry formats" in refusal(V41_CONFIG, dtype="bfloat16")
    assert "fixed entry formats" in refusal(
        {"model_type": "deepseek_v41", "text_config": V41_CONFIG}, dtype={"k": "bf16"}
    )


def test_v41_is_read_from_inside_a_multi_modal_config() -> None:
    config = {"model_type": "deepseek_v41", "text_config": V41_CONFIG, "vision_config": {}}
    assert layout(config).groups == V41.groups


def test_v41_without_drafts_or_pairs_has_no_such_groups() -> None:
    plain = layout(
        changed(
            without(V41_CONFIG, "num_nextn_predict_layers"),
            compress_ratios=[0, 0] + [1] * 38,
        )
    )
    assert [group.name for group in plain.groups] == [
        "main_r1",
        "index_r1",
        "window",
        "decoder_window",
    ]
    assert plain.alignment == 1
    assert plain.bytes_per_token == 4 * 356


def test_v41_ratios_of_any_size_align_to_their_least_common_multiple() -> None:
    ratios = [0, 0] + [4] * 6 + [6] * 6 + [1] * 26
    assert layout(changed(V41_CONFIG, compress_ratios=ratios)).alignment == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [0, 0, 2]}, "40 layers .* found 3 ratios"),
        ({"compress_ratios": None}, "compress_ratios must be a list of integers, found None"),
        ({"compress_ratios": "22"}, "compress_ratios must be a list of integers, found '22'"),
        ({"compress_ratios": [2.0] * 40}, "compress_ratios must be a list of integers"),
        ({"compress_ratios": [True] * 40}, "compress_ratios must be a list of integers"),
        ({"compress_ratios": [0] * 40}, "at least 1, found 0"),
        ({"compress_ratios": [-2] * 40}, "at least 1, found -2"),
        ({"kv_source_layer_ids": []}, r"sources \[\]"),
        ({"kv_source_layer_ids": [2, 40]}, r"sources \[2, 40\]"),
        ({"kv_source_layer_ids": [-1, 20]}, r"sources \[-1, 20\]"),
        ({"kv_source_layer_ids": [8, 2]}, "ascending"),
        ({"kv_source_layer_ids": [2, 2]}, "distinct"),
        ({"kv_source_layer_ids": [0], "compress_ratios": [1] * 40}, "window.*layers"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be an integer in \[1, \d+\], found 0"),
        ({"head_dim": "512"}, r"head_dim must be an integer in \[1, \d+\], found '512'"),
        ({"head_dim": True}, r"head_dim must be an integer in \[1, \d+\], found True"),
        ({"head_dim": 500}, "an entry of nvfp4 must have a multiple of 16 values, found 500"),
        ({"index_head_dim": 48}, "an entry of mxfp4 must have a multiple of 32 values, found 48"),
        ({"index_head_dim": None}, "index_head_dim must be a positive integer, found None"),
        ({"sliding_window": None}, "sliding_window must be a positive integer, found None"),
        ({"compress_ratios": [2] * 39 + [10**9]}, "no item above 1,048,576"),
        ({"num_nextn_predict_layers": -3}, "num_nextn_predict_layers must be .* found -3"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers must be .* found 'x'"),
        ({"num_nextn_predict_layers": [3]}, r"num_nextn_predict_layers must be .* found \[3\]"),
    ],
)
def test_an_odd_v41_config_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(changed(V41_CONFIG, **fields)))


# ---- dense models ------------------------------------------------------------------------------


def test_smollm2_costs_23040_bytes_a_token() -> None:
    smollm2 = layout("smollm2-135m")
    assert smollm2.bytes_per_token == 23_040
    facts = [(g.name, len(g.layers), g.values, g.entry_bytes) for g in smollm2.groups]
    assert facts == [("k", 30, 192, 384), ("v", 30, 192, 384)]
    assert {group.lifetime for group in smollm2.groups} == {Lifetime.GLOBAL}
    assert (smollm2.alignment, smollm2.window_tokens, smollm2.window_bytes) == (1, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "each"),
    [
        ("bfloat16", 384),
        ("bf16", 384),
        ("torch.bfloat16", 384),
        ("float16", 384),
        ("f16", 384),
        ("float32", 768),
        ("f32", 768),
        ("uint8", 192),
        ("u8", 192),
        ("nvfp4", 96 + 12),
        ("mxfp4", 96 + 6),
        ("mxfp8", 192 + 6),
        ("fp8", 192 + 4),
    ],
)
def test_one_dtype_is_for_both_groups(dtype: str, each: int) -> None:
    chosen = layout("smollm2-135m", dtype=dtype)
    assert [group.entry_bytes for group in chosen.groups] == [each, each]


def test_a_dtype_for_each_group_keeps_them_apart() -> None:
    chosen = layout("smollm2-135m", dtype={"v": "nvfp4", "k": "bfloat16"})
    assert [(g.name, g.entry_format, g.scale_rule) for g in chosen.groups] == [
        ("k", "bf16", ""),
        ("v", "nvfp4", "v41"),
    ]
    assert chosen.bytes_per_token == 30 * (384 + 108)


def test_a_format_with_one_scale_for_an_entry_has_its_bytes_once() -> None:
    chosen = layout("smollm2-135m", dtype={"k": "fp8", "v": "mxfp8"})
    assert [(g.entry_format, g.scale_rule, g.planes) for g in chosen.groups] == [
        ("fp8", "amax", (192, 4)),
        ("mxfp8", "rceil", (192, 6)),
    ]
    assert [FORMATS["fp8"].planes(values) for values in (1, 7, 512)] == [(1, 4), (7, 4), (512, 4)]
    assert FORMATS["fp8"].entry_bytes(512) == 516
    assert [len(FORMATS[name].planes(32)) for name in FORMATS] == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int4", r"unknown dtype 'int4', expected one of u8, .*bfloat16"),
        ("", "unknown dtype ''"),
        ({"k": "bf16"}, r"\['k'\], .* exactly k and v"),
        ({"k": "bf16", "v": "bf16", "q": "bf16"}, r"\['k', 'q', 'v'\]"),
        ({}, r"\[\]"),
        ({"k": "bf16", "v": 4}, "unknown dtype '4'"),
        ({"k": "bf16", "v": "fp4"}, "unknown dtype 'fp4'"),
    ],
)
def test_an_unknown_dtype_is_refused(dtype: Any, message: str) -> None:
    assert re.search(message, refusal("smollm2-135m", dtype=dtype))


def test_a_format_that_cannot_pack_the_heads_is_refused() -> None:
    odd = changed(LLAMA, hidden_size=24)
    assert "an entry of mxfp4 must have a multiple of 32 values, found 6" in refusal(
        odd, dtype="mxfp4"
    )


def test_a_config_may_be_a_mapping_a_file_or_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    expected = layout(LLAMA)
    assert expected.bytes_per_token == 4 * 2 * 16 * 2
    assert layout(path) == layout(str(path)) == layout(tmp_path) == layout(str(tmp_path))
    assert layout(path) == expected
    assert layout(path).fingerprint == expected.fingerprint
    assert layout(path, dtype="f32").bytes_per_token == 2 * expected.bytes_per_token


def test_head_dim_is_taken_from_the_config_where_it_has_one() -> None:
    assert layout(LLAMA).group("k").values == 2 * 8
    assert layout(changed(LLAMA, head_dim=32)).group("k").values == 2 * 32
    assert layout(changed(LLAMA, head_dim=None)).group("k").values == 2 * 8


def test_hidden_size_is_not_needed_beside_head_dim() -> None:
    assert layout(changed(without(LLAMA, "hidden_size"), head_dim=32)).group("v").values == 64


def test_a_model_without_grouped_heads_caches_all_of_them() -> None:
    assert layout(without(LLAMA, "num_key_value_heads")).group("k").values == 64
    assert layout(changed(LLAMA, num_key_value_heads=None)).group("k").values == 64


def test_dtype_is_found_under_either_name_and_is_bf16_without() -> None:
    assert layout(LLAMA).group("k").entry_format == "f16"
    assert layout(changed(LLAMA, dtype="float32")).group("k").entry_format == "f32"
    assert layout(without(LLAMA, "torch_dtype")).group("k").entry_format == "bf16"
    assert layout(changed(LLAMA, torch_dtype=None)).group("k").entry_format == "bf16"


def test_a_text_config_inside_a_multi_modal_config_is_what_counts() -> None:
    config = {"model_type": "llava", "hidden_size": 9999, "text_config": LLAMA}
    assert layout(config).groups == layout(LLAMA).groups


def test_a_text_config_without_a_dtype_has_that_of_the_whole_model() -> None:
    """Multi-modal configs name the dtype once, outside."""
    text = without(LLAMA, "torch_dtype")
    for name in ("torch_dtype", "dtype"):
        config = {"model_type": "llava", name: "float32", "text_config": text}
        assert layout(config).group("k").entry_format == "f32"
    both = {"model_type": "llava", "torch_dtype": "float32", "text_config": LLAMA}
    assert layout(both).group("k").entry_format == "f16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [4] * 4}, "compressed attention"),
        ({"linear_num_key_heads": 4}, "linear attention"),
        ({"ssm_state_size": 16}, "state-space layers"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_attn_config": {"x": 1}}, "linear_attn_config"),
        ({"hybrid_override_pattern": "M*M-"}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"multi_query": True}, "multi_query"),
        ({"sliding_window": 4096}, "sliding window of 4096 and no layer_types"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding window of 4096"),
        (
            COHERE2 | {"sliding_window": 8, "sliding_window_pattern": "LLLG"},
            "pattern must be .* found 'LLLG'",
        ),
        (
            COHERE2 | {"sliding_window": 8, "sliding_window_pattern": 1 << 21},
            r"pattern must be an integer in \[1, 1048",
        ),
        (
            {"num_hidden_layers": 10**12},
            r"num_hidden_layers must be an integer in \[1, 4096\], found 1000000000000",
        ),
        (
            {"head_dim": 10**4000},
            r"head_dim must be an integer in \[1, 1048576\], found 10{199}\.\.\.$",
        ),
        ({"use_bidirectional_attention": True}, "attention in both directions"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "a configuration for each layer"),
        ({"v_head_dim": 16}, "v_head_dim 16 beside head_dim 8, expected keys and values of one"),
        ({"global_head_dim": 16}, "global_head_dim 16 beside head_dim 8"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads 4 beside num_key_value_heads 2"),
        ({"num_key_value_heads_per_layer": [1, 2, 2, 2]}, "num_key_value_heads_per_layer"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (
            {"layer_types": ["full_attention", "chunked_attention"] * 2, "sliding_window": 8},
            r"layer types \['chunked_attention', 'full_attention'\], expected full_attention and sl",
        ),
        ({"layer_types": ["full_attention", "conv"] * 2}, "layer types .*conv"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"layer_types": ["full_attention", 1, None, []]}, "layer types"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, found None"),
        (
            {"num_hidden_layers": 4.0},
            r"num_hidden_layers must be an integer in \[1, \d+\], found 4.0",
        ),
        (
            {"num_attention_heads": 0},
            r"num_attention_heads must be an integer in \[1, \d+\], found 0",
        ),
        (
            {"num_key_value_heads": -2},
            r"num_key_value_heads must be an integer in \[1, \d+\], found -2",
        ),
        ({"hidden_size": "64"}, r"hidden_size must be an integer in \[1, \d+\], found '64'"),
        ({"hidden_size": 4}, r"head_dim must be an integer in \[1, \d+\], found 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "unknown dtype 'float8_e4m3fn'"),
    ],
)
def test_a_config_of_another_kind_is_refused(fields: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(changed(LLAMA, **fields)))


# ---- full and sliding layers -------------------------------------------------------------------

HYBRID = changed(
    LLAMA,
    model_type="gemma3_text",
    head_dim=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=32,
)


def test_full_layers_are_global_and_sliding_ones_are_windows() -> None:
    hybrid = layout(HYBRID)
    facts = [(g.name, g.layers, g.values, g.entry_format, g.lifetime) for g in hybrid.groups]
    assert facts == [
        ("k", (2,), 16, "f16", Lifetime.GLOBAL),
        ("v", (2,), 16, "f16", Lifetime.GLOBAL),
        ("k_window", (0, 1, 3), 16, "f16", Lifetime.WINDOW),
        ("v_window", (0, 1, 3), 16, "f16", Lifetime.WINDOW),
    ]
    assert hybrid.window_tokens == 32
    assert hybrid.bytes_per_token == 2 * 16 * 2
    assert hybrid.window_bytes == 2 * 3 * 32 * 16 * 2


def test_gpt_oss_alternates_and_a_nested_text_config_counts() -> None:
    """Numbers of gpt-oss-20b: every other of 24 layers slides over 128 tokens."""
    gpt_oss = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
    found = layout({"model_type": "llava", "dtype": "bfloat16", "text_config": gpt_oss})
    assert found.groups == layout(gpt_oss).groups
    assert found.group("k").layers == tuple(range(1, 24, 2))
    assert found.group("v_window").layers == tuple(range(0, 24, 2))
    assert found.bytes_per_token == 24_576
    assert found.window_bytes == 24_576 * 128


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        (None, ["f16", "f16", "f16", "f16"]),
        ("mxfp4", ["mxfp4", "mxfp4", "f16", "f16"]),
        ("f32", ["f32", "f32", "f16", "f16"]),
        ({"k": "bf16", "v": "nvfp4"}, ["bf16", "nvfp4", "f16", "f16"]),
        ({"k": "f32", "v": "f32", "v_window": "bf16"}, ["f32", "f32", "f16", "bf16"]),
        ({"v_window": "u8", "k_window": "f32", "v": "f16", "k": "u8"}, ["u8", "f16", "f32", "u8"]),
    ],
)
def test_a_window_keeps_the_models_dtype_unless_it_is_named(dtype: Any, formats: list[str]) -> None:
    wide = changed(HYBRID, head_dim=16)
    assert [g.entry_format for g in layout(wide, dtype=dtype).groups] == formats


def test_the_fingerprint_tells_which_layers_are_full() -> None:
    other = changed(HYBRID, layer_types=[*HYBRID["layer_types"][1:], "sliding_attention"])
    assert layout(HYBRID).fingerprint != layout(other).fingerprint
    assert layout(HYBRID).fingerprint == layout(changed(HYBRID, sliding_window=64)).fingerprint


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, {}, "sliding_attention in every layer"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, "names 2 layers, .* of 4"),
        ({"sliding_window": None}, {}, "sliding_window must be a positive integer, found None"),
        ({"swa_head_dim": 32}, {}, "swa_head_dim 32 beside head_dim 8"),
        ({}, {"dtype": {"k": "f16", "k_window": "f16"}}, "exactly k and v and may have k_window"),
        ({}, {"dtype": {"k": "f16", "v": "f16", "window": "f16"}}, "may have k_window and v_wind"),
        ({"torch_dtype": "float64"}, {"dtype": "f32"}, "unknown dtype 'float64'"),
    ],
)
def test_an_odd_hybrid_is_refused(
    fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    assert re.search(message, refusal(changed(HYBRID, **fields), **options))


def test_a_dense_model_has_no_windows_to_name() -> None:
    named = {"k": "f16", "v": "f16", "k_window": "f16"}
    assert refusal(LLAMA, dtype=named).endswith("this model has exactly k and v")


def test_a_switched_off_window_is_no_window() -> None:
    qwen2 = changed(LLAMA, model_type="qwen2")
    dense = layout(changed(qwen2, sliding_window=4096, use_sliding_window=False))
    assert dense.groups == layout(LLAMA).groups
    listed = layout(changed(LLAMA, sliding_window=4096, layer_types=["full_attention"] * 4))
    assert listed.groups == dense.groups
    assert layout(changed(LLAMA, sliding_window=None)).groups == dense.groups


@pytest.mark.parametrize("kind", ["llama", "phi3", "cohere2", "dots1"])
def test_a_class_that_cannot_switch_its_window_off_is_refused(kind: str) -> None:
    config = changed(LLAMA, model_type=kind, sliding_window=8, max_window_layers=1)
    assert "sliding window" in refusal(changed(config, use_sliding_window=False))


def test_fields_that_say_no_change_nothing() -> None:
    off = {"kv_lora_rank": None, "ssm_state_size": 0, "is_encoder_decoder": False}
    off |= {"cross_attention_layers": None, "num_kv_shared_layers": 0}
    assert layout(changed(LLAMA, **off)).groups == layout(LLAMA).groups


# ---- fields that a config leaves to its class --------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "full", "values", "window_tokens"),
    [
        # gemma-3-4b-it: heads, their width and the order of its layers are those of the class.
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
            (5, 11, 17, 23, 29),
            4 * 256,
            1024,
        ),
        # gemma-3-12b-it: 16 heads of 256 beside a hidden size that would give 240.
        (
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 48,
                "hidden_size": 3840,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
            tuple(range(5, 48, 6)),
            8 * 256,
            1024,
        ),
        ({"model_type": "gemma2", "num_hidden_layers": 4}, (1, 3), 4 * 256, 4096),
        ({"model_type": "gpt_oss", "num_hidden_layers": 4}, (1, 3), 8 * 64, 128),
        (
            {
                "model_type": "cohere2",
                "num_hidden_layers": 8,
                "hidden_size": 64,
                "num_attention_heads": 8,
            },
            (3, 7),
            64,
            4096,
        ),
    ],
)
def test_a_field_that_is_the_default_of_its_class_may_be_left_out(
    fields: dict[str, Any], full: tuple[int, ...], values: int, window_tokens: int
) -> None:
    found = layout(fields)
    assert found.group("k").layers == full
    assert found.group("v_window").layers == tuple(
        layer for layer in range(fields["num_hidden_layers"]) if layer not in full
    )
    assert {group.values for group in found.groups} == {values}
    assert found.window_tokens == window_tokens


def test_a_pattern_that_the_config_has_itself_counts() -> None:
    found = layout(changed(LLAMA, **COHERE2, sliding_window=16, sliding_window_pattern=2))
    assert found.group("k").layers == (1, 3)


# ---- latent attention, and DeepSeek's before V4.1 ------------------------------------------------

MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
}


def facts_of(found: Layout) -> list[tuple[Any, ...]]:
    return [
        (g.name, g.layers, g.tokens_per_entry, g.entry_format, g.entry_bytes, g.lifetime)
        for g in found.groups
    ]


def test_latent_attention_caches_one_latent_a_token_and_layer() -> None:
    assert facts_of(layout(MLA)) == [("latent", (0, 1, 2), 1, "bf16", 1152, Lifetime.GLOBAL)]
    assert layout({"model_type": "kimi_k25", "text_config": MLA}).groups == layout(MLA).groups
    assert layout(MLA, dtype="fp8").bytes_per_token == 3 * 580
    assert layout(MLA, dtype={"latent": "f32"}).bytes_per_token == 3 * 2304


def test_latent_attention_with_an_indexer_caches_its_keys_too_in_fp8() -> None:
    found = layout(changed(MLA, model_type="deepseek_v32", index_head_dim=128))
    assert facts_of(found) == [
        ("latent", (0, 1, 2), 1, "u8", 656, Lifetime.GLOBAL),
        ("index", (0, 1, 2), 1, "u8", 132, Lifetime.GLOBAL),
    ]


def test_v4_compresses_by_layer_and_keeps_a_window_in_each() -> None:
    found = layout(V4)
    assert facts_of(found) == [
        ("main_r4", (1, 3), 4, "u8", 584, Lifetime.GLOBAL),
        ("index_r4", (1, 3), 4, "mxfp4", 68, Lifetime.GLOBAL),
        ("main_r128", (2, 4), 128, "u8", 584, Lifetime.GLOBAL),
        ("window", (0, 1, 2, 3, 4), 1, "u8", 584, Lifetime.WINDOW),
    ]
    assert (found.alignment, found.window_tokens) == (128, 128)
    assert found.bytes_per_token == Fraction(2 * 652, 4) + Fraction(2 * 584, 128)


@pytest.mark.parametrize(
    ("base", "fields", "options", "message"),
    [
        (MLA, {"qk_rope_head_dim": None}, {}, "qk_rope_head_dim must be .* found None"),
        (MLA, {"linear_attn_config": {"x": 1}}, {}, "linear attention .*expected latent attention"),
        (
            MLA,
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4}
            | {"sliding_window": 8},
            {},
            r"\['full_attention', 'sliding_attention'\], expected latent attention",
        ),
        (MLA, {}, {"dtype": {"k": "bf16", "v": "bf16"}}, "exactly latent"),
        (
            MLA,
            {"model_type": "deepseek_v32", "index_head_dim": 96},
            {},
            "multiples of 128, found 512 and 96",
        ),
        (
            MLA,
            {"model_type": "deepseek_v32", "index_head_dim": 128},
            {"dtype": "bf16"},
            "fixed entry formats",
        ),
        (
            MLA,
            {"index_head_dim": 128},
            {},
            "uses indexer keys .index_head_dim., expected latent attention",
        ),
        (
            MLA,
            {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]},
            {},
            "indexer_types .* expected an indexer of its own in every layer",
        ),
        (V4, {}, {"dtype": "bf16"}, "deepseek_v4 has fixed entry formats"),
        (V4, {"compress_ratios": [4]}, {}, "each of 5 layers, found 1"),
        (V4, {"compress_ratios": [0] * 5}, {}, "no GLOBAL group"),
        (
            V4,
            {"compress_ratios": [-4] * 5},
            {},
            r"tokens_per_entry must be an integer in \[1, .* found -4",
        ),
        (V4, {"qk_rope_head_dim": 512}, {}, "less than head_dim, found 512 and 512"),
        (V4, {"index_head_dim": None}, {}, "index_head_dim must be .* found None"),
        (V4, {"sliding_window": None}, {}, "sliding_window must be .* found None"),
    ],
)
def test_an_odd_config_of_deepseek_is_refused(
    base: dict[str, Any], fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    assert re.search(message, refusal(changed(base, **fields), **options))


# ---- sources that are none ---------------------------------------------------------------------


def test_an_unknown_preset_is_refused_and_the_known_ones_are_named() -> None:
    message = refusal("gpt-9")
    assert "'gpt-9'" in message
    assert all(name in message for name in PRESETS)


@pytest.mark.parametrize(
    ("source", "question"),
    [
        ("deepseek-v4.1", "did you mean deepseek-v4.1-flash?"),
        ("v4-flash", "did you mean deepseek-v4-flash?"),
        ("deepseek-ai/DeepSeek-V4-Pro", "did you mean deepseek-v4-pro?"),
        ("lama-3.1-8b", "did you mean llama-3.1-8b"),
        ("Llama-3.1-70B-Instruct", "did you mean llama-3.1-70b?"),
    ],
)
def test_a_name_that_is_nearly_a_preset_is_answered_with_it(source: str, question: str) -> None:
    assert question in refusal(source)


def test_a_name_like_none_is_asked_nothing() -> None:
    assert "did you mean" not in refusal("zzz")


@pytest.mark.parametrize("source", ["", "x" * 5000, json.dumps(LLAMA) * 20, "a\0b"])
def test_text_that_is_no_path_is_refused(source: str) -> None:
    if source:
        assert "is neither a preset" in refusal(source)
    else:
        refusal(source)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "is a folder without a config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json: not a readable JSON file"),
        (b"", "config.json: not a readable JSON file"),
        (b"\xff\xfe{}", "config.json: not a readable JSON file"),
        (b"[" * 100_000, "config.json: not a readable JSON file"),
        (b'{"head_dim": ' + b"9" * 5000 + b"}", "config.json: not a readable JSON file"),
        (b" " * (1 << 24) + b"{}", "config.json: larger than any config.json"),
        (b"[1]", "config.json: a JSON list, expected an object"),
        (b"null", "config.json: a JSON NoneType, expected an object"),
        (b"{}", "the config must have a model_type, found None"),
        (
            b'{"model_type": "llava", "text_config": []}',
            "text_config must be an object, found []",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message in refusal(path)


# ---- fingerprints and the values themselves ----------------------------------------------------


def test_the_fingerprint_depends_on_global_groups_alone() -> None:
    base = windowed_layout()
    kept, *windows = base.groups
    extra = LayerGroup(
        name="extra", layers=(0,), values=1, entry_format="u8", lifetime=Lifetime.TRANSIENT
    )
    same = [
        replace(base, model="another label"),
        replace(base, window_tokens=99),
        replace(base, groups=(kept, replace(windows[0], values=9))),
        replace(base, groups=(kept,), window_tokens=0),
        replace(base, groups=(extra, *base.groups)),
    ]
    assert {each.fingerprint for each in same} == {base.fingerprint}


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "renamed"},
        {"layers": (1,)},
        {"layers": (0, 1)},
        {"values": 32},
        {"entry_format": "mxfp4"},
        {"tokens_per_entry": 2},
        {"scale_rule": "torchao"},
    ],
    ids=str,
)
def test_every_field_of_a_global_group_changes_the_fingerprint(fields: dict[str, Any]) -> None:
    group = LayerGroup(name="g", layers=(0,), values=64, entry_format="nvfp4")
    other = {"scale_rule": ""} | fields if "entry_format" in fields else fields
    before = Layout(model="m", groups=(group,))
    after = Layout(model="m", groups=(replace(group, **other),))
    assert before.fingerprint != after.fingerprint


def test_a_copy_with_other_groups_has_its_own_fingerprint() -> None:
    base = windowed_layout()
    other = replace(base, groups=(replace(base.groups[0], values=2), *base.groups[1:]))
    assert other.fingerprint != base.fingerprint
    assert base.fingerprint == windowed_layout().fingerprint


def test_the_fingerprints_of_presets_never_drift() -> None:
    """A store on disk carries one: when it changes, every store of that model is refused."""
    assert V41.fingerprint == "fb6ffb64027a184125f5de53630043f2e2d76227803f50a360af2b81db547f17"
    assert layout("smollm2-135m").fingerprint == (
        "58266ae0c4878e6744344040a315b6b28cec7f4985c1206a36d6bdbc592d971b"
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_refuses_what_it_cannot_pack(name: str) -> None:
    unit = FORMAT_UNITS[name]
    LayerGroup(name="g", layers=(0,), values=3 * unit, entry_format=name)
    if unit > 1:
        with pytest.raises(
            kvstore.ConfigError, match=f"{name} must have a multiple of {unit} values"
        ):
            LayerGroup(name="g", layers=(0,), values=3 * unit + unit // 2, entry_format=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, r"not empty, found \(\)"),
        ({"layers": (2, 1)}, r"ascending and not empty, found \(2, 1\)"),
        ({"layers": (1, 1)}, r"distinct.* found \(1, 1\)"),
        ({"layers": (-1, 1)}, r"a layer's id must be an integer in \[0, .* found -1"),
        ({"values": 0}, r"values must be an integer in \[1, .* found 0"),
        ({"tokens_per_entry": 0}, "tokens_per_entry must be .* found 0"),
        ({"entry_format": "fp5"}, "entry_format must be 'u8', .* found 'fp5'"),
        ({"scale_rule": "even"}, "scale_rule of nvfp4 must be 'v41' or 'torchao', found 'even'"),
        (
            {"entry_format": "bf16", "scale_rule": "v41"},
            "scale_rule of bf16 must be '', found 'v41'",
        ),
    ],
)
def test_a_group_that_could_not_be_stored_is_refused(fields: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {"name": "g", "layers": (0,), "values": 32, "entry_format": "nvfp4"}
    with pytest.raises(kvstore.ConfigError, match=message):
        LayerGroup(**(facts | fields))


def test_a_layout_that_no_cache_could_hold_is_refused() -> None:
    base = windowed_layout()
    kept, *windows = base.groups
    for groups, window_tokens, message in [
        ((kept, kept), 0, "distinct, found"),
        ((), 0, "no GLOBAL group"),
        (tuple(windows), 8, "no GLOBAL group"),
        ((kept, *windows), 0, "window_tokens is 0 with 2 WINDOW groups"),
        ((kept,), 8, "window_tokens is 8 with 0 WINDOW groups"),
        ((kept, *windows), -1, r"window_tokens must be an integer in \[0, .* found -1"),
    ]:
        with pytest.raises(kvstore.ConfigError, match=message):
            Layout(model="m", groups=groups, window_tokens=window_tokens)


def test_a_group_is_found_by_name_and_the_names_are_told() -> None:
    mixed = mixed_layout()
    assert mixed.group("pairs").layers == (2, 4)
    with pytest.raises(ValueError, match="no group 'pears', expected one of coarse, fine"):
        mixed.group("pears")


def test_bytes_of_a_mixed_layout_add_up() -> None:
    mixed = mixed_layout()
    shares = [Fraction(2 * 17, 4), Fraction(3 * 9), Fraction(2 * 6, 4), Fraction(2 * 5, 2)]
    assert [group.bytes_per_token for group in mixed.groups] == shares
    assert mixed.bytes_per_token == sum(shares)
    assert mixed.alignment == 4


def test_a_config_and_its_layout_agree_whichever_function_reads_it() -> None:
    assert from_config(LLAMA) == layout(LLAMA)


def test_every_preset_is_a_layout() -> None:
    assert all(layout(name).model == name for name in PRESETS)


def test_a_config_object_is_told_to_become_a_mapping() -> None:
    class Config:
        model_type = "llama"

    with pytest.raises(ConfigError, match=r"found Config; .* config\.to_dict\(\)"):
        layout(Config())  # type: ignore[arg-type]


def test_a_field_that_its_class_has_a_number_of_its_own_for_is_asked_for() -> None:
    mixtral = {"model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 8}
    with pytest.raises(
        ConfigError, match="num_key_value_heads .* found None; .* of model type 'mixtral'"
    ):
        layout(mixtral)
