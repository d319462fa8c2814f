"""The identity of a transformers model: every setting, and every change at run time.

A change is made to a model that is open already, and what it is then served must be what a run without
the cache computes, to the last bit.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import kvstore
from kvstore.engine.model_digest import SAMPLES, WHOLE, ModelIdentity
from kvstore.engine.rope import RopeTables
from kvstore.engine.transformers import (
    CausalModel,
    TransformersAdapter,
    model_layout,
    model_namespace,
    open_adapter,
)
from kvstore.errors import ConfigError
from tests.engine.hybrids import hybrid_model
from tests.engine.tiny import VOCAB, tiny_model
from tests.identity_contract import IdentityContract

BLOCK = 16
SMALL: dict[str, Any] = {"ssd_bytes": "64MiB", "device_bytes": 0, "window_bytes": 0}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


def opened(model: Any, path: Path, **options: Any) -> Any:
    return open_adapter(model, path / "store", **{"block_tokens": BLOCK, **SMALL, **options})


class Lora(torch.nn.Module):
    """Two low-rank adapters beside a projection, kept as PEFT keeps them."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        made = torch.Generator().manual_seed(3)
        shapes = (4, base_layer.in_features), (base_layer.out_features, 4)
        parts = [
            torch.nn.ParameterDict({n: torch.randn(shape, generator=made) / 4 for n in "ab"})
            for shape in shapes
        ]
        self.lora_A, self.lora_B = parts
        self.scaling = {"a": 1.0, "b": 1.0}
        self._active_adapter = ["a"]
        self._disable_adapters = False

    def forward(self, x: torch.Tensor) -> Any:
        result = self.base_layer(x)
        for name in () if self._disable_adapters else self._active_adapter:
            result = result + x @ self.lora_A[name].T @ self.lora_B[name].T * self.scaling[name]
        return result


def adapted_model() -> Any:
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj)
    return model.eval()


def adapters(model: Any) -> list[Lora]:
    return [module for module in model.modules() if isinstance(module, Lora)]


# ---- the contract ------------------------------------------------------------------------------


def _edit_value(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 0] += 1


def _slow_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _activate(model: Any) -> None:
    for lora in adapters(model):
        lora._active_adapter = ["b"]


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def _shard(model: Any) -> None:
    model._tp_size = 2


class TransformersRows:
    models: ClassVar[dict[str, Callable[[], Any]]] = {
        "windows": lambda: hybrid_model("gemma3"),
        "adapter": adapted_model,
    }
    changes: ClassVar[dict[str, Callable[[Any], None]]] = {
        "weights": _edit_value,
        "adapter": _activate,
        "positions": _slow_frequencies,
        "compute": _eager,
        "rank": _shard,
    }
    options: ClassVar[dict[str, dict[str, Any]]] = {
        "layout": {"dtype": "bf16"},
        "block_tokens": {"block_tokens": 2 * BLOCK},
        "tokenizer": {"namespace": model_namespace(tiny_model(), tokenizer="2")},
        "tenant": {"tenant": "b"},
        "secret": {"secret": True},
    }

    def __init__(self) -> None:
        self.absent = {"images": "the adapter takes token ids alone: no image reaches its model"}

    def served(self, path: Path, row: str | None) -> int:
        make = self.models.get(row or "", tiny_model)
        tokens, other = prompt(3 * BLOCK + 5), make()
        with opened(make(), path) as adapter:
            adapter.generate(tokens, 1)
            if row == "generation":
                adapter.cache.bump_generation()
        if row == "tokens":
            tokens[0] = (tokens[0] + 1) % VOCAB
        elif row == "windows":
            other = hybrid_model("gemma3", sliding_window=8)
        elif row in self.changes:
            self.changes[row](other)
        with opened(other, path, **self.options.get(row or "", {})) as adapter:
            return int(adapter.prefill(tokens).hit_tokens)


class TestIdentity(IdentityContract):
    adapter = TransformersRows()


# ---- changes of a model that is open -----------------------------------------------------------


def _scale(model: Any) -> None:
    for lora in adapters(model):
        lora.scaling["a"] *= 3


def _disable(model: Any) -> None:
    for lora in adapters(model):
        lora._disable_adapters = True


def _merge(model: Any) -> None:
    """As PEFT does: past autograd, into the weight below."""
    for lora in adapters(model):
        lora.base_layer.weight.data += lora.lora_B["a"] @ lora.lora_A["a"]
        lora._disable_adapters = True


def _add_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[3, 5] += 1


def _add_past_autograd(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data += 0.05


def _replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight * 1.5)


def _round(model: Any) -> None:
    model.to(torch.bfloat16).float()


def _one_frequency(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data[-1] *= 0.5


def _hook(model: Any) -> None:
    steer = torch.linspace(-1, 1, model.config.hidden_size)
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: out + steer)


def _other_hook(model: Any) -> None:
    steer = torch.linspace(1, -1, model.config.hidden_size)
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: out + steer)


def _patched(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, *rest = forward(*args, **kwargs)
        return (2 * out, *rest)

    attention.forward = doubled


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "another adapter": (adapted_model, _activate),
    "its scale": (adapted_model, _scale),
    "no adapter": (adapted_model, _disable),
    "a merged adapter": (adapted_model, _merge),
    "a number in place": (tiny_model, _add_in_place),
    "a tensor past autograd": (tiny_model, _add_past_autograd),
    "another parameter": (tiny_model, _replace_parameter),
    "a cast and back": (tiny_model, _round),
    "one frequency": (tiny_model, _one_frequency),
    "attention": (tiny_model, _eager),
    "a config field": (tiny_model, lambda m: setattr(m.config, "attention_bias", True)),
    "a module's number": (
        tiny_model,
        lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    ),
    "a hook": (tiny_model, _hook),
    "a patched forward": (tiny_model, _patched),
    "another activation": (
        tiny_model,
        lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    ),
}


def given(model: Any) -> kvstore.Namespace:
    return kvstore.Namespace(model="mine", weights="of mine")


@pytest.mark.parametrize("namespace", [None, given], ids=["computed", "given"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_an_open_model_is_another_identity(
    change: str, namespace: Callable[[Any], kvstore.Namespace] | None, tmp_path: Path
) -> None:
    make, apply = CHANGES[change]
    model, tokens = make(), prompt(3 * BLOCK + 5)
    space = None if namespace is None else namespace(model)
    with opened(model, tmp_path, namespace=space) as adapter:
        adapter.generate(tokens, 1)
        adapter.cache.flush()
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK
        apply(model)
        cold = adapter.prefill(tokens, reuse=False)
        changed = adapter.generate(tokens, 1)
        adapter.cache.flush()
        again = adapter.generate(tokens, 1)
    assert (changed.hit_tokens, again.hit_tokens) == (0, 3 * BLOCK)
    np.testing.assert_array_equal(changed.logits[0], cold.logits)
    np.testing.assert_array_equal(again.logits, changed.logits)


@pytest.mark.parametrize("change", ["another adapter", "a number in place", "one frequency"])
def test_the_identity_is_that_of_the_model_opened_anew(change: str, tmp_path: Path) -> None:
    """A process finds the blocks that another one stored after the same change."""
    make, apply = CHANGES[change]
    model, other, tokens = make(), make(), prompt(3 * BLOCK + 5)
    apply(other)
    with opened(model, tmp_path) as adapter:
        adapter.generate(tokens, 1)
        apply(model)
        adapter.generate(tokens, 1)
    with opened(other, tmp_path) as adapter:
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK
    with opened(make(), tmp_path) as adapter:
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK


def test_a_change_that_is_taken_back_is_served_again(tmp_path: Path) -> None:
    model, tokens = adapted_model(), prompt(3 * BLOCK + 5)
    with opened(model, tmp_path) as adapter:
        cold: dict[str, Any] = {}
        for name in "aba":
            for lora in adapters(model):
                lora._active_adapter = [name]
            hit = 3 * BLOCK if name in cold else 0
            made = adapter.generate(tokens, 1)
            assert made.hit_tokens == hit
            np.testing.assert_array_equal(made.logits, cold.setdefault(name, made.logits))
            adapter.cache.flush()
    assert np.abs(cold["a"] - cold["b"]).max() > 0.1


def test_hooks_of_one_code_are_told_apart_by_what_they_hold() -> None:
    """And not by where in memory they lie: another process makes the same of them."""
    names = []
    for hook in (_hook, _hook, _other_hook):
        model = tiny_model()
        hook(model)
        names.append(model_namespace(model).weights)
    assert names[0] == names[1] != names[2]


def test_another_dtype_than_the_store_was_opened_for_is_refused(tmp_path: Path) -> None:
    model, tokens = tiny_model(), prompt(3 * BLOCK + 5)
    with opened(model, tmp_path) as adapter:
        adapter.generate(tokens, 1)
        model.half()
        with pytest.raises(ConfigError, match=r"cast to torch.float16 since .* for torch.float32"):
            adapter.generate(tokens, 1)
        model.float()
        assert adapter.generate(tokens, 1).hit_tokens == 0  # its numbers were rounded


@contextmanager
def precise(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: precise("medium"),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["autocast", "matmul precision", "sdpa kernel"],
)
def test_settings_of_torch_are_part_of_it(setting: Callable[[], Any], tmp_path: Path) -> None:
    model, tokens = tiny_model(), prompt(3 * BLOCK + 5)
    with opened(model, tmp_path) as adapter:
        adapter.generate(tokens, 1)
        adapter.cache.flush()
        with setting():
            cold = adapter.generate(tokens, 2)
            adapter.cache.flush()
            warm = adapter.generate(tokens, 2)
        assert (cold.hit_tokens, warm.hit_tokens) == (0, 3 * BLOCK)
        np.testing.assert_array_equal(warm.logits, cold.logits)
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK


def test_quantised_weights_are_read_in_all_their_parts(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is of extra conformance")

    def quantised() -> Any:
        model = tiny_model(torch.bfloat16)
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
        return model

    first, same, scaled = quantised(), quantised(), quantised()
    weight = scaled.model.layers[0].self_attn.k_proj.weight
    getattr(weight, weight.__tensor_flatten__()[0][1]).data[0] *= 2
    assert model_namespace(first) == model_namespace(same)
    assert model_namespace(first) != model_namespace(scaled)
    assert model_namespace(first) != model_namespace(tiny_model(torch.bfloat16))
    tokens = prompt(3 * BLOCK + 5)
    for model, hit in ((first, 0), (same, 3 * BLOCK), (scaled, 0)):
        with opened(model, tmp_path) as adapter:
            assert adapter.generate(tokens, 1).hit_tokens == hit


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="PEFT is no dependency: transformers takes none older than 0.22; Lora stands for it above",
)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_adapters_of_peft_are_told_apart(tmp_path: Path) -> None:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, tokens = tiny_model(), prompt(3 * BLOCK + 5)
    for name in "ab":
        torch.manual_seed(ord(name))
        config = peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model, name)
    model.eval()
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    changes: list[Callable[[Any], Any]] = [
        lambda layer: layer.set_adapter("a"),
        lambda layer: layer.set_adapter("b"),
        lambda layer: layer.set_scale("b", 3.0),
        lambda layer: layer.enable_adapters(enabled=False),
        lambda layer: layer.enable_adapters(enabled=True),
        lambda layer: layer.merge(),
    ]
    with opened(model, tmp_path) as adapter:
        for number, change in enumerate(changes):
            for layer in layers:
                change(layer)
            cold = adapter.prefill(tokens, reuse=False)
            found = adapter.generate(tokens, 1)
            adapter.cache.flush()
            assert found.hit_tokens == (3 * BLOCK if number == 4 else 0)  # enabled again
            np.testing.assert_array_equal(found.logits[0], cold.logits)


# ---- rope tables that depend on length ---------------------------------------------------------

ORIGINAL = 256
_HALF = 8
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "max_position_embeddings": 4 * ORIGINAL,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * _HALF,
            "long_factor": [1.0 + i for i in range(_HALF)],
            "original_max_position_embeddings": ORIGINAL,
            "factor": 4.0,
        },
    },
    "dynamic": {
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}


def gemma(rope: str) -> Any:
    """Layers of one type have the table that depends on length, those of the other have not."""
    changes = dict(ROPES[rope])
    plain = {"rope_type": "default", "rope_theta": 1e4}
    changes["rope_parameters"] = {
        "full_attention": changes["rope_parameters"],
        "sliding_attention": plain,
    }
    return hybrid_model("gemma3", **changes)


MODELS: dict[str, Callable[[str], Any]] = {
    "llama": lambda rope: tiny_model(**ROPES[rope]),
    "gemma3": gemma,
}
every_rope = pytest.mark.parametrize("rope", ROPES)
every_kind = pytest.mark.parametrize("kind", MODELS)


def plain_logits(model: Any, tokens: list[int]) -> Any:
    """The last token's logits by transformers alone, in one call."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0, -1].float().numpy()


@every_kind
@every_rope
def test_a_request_is_never_served_keys_of_another_table(
    rope: str, kind: str, tmp_path: Path
) -> None:
    """Requests of one beginning, in an order that leaves transformers' tables grown."""
    model = MODELS[kind](rope)
    tokens = prompt(600)
    cold: dict[int, Any] = {}
    hits: dict[int, list[int]] = {}
    sources, replayed = set(), set()
    with opened(model, tmp_path, window_bytes="1MiB") as adapter:
        for length in (200, 600, 300, 100, ORIGINAL, ORIGINAL + 1, 600, 300, 200):
            alone = cold.setdefault(length, plain_logits(MODELS[kind](rope), tokens[:length]))
            made = adapter.generate(tokens[:length], 1)
            adapter.cache.flush()
            hits.setdefault(length, []).append(made.hit_tokens)
            sources.add(made.window_source)
            if made.window_source == "replay":
                replayed.add(length)
            if length not in replayed:  # nor continues a replay, which is an approximation
                np.testing.assert_allclose(made.logits[0], alone, atol=2e-4)
    assert ("pool" in sources) == (kind == "gemma3")
    long = 592 if rope == "longrope" else 0  # "dynamic" has a table for each length
    assert hits == {
        200: [0, 192],
        600: [0, 592],
        300: [288 if long else 0, 288],
        100: [96],
        ORIGINAL: [192],
        ORIGINAL + 1: [ORIGINAL if long else 0],
    }
    assert np.abs(cold[ORIGINAL] - cold[ORIGINAL + 1]).max() > 0.01


@every_rope
def test_a_hit_under_such_a_table_is_the_cold_run_bit_for_bit(rope: str, tmp_path: Path) -> None:
    """Its first chunk ends where the other table would be chosen."""
    for length in (ORIGINAL - BLOCK, ORIGINAL, ORIGINAL + 1, ORIGINAL + BLOCK + 1):
        tokens = prompt(length, seed=length)
        path = tmp_path / str(length)
        with opened(MODELS["llama"](rope), path) as adapter:
            cold = adapter.generate(tokens, 4)
        with opened(MODELS["llama"](rope), path) as adapter:
            adapter.generate(prompt(600), 1)
            warm = adapter.generate(tokens, 4)
        assert (cold.hit_tokens, warm.hit_tokens) == (0, (length - 1) // BLOCK * BLOCK)
        np.testing.assert_array_equal(warm.logits, cold.logits)


@every_rope
def test_what_is_generated_under_other_tables_is_not_kept(rope: str, tmp_path: Path) -> None:
    start = ORIGINAL - 10
    with opened(MODELS["llama"](rope), tmp_path) as adapter:
        tokens = prompt(start)
        made = adapter.generate(tokens, 3 * BLOCK)
        adapter.cache.flush()
        run = tokens + list(made.new_tokens[:-1])
        assert adapter.cache.probe([*run, 1]).hit_tokens == ORIGINAL
        for length in (ORIGINAL, ORIGINAL + BLOCK):
            found = adapter.prefill(run[:length])
            assert found.hit_tokens == (ORIGINAL - BLOCK if length == ORIGINAL else 0)
            alone = plain_logits(MODELS["llama"](rope), run[:length])
            np.testing.assert_allclose(found.logits, alone, atol=2e-4)


@every_kind
@every_rope
def test_equal_digests_are_equal_tables(rope: str, kind: str) -> None:
    model = MODELS[kind](rope)
    tables, found = RopeTables(model), {}
    rotary = model.model.rotary_emb
    argument = {"layer_type": "full_attention"} if kind == "gemma3" else {}
    for length in (600, 100, ORIGINAL, ORIGINAL + 1, 300, 1, 601, ORIGINAL - 1):
        fresh = MODELS[kind](rope).model.rotary_emb
        ends = torch.tensor([[1, length - 1]])
        expected = fresh(torch.zeros(1), ends, **argument)[1][0, 0]
        with tables.request(length):
            asked = rotary(torch.zeros(1), torch.tensor([[1]]), **argument)
        assert asked[0].shape == (1, 1, 16)
        assert torch.equal(asked[1][0, 0], expected)
        found[length] = (tables.digest(length), expected.numpy().tobytes())
    for one in found.values():
        for other in found.values():
            assert (one[0] == other[0]) == (one[1] == other[1])
    last = {"longrope": 600, "dynamic": 301}[rope]
    assert [tables.last_under(n, 600) for n in (1, ORIGINAL, 301, 600)] == [
        ORIGINAL,
        ORIGINAL,
        last,
        600,
    ]


@every_rope
def test_no_call_leaves_its_table_to_the_next(rope: str) -> None:
    causal = CausalModel(MODELS["llama"](rope))
    for length in (600, 300, 100, 300):
        alone = plain_logits(MODELS["llama"](rope), prompt(length))
        np.testing.assert_allclose(causal.forward(prompt(length)), alone, atol=2e-4)


def test_a_model_of_one_table_is_left_alone() -> None:
    model = tiny_model()
    tables = RopeTables(model)
    assert not tables
    assert tables.digest(10) == tables.digest(10_000) == b""
    assert tables.last_under(10, 10_000) == 10_000
    with tables.request(10):
        assert not model.model.rotary_emb._forward_hooks


@every_rope
def test_a_request_that_fails_leaves_no_hook(rope: str) -> None:
    model = MODELS["llama"](rope)
    with pytest.raises(IndexError):
        CausalModel(model).forward([VOCAB + 1])
    assert not model.model.rotary_emb._forward_hooks
    assert not model.model.rotary_emb._forward_pre_hooks


def test_a_table_by_length_that_is_not_transformers_own_is_refused() -> None:
    model = MODELS["llama"]("dynamic")

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope_type = "dynamic"

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> None: ...

    model.model.rotary_emb = Own()
    with pytest.raises(
        ConfigError, match=r"depend on length \(dynamic\): found undecorated forwards of Own,"
    ):
        ModelIdentity(model)
    del model.model.rotary_emb.rope_type
    with pytest.raises(ConfigError, match="found no such module in LlamaForCausalLM"):
        ModelIdentity(model)


# ---- what is refused, and what is not kept -----------------------------------------------------


def test_a_model_that_changes_before_it_is_kept_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = adapted_model(), prompt(3 * BLOCK + 5)
    with opened(model, tmp_path) as adapter, caplog.at_level(logging.WARNING):
        made = adapter.prefill(tokens)
        _activate(model)
        stored = [adapter.keep(tokens, made.past) for _ in range(2)]
        adapter.cache.flush()
        assert adapter.prefill(tokens).hit_tokens == 0
        for lora in adapters(model):
            lora._active_adapter = ["a"]
        assert adapter.prefill(tokens).hit_tokens == 0
        assert adapter.keep(tokens, made.past).end == 3 * BLOCK
        adapter.cache.flush()
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK
    assert stored == 2 * [kvstore.Stored(end=0, present=0, dropped=3)]
    assert [r.message for r in caplog.records if "changed between" in r.message] == [
        (
            "the model changed between the prefill of a prompt and keep, so the prompt was not stored; "
            "further prompts are not logged"
        )
    ]


@every_rope
def test_a_kv_cache_of_an_unknown_table_is_not_kept(rope: str, tmp_path: Path) -> None:
    model, tokens = MODELS["llama"](rope), prompt(3 * BLOCK)
    past = DynamicCache()
    CausalModel(model).forward(tokens, past)
    with (
        opened(model, tmp_path) as adapter,
        pytest.raises(ValueError, match="is of no prefill of this adapter"),
    ):
        adapter.keep(tokens, past)


def test_a_kv_cache_of_a_plain_model_is_kept_as_the_model_is_now(tmp_path: Path) -> None:
    model, tokens = tiny_model(), prompt(3 * BLOCK + 5)
    past = DynamicCache()
    CausalModel(model).forward(tokens, past)
    with opened(model, tmp_path) as adapter:
        assert adapter.keep(tokens, past).end == 3 * BLOCK
        adapter.cache.flush()
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK
        past.layers[1].keys = past.layers[1].keys[:, :, :7]
        with pytest.raises(ValueError, match=r"expected 48 rows of keys in every layer, found 7"):
            adapter.keep(tokens, past)


def test_dropout_is_refused(tmp_path: Path) -> None:
    tokens = prompt(2 * BLOCK + 5)
    model = tiny_model(attention_dropout=0.25)
    with opened(model, tmp_path) as adapter:
        adapter.generate(tokens, 1)
        model.train()
        with pytest.raises(
            ConfigError, match=r"in training mode with dropout 0.25.*model.eval\(\)"
        ):
            adapter.generate(tokens, 1)
    model = adapted_model()
    model.model.layers[0].mlp.dropout = torch.nn.Dropout(0.5)  # a new module is in training mode
    with pytest.raises(ConfigError, match=r"layers.0.mlp.dropout is in training mode"):
        ModelIdentity(model)


class SoftPrompt(LlamaForCausalLM):  # type: ignore[misc]
    """A model that puts two rows of its own before its prompt."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if not past_key_values.get_seq_length():
            embeds = torch.cat([embeds.new_ones(1, 2, embeds.shape[-1]), embeds], dim=1)
        import inspect

        names = inspect.signature(LlamaForCausalLM.forward).parameters
        name = "cache" if "cache" in names else "past_key_values"
        return super().forward(inputs_embeds=embeds, **{name: past_key_values}, **others)


def test_a_model_with_rows_of_its_own_is_refused(tmp_path: Path) -> None:
    with (
        opened(tiny_model(kind=SoftPrompt), tmp_path) as adapter,
        pytest.raises(ConfigError, match="cached 39 rows for 37 tokens"),
    ):
        adapter.generate(prompt(37), 1)


def test_weights_that_are_not_in_memory_need_a_name(tmp_path: Path) -> None:
    model = tiny_model()
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.to("meta"))
    with pytest.raises(ConfigError, match=r"layers.0.mlp.up_proj.weight is not in memory"):
        model_namespace(model)
    with opened(model, tmp_path, namespace=given(model)) as adapter:
        assert adapter._identity.weights() == "of mine"


def test_one_rank_of_several_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model._tp_size = 2
    with (
        pytest.raises(ConfigError, match="one of 2 tensor-parallel ranks"),
        opened(model, tmp_path),
    ):
        pass


# ---- the identity itself -----------------------------------------------------------------------


def test_a_precision_of_one_backend_is_part_of_it() -> None:
    """Once it was set by itself, torch refuses to name the common one."""
    matmul = torch.backends.cuda.matmul
    identity = ModelIdentity(tiny_model())
    weights, before = identity.weights(), matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert identity.weights() != weights
        matmul.fp32_precision = "ieee"
        assert identity.weights() == weights
    finally:
        matmul.fp32_precision = before


def test_running_changes_nothing_of_it(tmp_path: Path) -> None:
    for model in (tiny_model(), hybrid_model("gpt_oss"), *(MODELS["gemma3"](r) for r in ROPES)):
        identity = ModelIdentity(model)
        before = identity.weights(), identity.weights(600)
        CausalModel(model).forward(prompt(600))
        assert (identity.weights(), identity.weights(600)) == before


def test_an_unchanged_model_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.engine import model_digest as module

    read: list[str] = []
    honest = module._content

    def noted(name: str, tensor: torch.Tensor) -> bytes:
        read.append(name)
        return honest(name, tensor)

    monkeypatch.setattr(module, "_content", noted)
    model = adapted_model()
    identity = ModelIdentity(model)
    first, whole = identity.weights(), len(read)
    assert whole == len(dict(model.named_parameters())) + len(dict(model.named_buffers()))
    read.clear()
    _activate(model)
    second = identity.weights()
    model.model.layers[0].mlp.up_proj.weight.data *= 2
    third = identity.weights()
    assert len({first, second, third}) == 3
    assert read == ["model.layers.0.mlp.up_proj.weight"]
    assert identity.weights() == third
    assert len(read) == 1


def test_where_a_given_name_stands_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.engine import model_digest as module

    monkeypatch.setattr(module, "_content", None)
    assert ModelIdentity(tiny_model(), "mine").weights() == "mine"


def test_a_write_past_autograd_outside_the_samples_is_not_seen() -> None:
    """The limit that the docs state: here, so that it is noticed when it changes."""
    model = tiny_model()
    identity = ModelIdentity(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.numel() > WHOLE
    before = identity.weights()
    weight.data.view(-1)[1] += 1
    assert identity.weights() == before
    weight.data.view(-1)[weight.numel() // SAMPLES] += 1
    assert identity.weights() != before


def test_a_namespace_of_another_generation_is_followed(tmp_path: Path) -> None:
    """The scope of a changed model follows the generation of the given namespace."""
    model, tokens = adapted_model(), prompt(3 * BLOCK + 5)
    with opened(model, tmp_path) as adapter:
        _activate(model)
        adapter.generate(tokens, 1)
        adapter.cache.flush()
        assert adapter.prefill(tokens).hit_tokens == 3 * BLOCK
        adapter.cache.bump_generation()
        assert adapter.prefill(tokens).hit_tokens == 0


def test_the_adapter_without_an_identity_takes_its_cache_at_its_word(tmp_path: Path) -> None:
    model, tokens = tiny_model(), prompt(3 * BLOCK + 5)
    options = {"namespace": given(model), "block_tokens": BLOCK, **SMALL}
    layout = model_layout(model)
    with kvstore.PrefixCache.open(tmp_path / "s", layout=layout, **options) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(tokens, 1)
        cache.flush()
        assert cache.probe(tokens).hit_tokens == 3 * BLOCK
        tenant = cache.scope(replace(given(model), tenant="b"))
        assert TransformersAdapter(model, tenant).prefill(tokens).hit_tokens == 0
