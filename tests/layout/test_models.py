"""Model types: right bytes for configs in the shape of public ones, and refusals by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import ConfigError, LayerGroup, Layout, layout
from kvstore.cli import main as cli
from kvstore.layout.models.known import KNOWN, NESTED, REASONS, WRAPPERS
from kvstore.output.sizes import size_bytes

CONFIGS = Path(__file__).parent / "configs"
"""Configs made for this project in the shape of public ones; names are invented."""

# Bytes a token of global KV, and the layers and tokens of a window; the arithmetic is beside each.
RIGHT: Mapping[str, tuple[int, int, int]] = {
    "step-3": (62_464, 0, 0),  # one shared KV head: 2*1*256*61*2
    "nemotron-super-49b": (200_704, 0, 0),  # 49 layers with attention: 49*2*8*128*2
    "jetmoe-8b": (196_608, 0, 0),  # 2*16*128*24*2
    "kv-fp8-checkpoint": (65_536, 0, 0),  # 2*8*128*32*1
    "minimax-m2": (253_952, 0, 0),  # 2*8*128*62*2
    "phi-4-mini": (131_072, 0, 0),  # the window is beyond the context: 2*8*128*32*2
    "qwen3-omni-thinker": (98_304, 0, 0),  # 2*4*128*48*2
    "qwen3-30b-a3b": (98_304, 0, 0),  # 2*4*128*48*2
    "gemma-3n-e4b": (8_192, 16, 512),  # 15 of 35 share; 4 of the others full: 2*2*256*4*2
    "glm-4.5-air": (188_416, 0, 0),  # 2*8*128*46*2
    "kimi-k2": (70_272, 0, 0),  # (512+64)*61*2
    "gpt-oss-120b": (36_864, 18, 128),  # 2*8*64*18*2
    "phi-4": (204_800, 0, 0),  # 2*10*128*40*2
    "mistral-large-2411": (360_448, 0, 0),  # 2*8*128*88*2
    "deepseek-v3.2": (48_068, 0, 0),  # (656+132)*61
    "hunyuan-a13b": (131_072, 0, 0),  # 2*8*128*32*2
    "qwen2.5-vl-7b-flat": (57_344, 0, 0),  # 2*4*128*28*2
    "qwen2.5-vl-7b-nested": (57_344, 0, 0),
    "mobilellm-125m": (23_040, 0, 0),  # 2*3*64*30*2
    "longcat-flash": (64_512, 0, 0),  # two latents a layer: 576*56*2
}
REFUSED: Mapping[str, str] = {
    "bert-base": "'bert' is an encoder",
    "lfm2-1.2b-old": "'lfm2' keeps a recurrent or convolution state",
    "recurrentgemma-2b": "'recurrent_gemma' keeps a recurrent",
    "ring-mini-linear-2.0": "'bailing_moe_linear' keeps a recurrent",
    "qwen3-next-80b-a3b": "'qwen3_next' keeps a recurrent",
    "llama-4-scout": "'llama4' attends in chunks",
    "minimax-m1": "'minimax_m1' keeps a recurrent",
    "falcon-h1-7b": "'falcon_h1' keeps a recurrent",
    "jamba-1.5-mini": "'jamba' keeps a recurrent",
    "nemotron-h-8b": "'nemotron_h' keeps a recurrent",
    "llama-3.2-11b-vision": r"'mllama' caches keys and values of another input",
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
LLAMA_BYTES = 2 * 2 * 8 * 4 * 2


def refusal(config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        layout(config, **options)
    return str(caught.value)


def said(make: Callable[[], object]) -> str:
    """Return what a refusal says; nothing if there is none. Every other error is the test's."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    return ""


def test_every_config_has_a_verdict() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {*RIGHT, *REFUSED}


@pytest.mark.parametrize("name", RIGHT)
def test_a_config_has_its_right_bytes(name: str) -> None:
    found = layout(CONFIGS / name)
    assert found.bytes_per_token.denominator == 1
    windows = {group.layers for group in found.window_groups}
    sliding = len(next(iter(windows), ()))
    assert (int(found.bytes_per_token), sliding, found.window_tokens) == RIGHT[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_with_another_cache_is_refused_by_name(name: str) -> None:
    assert re.search(REFUSED[name], refusal(CONFIGS / name))


def test_the_command_shows_what_is_known_and_names_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = sorted(CONFIGS.iterdir())
    assert cli.main(["footprint", *map(str, paths), "--json"]) == 2
    out, err = capsys.readouterr()
    found = {Path(m["model"]).name: m["bytes_per_token"] for m in json.loads(out)["models"]}
    assert found == {name: right[0] for name, right in RIGHT.items()}
    assert len(err.splitlines()) == len(REFUSED)


# ---- types and classes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]},
            "'brand_new' .arch.*BrandNew",
        ),
        ({**LLAMA, "model_type": None}, "must have a model_type, found None"),
        ({**LLAMA, "model_type": ["llama"]}, r"must have a model_type, found \['llama'\]"),
        ({**LLAMA, "architectures": ["DeciLMForCausalLM"]}, "'llama' with architecture 'DeciLMFor"),
        ({**LLAMA, "architectures": ["LlamaForCausalLM", "X"]}, "'llama' with architecture 'X'"),
        ({**LLAMA, "architectures": [7]}, "'llama' with architecture 7"),
        ({**LLAMA, "architectures": "MambaForCausalLM"}, "architecture 'MambaForCausalLM'"),
        (
            {"model_type": "new_vl", "text_config": LLAMA},
            "'new_vl' .* is not supported",
        ),
        ({"model_type": "llava"}, "'llava' has no config of its language model, expected one of"),
        ({"model_type": "llava", "text_config": {}}, "its language model must have a model_type"),
        ({"model_type": "llava", "text_config": 3}, "text_config must be an object, found 3"),
        (
            {"model_type": "llava", "architectures": ["MllamaModel"], "text_config": LLAMA},
            "'llava' with architecture 'MllamaModel'",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "mamba"}},
            "'mamba' keeps a recurrent or convolution state",
        ),
        ({**LLAMA, "is_encoder_decoder": True}, "cross attention"),
        ({**LLAMA, "add_cross_attention": True}, "cross attention"),
        (
            {**LLAMA, "layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            "does not support",
        ),
        (
            {**LLAMA, "model_type": "stablelm", "head_dim": 16},
            "head_dim 16, which its class does not",
        ),
        (
            {**LLAMA, "model_type": "opt", "num_key_value_heads": 2},
            "num_key_value_heads 2, which its class does not read; expected 8 heads",
        ),
        (
            {
                "model_type": "gpt2",
                "n_head": 4,
                "num_attention_heads": 8,
                "n_layer": 2,
                "n_embd": 64,
            },
            "n_head 4 and num_attention_heads 8, which are one field",
        ),
        (
            {"model_type": "falcon", "num_attention_heads": 4, "new_decoder_architecture": True},
            "new_decoder_architecture: transformers caches",
        ),
        (
            {**LLAMA, "model_type": "hunyuan_v1_moe", "use_cla": True},
            "layers that share a cache .use_cla.",
        ),
        (
            {**LLAMA, "model_type": "mobilellm", "layer_sharing": True},
            "layers that run more than once",
        ),
        ({**LLAMA, "model_type": "minimax_m2", "attn_type_list": [1, 1, 0, 1]}, "linear attention"),
        (
            {**LLAMA, "model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True},
            "no layer_ty",
        ),
        ({**LLAMA, "model_type": "afmoe"}, "no layer_types; expected layer_types"),
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            "a sliding window and use_sliding_window false",
        ),
        (
            {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be an integer of at least 0, found -1",
        ),
        (
            {
                **LLAMA,
                "model_type": "gemma3n_text",
                "num_kv_shared_layers": 4,
                "sliding_window": None,
            },
            "num_kv_shared_layers must be less than the 4 layers",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: Any, message: str) -> None:
    assert re.search(message, refusal(config))


def test_no_type_is_both_known_and_refused() -> None:
    assert not KNOWN.keys() & REASONS.keys()
    assert not WRAPPERS.keys() & REASONS.keys()


@pytest.mark.parametrize("name", NESTED)
def test_the_language_model_is_found_where_it_is_nested(name: str) -> None:
    found = layout({"model_type": "llava", "hidden_size": 9999, name: LLAMA})
    assert found.bytes_per_token == LLAMA_BYTES
    deep = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {name: LLAMA},
        "torch_dtype": "float32",
    }
    assert layout(deep).bytes_per_token == LLAMA_BYTES


def test_upper_layers_slide_only_if_the_config_says_so() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert layout({**config, "use_sliding_window": True}).group("k").layers == (0, 1, 2)
    assert layout({**config, "use_sliding_window": True}).group("k_window").layers == (3,)
    assert layout(config).group("k").layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("window", "context", "scaling", "is_full"),
    [
        (257, 256, None, True),
        (256, 256, None, False),  # engines keep a row less than the window
        (257, 256, {"rope_type": "yarn", "factor": 4.0}, False),
        (1025, 256, {"rope_type": "yarn", "factor": 4.0}, True),
        (257, 256, {"factor": 4.0, "original_max_position_embeddings": 64}, True),
        (257, 256, {"factor": 8.0, "original_max_position_embeddings": 64}, False),
        (257, 256, {"factor": float("nan")}, True),
        (257, None, None, False),
        (257, 256.0, None, False),
    ],
)
def test_a_window_beyond_the_context_is_none(
    window: int, context: Any, scaling: Any, is_full: bool
) -> None:
    config = {**LLAMA, "model_type": "phi3", "sliding_window": window, "rope_scaling": scaling}
    config["max_position_embeddings"] = context
    if is_full:
        assert layout(config).bytes_per_token == LLAMA_BYTES
    else:
        assert "sliding_attention in every layer" in refusal(config)


def test_layers_of_a_search_have_groups_by_their_heads() -> None:
    """Nemotron-NAS: each layer has KV heads of its own number, or no attention."""

    def block(**attention: Any) -> dict[str, Any]:
        return {"attention": attention, "ffn": {"no_op": False}}

    blocks = [
        block(n_heads_in_group=4),
        block(n_heads_in_group=8),
        block(no_op=True, n_heads_in_group=None),
        block(replace_with_linear=True),
        block(n_heads_in_group=4, no_op=False, sparsify=None),
    ]
    config = {
        **LLAMA,
        "model_type": "nemotron-nas",
        "num_hidden_layers": 5,
        "block_configs": blocks,
    }
    found = layout(config)
    facts = [(g.name, g.layers, g.values) for g in found.groups]
    assert facts == [
        ("k", (0, 4), 16),
        ("v", (0, 4), 16),
        ("k_heads1", (1,), 8),
        ("v_heads1", (1,), 8),
    ]
    assert layout(config, dtype="u8").bytes_per_token * 2 == found.bytes_per_token
    for bad, message in [
        (blocks[:4], "block_configs must be a list of 5 objects"),
        ([*blocks[:4], {}], "must be an object with attention"),
        ([*blocks[:4], block(n_heads_in_group=3)], "n_heads_in_group that divides"),
        ([*blocks[:4], block(n_heads_in_group=4, window_length=8)], "window_length"),
        ([blocks[2]] * 5, "no layer with attention"),
        (None, "block_configs must be a list"),
    ]:
        assert message in refusal({**config, "block_configs": bad})


# ---- formats of a checkpoint's cache ------------------------------------------------------------------

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        ({"kv_cache_scheme": FP8}, 0.5),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}}, 0.5),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16}}, 0.28125),
        ({"kv_cache_scheme": None}, 1),
        ({"kv_cache_quant_algo": "FP8"}, 0.5),
        ({"kv_cache_quant_algo": "NVFP4"}, 0.28125),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, 0.5),
        ({"quant_method": "fp8", "kv_cache_quant_algo": None}, 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_a_checkpoint_says_the_format_of_its_cache(
    tmp_path: Path, quantization: Any, share: float
) -> None:
    own = {**LLAMA, "quantization_config": quantization}
    assert layout(own).bytes_per_token == LLAMA_BYTES * share
    assert layout(own, dtype="bf16").bytes_per_token == LLAMA_BYTES
    outer = {"model_type": "llava", "text_config": LLAMA, "quantization_config": quantization}
    assert layout(outer).bytes_per_token == LLAMA_BYTES * share
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization or {}))
    for source in (tmp_path, tmp_path / "config.json"):
        assert layout(source).bytes_per_token == LLAMA_BYTES * share


def test_a_window_and_a_latent_are_in_the_checkpoints_format_too() -> None:
    quantization = {"quantization_config": {"kv_cache_scheme": FP8}}
    plain = json.loads((CONFIGS / "gpt-oss-120b" / "config.json").read_text())
    assert layout({**plain, **quantization}).window_bytes * 2 == layout(plain).window_bytes
    latent = json.loads((CONFIGS / "kimi-k2" / "config.json").read_text())
    assert layout({**latent, **quantization}).bytes_per_token == 70_272 // 2


@pytest.mark.parametrize(
    "quantization",
    [
        {"kv_cache_scheme": {**FP8, "num_bits": 6}},
        {"kv_cache_scheme": {**FP8, "num_bits": True}},
        {"kv_cache_scheme": {**FP8, "dynamic": True}},
        {"kv_cache_scheme": {**FP8, "strategy": "token"}},
        {"kv_cache_scheme": {"num_bits": 4, "type": "int", "group_size": 128}},
        {"kv_cache_scheme": "fp8"},
        {"kv_cache_quant_algo": "INT3"},
        {"kv_cache_quant_algo": 8},
        {"kv_cache_quant_config": {"*k_proj": {"dtype": "fp8_e4m3"}}},
    ],
)
def test_a_format_of_a_cache_that_is_not_known_is_refused(quantization: Any) -> None:
    config = {**LLAMA, "quantization_config": quantization}
    assert f"{next(iter(quantization))} " in refusal(config)
    assert layout(config, dtype="bf16").bytes_per_token == LLAMA_BYTES


def test_a_bad_file_beside_the_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_bytes(b"{")
    assert "hf_quant_config.json: not a readable JSON file" in refusal(tmp_path)


# ---- hostile input -------------------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
ODD = [
    *(None, True, -1, 0, 16.0, 1e308, float("inf"), float("nan"), 10**5000, 2**63, "8", "", b"8"),
    *([], {}, (), object(), [8], {"a": 1}, DEEP, "x" * 10**6, {1, 2}, lambda: None),
]


@pytest.mark.parametrize("name", [*LLAMA, "head_dim", "layer_types", "sliding_window", "dtype"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2", "nemotron-nas"])
def test_an_odd_field_is_a_layout_or_refused(name: str, kind: str) -> None:
    for value in ODD:
        config = {**LLAMA, "model_type": kind, "block_configs": value, name: value}
        assert len(said(partial(layout, config))) < 2000


@pytest.mark.parametrize(
    "name",
    [
        *("text_config", "quantization_config", "architectures", "rope_scaling", "attn_type_list"),
        *("max_position_embeddings", "kv_lora_rank", "block_configs", "compress_ratios", "n_layer"),
        *("num_kv_shared_layers", "max_window_layers", "use_sliding_window", "_name_or_path"),
        *("num_layers", "indexer_types", "kv_sharing_modes", "sliding_window_pattern"),
    ],
)
def test_an_odd_extra_field_is_a_layout_or_refused(name: str) -> None:
    for kind in KNOWN:
        for value in ODD:
            config = {**LLAMA, "sliding_window": 8, "model_type": kind, name: value}
            assert len(said(partial(layout, config))) < 2000


def test_very_many_layers_are_refused_at_once() -> None:
    for config in (
        {**LLAMA, "num_hidden_layers": 300_000},
        {**LLAMA, "model_type": "nemotron-nas", "block_configs": [{}] * 300_000},
        {**LLAMA, "model_type": "olmo3", "layer_types": ["full_attention"] * 300_000},
    ):
        refusal(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "not a readable JSON file"),
        (b'{"model_type": "llama", "a": Infinity}', "num_attention_heads must be"),
        (b'{"model_type": "llama", "model_type": "mamba"}', "'model_type' occurs twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        ('{"model_type": "llama"}'.encode("utf-16"), "not a readable JSON file"),
        (b'"llama"', "a JSON str, expected an object"),
    ],
)
def test_a_hostile_file_is_one_line(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message in refusal(path)
    assert cli.main(["footprint", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    loop, dangling, linked = tmp_path / "loop", tmp_path / "dangling", tmp_path / "linked.json"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nothing")
    linked.symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text(json.dumps(LLAMA))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").mkdir()
    assert "is no regular file" in refusal(tmp_path)
    assert "is no regular file" in refusal(tmp_path / "config.json")
    assert "is no regular file" in refusal(tmp_path / "folder")
    assert "is neither a preset" in refusal(loop)
    assert "is neither a preset" in refusal(dangling)
    assert layout(linked).bytes_per_token == LLAMA_BYTES


GROUP: dict[str, Any] = {"name": "g", "layers": (0, 1), "values": 16, "entry_format": "u8"}


def test_no_odd_field_of_a_group_or_a_layout_is_accepted() -> None:
    masked = np.ma.masked_array([1, 2], mask=[True, False])
    odd = [*ODD, np.ones(2), masked, np.float32(2), np.bool_(1), Layout, LayerGroup]
    numbers, texts = [10**5000, 2**63], ["8", "", b"8", "x" * 10**6]
    fine: dict[str, list[Any]] = {
        "name": [text for text in texts if isinstance(text, str)],
        "layers": [[8]],
        "scale_rule": [""],
    }
    group = LayerGroup(**GROUP)
    for name in (*GROUP, "lifetime", "tokens_per_entry", "scale_rule"):
        for value in odd:
            message = said(partial(LayerGroup, **{**GROUP, name: value}))
            is_fine = any(
                type(value) is type(each) and value == each for each in fine.get(name, [])
            )
            assert bool(message) != is_fine, (name, type(value))
            assert len(message) < 2000
    for name in ("model", "groups", "window_tokens"):
        for value in (*odd, *numbers):
            fields: dict[str, Any] = {"model": "m", "groups": (group,), name: value}
            message = said(partial(Layout, **fields))
            is_fine = value == 0 if name == "window_tokens" and type(value) is int else False
            is_fine = is_fine or (name == "model" and isinstance(value, str))
            assert bool(message) != is_fine, (name, type(value))
            assert len(message) < 2000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": True}, r"values must be an integer in \[1, .* found True"),
        ({"values": 16.0}, "values must be an integer .* found 16.0"),
        ({"layers": (0.0, 1.0)}, "a layer's id must be an integer .* found 0.0"),
        ({"layers": (False, True)}, "a layer's id must be an integer .* found False"),
        ({"layers": range(300_000)}, "layers must have at most 4,096 items"),
        ({"layers": "01"}, "layers must be a list of layer ids, found '01'"),
        ({"layers": 3}, "layers must be a list of layer ids, found 3"),
        (
            {"lifetime": "FOREVER"},
            "lifetime must be 'GLOBAL', 'WINDOW' or 'TRANSIENT', found 'FOREVER'",
        ),
        ({"entry_format": ["u8"]}, r"entry_format must be .* found \['u8'\]"),
        ({"scale_rule": None}, "scale_rule of u8 must be text, found None"),
        ({"name": 3}, "name must be text, found 3"),
    ],
)
def test_a_wrong_type_in_a_group_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerGroup(**{**GROUP, **fields})


def test_a_group_has_pythons_own_integers_and_a_lifetime() -> None:
    made: Any = LayerGroup(
        **{**GROUP, "layers": np.arange(2), "values": np.int32(16)},
        lifetime="WINDOW",  # type: ignore[arg-type]
    )
    assert (made.layers, type(made.layers[0]), type(made.values)) == ((0, 1), int, int)
    assert made == LayerGroup(**GROUP, lifetime=made.lifetime)
    assert made.lifetime.__class__.__name__ == "Lifetime"
    both: Any = [LayerGroup(**{**GROUP, "name": "kept"}), made]
    assert Layout(model="m", groups=both, window_tokens=8).window_groups == (made,)


SIZES: list[Any] = [
    *(
        "9" * 400,
        "9" * 400 + "GiB",
        "9" * 100_000,
        -(10**5000),
        10**5000,
        "\u0661\u0662",
        "1e3",
        "-1",
    ),
    *(
        "nan",
        "0x10",
        "1.",
        ".5",
        "",
        " ",
        "1 000",
        "4Gi",
        "4gib",
        True,
        16.0,
        float("nan"),
        None,
        [1],
    ),
]


def test_a_size_that_is_none_is_refused_shortly() -> None:
    for size in SIZES:
        message = said(partial(size_bytes, size, "ssd_bytes"))
        assert message.startswith("ssd_bytes must "), size
        assert len(message) < 400
