"""Layouts compared with caches of transformers' own classes: one class for each kind of config.

All of them, with configs that are unlike the usual ones, are ``make torture-models``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import CONFIG_MAPPING

import kvstore
from kvstore.engine.transformers import model_layout
from kvstore.layout.models.known import KNOWN, REASONS, WRAPPERS
from tests.engine import classes

CAUSAL = classes.causal_classes()
KNOWN_HERE = sorted(CAUSAL.keys() & KNOWN.keys())
CHOSEN = (
    *("llama", "gpt2", "bloom", "falcon", "gpt_bigcode", "jetmoe", "hunyuan_v1_moe", "minimax_m2"),
    *("phi3", "qwen2", "qwen3_moe", "cohere2", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss"),
    *("dots1", "deepseek_v3", "deepseek_v32", "longcat_flash"),
)
"""A class for each rule, and for each name of a field."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than such small models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """A hundred models are not kept until the collector feels like it."""
    yield
    gc.collect()


def test_the_table_is_of_every_causal_class() -> None:
    assert len(CAUSAL) > 150
    assert len(KNOWN_HERE) > 80


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHOSEN)
def test_a_layout_has_the_bytes_of_the_classes_own_cache(kind: str) -> None:
    found = classes.compare(kind, CAUSAL[kind])
    assert found.verdict == "equal", found.detail


@pytest.mark.parametrize("kind", sorted(CAUSAL.keys() - KNOWN.keys()))
def test_a_class_that_is_not_known_is_refused_by_name(kind: str) -> None:
    with pytest.raises(kvstore.ConfigError, match=f"'{kind}'"):
        kvstore.layout({"model_type": kind, "num_hidden_layers": 2, "num_attention_heads": 2})


def test_no_reason_is_given_for_a_type_that_there_is_not() -> None:
    """A name that is misspelt refuses nothing; those of other repositories' code are told here."""
    elsewhere = {"bailing_moe_linear", "minimax_m1", "minimax_text_01", "nomic_bert"}
    assert REASONS.keys() - CONFIG_MAPPING.keys() <= elsewhere
    assert WRAPPERS.keys() - CONFIG_MAPPING.keys() == {
        *("deepseek_v41", "deepseek_vl_v2", "internvl_chat", "kimi_vl", "step3_vl", "ultravox"),
    }


FIELDS = {
    *("num_key_value_heads", "head_dim", "kv_channels", "sliding_window", "layer_types"),
    *("use_sliding_window", "max_window_layers", "multi_query", "num_attention_heads"),
    *("hidden_size", "num_hidden_layers", "num_kv_shared_layers", "sliding_window_pattern"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHOSEN)
def test_what_a_config_leaves_out_is_what_its_class_has(kind: str) -> None:
    """A published config.json has less than its class; both must be one layout, or it is refused."""
    for use in (False, True):
        whole = {**CONFIG_MAPPING[kind]().to_dict(), "max_position_embeddings": 1 << 17}
        whole |= {"use_sliding_window": use} if "use_sliding_window" in whole else {}
        for name in sorted(whole.keys() & FIELDS):
            left = {key: value for key, value in whole.items() if key != name}
            try:
                found = kvstore.layout(left)
                expected = kvstore.layout(CONFIG_MAPPING[kind].from_dict(left).to_dict())
            except kvstore.ConfigError:
                continue
            assert found.groups == expected.groups, name
            assert found.window_tokens == expected.window_tokens, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["falcon", "gemma3n_text", "gpt_bigcode", "jetmoe"])
def test_a_hit_of_an_unusual_class_gives_the_logits_of_a_cold_run(kind: str) -> None:
    found = classes.compare_hit(kind, CAUSAL[kind])
    assert found.verdict == "equal", found.detail


def test_the_adapter_refuses_a_latent() -> None:
    """transformers expands a latent before it caches it, so its cache differs from the layout."""
    model = classes.build(classes.tiny_config("deepseek_v3"), CAUSAL["deepseek_v3"])
    with pytest.raises(
        kvstore.ConfigError, match=r"caches latent \(8 layers of 24\), expected plain"
    ):
        model_layout(model)
