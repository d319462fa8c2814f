"""Supported model types, with the stems of their class names and the rule for their layout.

Other types are refused, because a config does not list all that a model caches. Source: configuration_*.py
and modeling_*.py of transformers 5.24; for types without a class there, their repositories and vLLM.
tests/layout/test_classes.py compares the layouts with the caches of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvstore.errors import ConfigError
from kvstore.layout.models.blocks import per_block
from kvstore.layout.models.compressed import compressed, compressed_sparse
from kvstore.layout.models.fields import Config, integer, type_of
from kvstore.layout.models.latent import Latent, latent, latent_sparse
from kvstore.layout.models.plain import Plain, Slides, plain
from kvstore.layout.values import Layout

Read = Callable[[Config, str, "str | Mapping[str, str] | None"], Layout]
"""Function from a config, the format of its cache and the caller's ``dtype`` to a layout."""


@dataclass(frozen=True, slots=True)
class Known:
    """Model type: the stems of its class names, such as ``Llama`` of ``LlamaForCausalLM``, and its rule."""

    stems: tuple[str, ...]
    read: Read


_HEADS: Mapping[str, None] = {"num_key_value_heads": None}
"""Default of classes with as many KV heads as heads."""
_LLAMA = Plain(left_out=_HEADS)
_GIVEN = Plain()
"""Rule of classes whose config must give the number of KV heads."""


def _plain(stems: str, spec: Plain = _LLAMA) -> Known:
    return Known(tuple(stems.split()), partial(plain, spec))


def _latent(stems: str, spec: Latent | None = None) -> Known:
    return Known(tuple(stems.split()), partial(latent, spec or Latent()))


def _fixed(stems: str, read: Callable[[Config], Layout]) -> Known:
    """Return a type with fixed entry formats; it refuses ``dtype``."""

    def layout(config: Config, _own: str, dtype: str | Mapping[str, str] | None) -> Layout:
        if dtype is not None:
            msg = f"{config.get('model_type')} has fixed entry formats, found dtype={dtype!r}; leave it out"
            raise ConfigError(msg)
        return read(config)

    return Known(tuple(stems.split()), layout)


def _falcon_kv_heads(config: Config, heads: int) -> int:
    """Return the KV heads of Falcon; engines differ in the cache of its later configs."""
    if config.get("new_decoder_architecture"):
        msg = (
            f"model type {type_of(config)} has new_decoder_architecture: transformers caches keys and values "
            "for every head, other engines only for KV heads; make a kvstore.Layout"
        )
        raise ConfigError(msg)
    if config.get("multi_query", True):
        return 1
    given = config.get("num_kv_heads")
    return heads if given is None else integer(config, "num_kv_heads")


def _bigcode_kv_heads(config: Config, heads: int) -> int:
    return 1 if config.get("multi_query", True) else heads


_GPT2 = Plain(
    layers=("n_layer", "num_hidden_layers"),
    heads=("n_head", "num_attention_heads"),
    hidden=("n_embd", "hidden_size"),
    kv_heads=(),
    head_dim=(),
)
_OWN_HEADS = Plain(kv_heads=(), head_dim=())
_DIVIDED = Plain(head_dim=())
_HUNYUAN = Plain(head_dim=("head_dim", "attention_head_dim"), left_out=_HEADS)
_QWEN2 = Plain(
    slides=Slides.UPPER,
    left_out={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
)
_QWEN3 = Plain(slides=Slides.UPPER, left_out={**_QWEN2.left_out, "head_dim": 128})
_QWEN_STATED = Plain(slides=Slides.STATED, left_out={"use_sliding_window": False})
_EVERY = Plain(slides=Slides.EVERY)
_STATED = Plain(slides=Slides.STATED)
_GEMMA = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


def _defaults(slides: Slides = Slides.NONE, **left_out: int | None) -> Plain:
    return Plain(slides=slides, left_out=left_out)


def _dim(head_dim: int, slides: Slides = Slides.NONE) -> Plain:
    return _defaults(slides, head_dim=head_dim)


KNOWN: Mapping[str, Known] = {
    # ---- plain, every layer full -----------------------------------------------------------------
    "llama": _plain("Llama"),
    "apertus": _plain("Apertus"),
    "apertus1p5_text": _plain("Apertus1p5 Apertus1p5Text"),
    "arcee": _plain("Arcee"),
    "aria_text": _plain("AriaText"),
    "bailing_moe": _plain("BailingMoe BailingMoeV2", _GIVEN),
    "biogpt": _plain("BioGpt", _OWN_HEADS),
    "bitnet": _plain("BitNet", _GIVEN),
    "bloom": _plain("Bloom", replace(_GPT2, hidden=("hidden_size", "n_embed"))),
    "codegen": _plain("CodeGen", _GPT2),
    "cohere": _plain("Cohere"),
    "diffllama": _plain("DiffLlama"),
    "ernie4_5": _plain("Ernie4_5", _dim(128)),
    "ernie4_5_moe": _plain("Ernie4_5_Moe Ernie4_5_MoE", _GIVEN),
    "exaone": _plain("Exaone Llama", Plain(layers=("num_hidden_layers", "num_layers"))),
    "falcon": _plain(
        "Falcon RW", Plain(kv_heads_of=_falcon_kv_heads, head_dim=(), claims=("multi_query",))
    ),
    "flex_olmo": _plain("FlexOlmo"),
    "gemma": _plain("Gemma", _dim(256)),
    "glm": _plain("Glm", _dim(128)),
    "glm4": _plain("Glm4", _dim(128)),
    "glm4_moe": _plain("Glm4Moe", _GIVEN),
    "gpt2": _plain("GPT2", _GPT2),
    "gpt-sw3": _plain("GPT2", _GPT2),
    "gpt_bigcode": _plain(
        "GPTBigCode", replace(_GPT2, kv_heads_of=_bigcode_kv_heads, claims=("multi_query",))
    ),
    "gpt_neox": _plain("GPTNeoX", _OWN_HEADS),
    "gpt_neox_japanese": _plain("GPTNeoXJapanese", _OWN_HEADS),
    "gptj": _plain("GPTJ", _GPT2),
    "granite": _plain("Granite"),
    "granitemoe": _plain("GraniteMoe"),
    "granitemoeshared": _plain("GraniteMoeShared"),
    "helium": _plain("Helium", _dim(128)),
    "hunyuan_v1_dense": _plain("HunYuanDenseV1", _HUNYUAN),
    "hunyuan_v1_moe": _plain("HunYuanMoEV1", _HUNYUAN),
    "hy_v3": _plain("HYV3", _dim(128)),
    "hyperclovax": _plain("HyperCLOVAX"),
    "internlm2": _plain("InternLM2", _GIVEN),
    "internlm3": _plain("InternLM3 Llama", _dim(128)),
    "iquestcoder": _plain("IQuestCoder Llama", _dim(128)),
    "jais2": _plain("Jais2"),
    "jetmoe": _plain(
        "JetMoe JetMoE", Plain(head_dim=("kv_channels", "head_dim"), left_out={"kv_channels": 128})
    ),
    "minicpm": _plain("MiniCPM", _GIVEN),
    "minimax_m2": _plain("MiniMaxM2", _dim(128, Slides.EVERY)),
    "mobilellm": _plain("MobileLLM", _GIVEN),
    "nanochat": _plain("NanoChat"),
    "nemotron": _plain("Nemotron"),
    "nemotron-nas": Known(("DeciLM",), per_block),
    "olmo": _plain("Olmo"),
    "olmo2": _plain("Olmo2"),
    "olmoe": _plain("Olmoe"),
    "opt": _plain("OPT", _OWN_HEADS),
    "persimmon": _plain("Persimmon", _OWN_HEADS),
    "phi": _plain("Phi"),
    "sarvam_moe": _plain("Glm4Moe SarvamMoe SarvamMoE", _dim(64)),
    "seed_oss": _plain("SeedOss", _dim(128)),
    "solar_open": _plain("SolarOpen", _dim(128)),
    "stablelm": _plain("StableLm", _DIVIDED),
    "step3_text": _plain("Step3Text", Plain(kv_heads=("num_attention_groups",))),
    "xglm": _plain(
        "XGLM",
        replace(
            _OWN_HEADS,
            layers=("num_layers", "num_hidden_layers"),
            heads=("attention_heads", "num_attention_heads"),
            hidden=("d_model", "hidden_size"),
        ),
    ),
    # ---- plain, with a sliding window in every layer if the config has one ------------------------
    "ministral3": _plain("Ministral3", _dim(128, Slides.EVERY)),
    "mistral": _plain(
        "Mistral", _defaults(Slides.EVERY, num_key_value_heads=8, sliding_window=4096)
    ),
    "mixtral": _plain("Mixtral", _EVERY),
    "phi3": _plain("Phi3", _defaults(Slides.EVERY, **_HEADS)),
    "phimoe": _plain("PhiMoE Phimoe", _EVERY),
    "starcoder2": _plain("Starcoder2", _EVERY),
    # ---- plain, full and sliding layers ------------------------------------------------------------
    "afmoe": _plain("Afmoe", _defaults(Slides.STATED, **_HEADS, head_dim=128)),
    "cohere2": _plain(
        "Cohere2", _defaults(Slides.STATED, **_HEADS, sliding_window=4096, sliding_window_pattern=4)
    ),
    "cohere2_moe": _plain("Cohere2Moe", _defaults(Slides.STATED, **_HEADS, head_dim=128)),
    "cwm": _plain("Cwm", _dim(128, Slides.STATED)),
    "dots1": _plain("Dots1", _defaults(Slides.UPPER, sliding_window=4096, max_window_layers=62)),
    "exaone4": _plain("Exaone4", _STATED),
    "exaone_moe": _plain("ExaoneMoe ExaoneMoE", _STATED),
    "gemma2": _plain(
        "Gemma2", _defaults(Slides.STATED, **_GEMMA, sliding_window=4096, sliding_window_pattern=2)
    ),
    "gemma3_text": _plain(
        "Gemma3 Gemma3Text",
        _defaults(Slides.STATED, **_GEMMA, sliding_window=4096, sliding_window_pattern=6),
    ),
    "gemma3n_text": _plain(
        "Gemma3n Gemma3nText",
        Plain(
            slides=Slides.STATED,
            left_out={"head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15},
            shares="num_kv_shared_layers",
            claims=("num_kv_shared_layers",),
        ),
    ),
    "gpt_oss": _plain(
        "GptOss",
        _defaults(
            Slides.STATED,
            head_dim=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            sliding_window=128,
            sliding_window_pattern=2,
        ),
    ),
    "granite_swa": _plain("GraniteSWA", _STATED),
    "granitemoe_swa": _plain("GraniteMoeSWA", _defaults(Slides.STATED, **_HEADS)),
    "laguna": _plain("Laguna", _dim(128, Slides.STATED)),
    "mellum": _plain("Mellum", _dim(128, Slides.STATED)),
    "ministral": _plain("Ministral", _STATED),
    "olmo3": _plain("Olmo3", _defaults(Slides.STATED, **_HEADS)),
    "qwen2": _plain("Qwen2", _QWEN2),
    "qwen2_vl": _plain("Qwen2VL", _QWEN2),
    "qwen2_vl_text": _plain("Qwen2VLText", _QWEN2),
    "qwen2_5_vl": _plain("Qwen2_5_VL", _QWEN2),
    "qwen2_5_vl_text": _plain("Qwen2_5_VLText", _QWEN2),
    "qwen2_5_omni_text": _plain(
        "Qwen2_5OmniText", _defaults(Slides.UPPER, **{**_QWEN2.left_out, "sliding_window": 32768})
    ),
    "qwen2_moe": _plain("Qwen2Moe", _QWEN_STATED),
    "qwen3": _plain("Qwen3", _QWEN3),
    "qwen3_moe": _plain("Qwen3Moe", _QWEN_STATED),
    "qwen3_omni_moe_text": _plain("Qwen3OmniMoeText", _EVERY),
    "qwen3_vl_text": _plain("Qwen3VLText", _dim(128)),
    "qwen3_vl_moe_text": _plain("Qwen3VLMoeText", _GIVEN),
    "smollm3": _plain("SmolLM3", _QWEN_STATED),
    "vaultgemma": _plain("VaultGemma", _defaults(Slides.STATED, head_dim=256, sliding_window=4096)),
    # ---- text parts of models of several media ------------------------------------------------------
    "glm4v_text": _plain("Glm4vText", _GIVEN),
    "glm4v_moe_text": _plain("Glm4vMoeText", _GIVEN),
    # ---- latent attention ------------------------------------------------------------------------
    "axk1": _latent("AXK1"),
    "deepseek_v2": _latent("DeepseekV2"),
    "deepseek_v3": _latent("DeepseekV3"),
    "glm4_moe_lite": _latent("Glm4MoeLite"),
    "kimi_k2": _latent("DeepseekV3 KimiK2"),
    "longcat_flash": _latent("LongcatFlash", Latent(layers="num_layers", per_layer=2)),
    "minicpm3": _latent("MiniCPM3"),
    "mistral4": _latent("Mistral4"),
    "sarvam_mla": _latent("DeepseekV3 SarvamMLA"),
    "youtu": _latent("Youtu"),
    # ---- formats of their own ----------------------------------------------------------------------
    "deepseek_v32": _fixed("DeepseekV32", latent_sparse),
    "glm_moe_dsa": _fixed("GlmMoeDsa", latent_sparse),
    "deepseek_v4": _fixed("DeepseekV4", compressed),
    "deepseek_v41_text": _fixed("DeepseekV41 DeepseekV41Text", compressed_sparse),
}


def _camel_case(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


_WRAPPERS = """
apertus1p5 aria aya_vision cohere2_vision deepseek_v41 fast_vlm gemma3 gemma3n glm4v
glm4v_moe got_ocr2 granite_speech idefics2 idefics3 janus llava llava_next
llava_next_video llava_onevision mistral3 ovis2 qwen2_audio qwen3_omni_moe
qwen3_omni_moe_thinker ultravox voxtral
"""
"""Types whose stem is their name in camel case."""
WRAPPERS: Mapping[str, tuple[str, ...]] = {
    **{name: (_camel_case(name),) for name in _WRAPPERS.split()},
    "deepseek_vl": ("DeepseekVL",),
    "deepseek_vl_hybrid": ("DeepseekVLHybrid",),
    "deepseek_vl_v2": ("DeepseekVLV2",),
    "glm46v": ("Glm46V",),
    "internvl": ("InternVL",),
    "internvl_chat": ("InternVLChat",),
    "kimi_k25": ("Kimi_K25", "KimiK25"),
    "kimi_vl": ("KimiVL",),
    "lighton_ocr": ("LightOnOcr", "LightOnOCR"),
    "paligemma": ("PaliGemma",),
    "perception_lm": ("PerceptionLM",),
    "qwen2_5_omni": ("Qwen2_5Omni",),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinker",),
    "qwen2_5_vl": ("Qwen2_5_VL",),
    "qwen2_vl": ("Qwen2VL",),
    "qwen3_vl": ("Qwen3VL",),
    "qwen3_vl_moe": ("Qwen3VLMoe",),
    "shieldgemma2": ("ShieldGemma2", "Gemma3"),
    "smolvlm": ("SmolVLM",),
    "step3_vl": ("Step3VL",),
    "vipllava": ("VipLlava",),
}
"""Multimodal model types with the cache of their language model alone, and their stems. Images and sounds are
tokens of that model. Types with cross attention (mllama, idefics, evolla) are not listed."""

NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Fields with the config of a wrapper's language model, in order of preference."""

_NOT_YET = "this version supports keys and values, latents and sliding windows only"
_STATE = f"keeps a recurrent or convolution state beside or instead of keys and values: {_NOT_YET}"
_ENCODER = "is an encoder: it has no cache that later tokens read, so there is nothing to store"
_CROSS = f"caches keys and values of another input (cross attention) beside those of its tokens: {_NOT_YET}"
_CHUNKS = f"attends in chunks, whose keys and values are of no use after their chunk: {_NOT_YET}"
_INDEXERS = f"has indexer keys in some of its layers, or in a format of its own: {_NOT_YET}"
_REASONS = {
    _STATE: (
        "bailing_hybrid bailing_moe_linear bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear "
        "lfm2 lfm2_moe mamba mamba2 minimax minimax_m1 minimax_text_01 nemotron_h olmo_hybrid qwen3_5 "
        "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    _ENCODER: (
        "albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2 distilbert electra "
        "ernie eurobert gte longformer megatron-bert modernbert mpnet nomic_bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer siglip clip vit xlm-roberta xlm-roberta-xl xmod"
    ),
    _CROSS: (
        "bart bigbird_pegasus blenderbot blenderbot-small evolla idefics led longt5 m2m_100 marian mbart "
        "mllama mllama_text_model moshi mt5 musicgen musicgen_melody mvp pegasus plbart prophetnet "
        "switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 whisper"
    ),
    _CHUNKS: "llama4 llama4_text",
    _INDEXERS: "axk2 dots3_note dots3_note_text hy_v4 hy_v4_vl hy_v4_vl_text mistral_large4",
}
REASONS: Mapping[str, str] = {
    kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()
}
"""Model types that are refused, with the reason."""
