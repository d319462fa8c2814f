"""KV caches of transformers to entries and back, and through a store: exact, or recomputed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, LlamaForCausalLM

import kvstore
from kvstore.cli.demo.prompt import default_text
from kvstore.codec import codec_for
from kvstore.engine import smollm2
from kvstore.engine.transformers import (
    CausalModel,
    TransformersAdapter,
    _cache_argument,
    model_layout,
    model_namespace,
    open_adapter,
)
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.frame.format import FrameFormat
from kvstore.frame.header import head_sum
from kvstore.tier.ssd.values import Put
from tests.engine.tiny import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model
from tests.stores import tier_of

BLOCK = 16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


def open_cache(path: Path, layout: kvstore.Layout, **options: Any) -> kvstore.PrefixCache:
    defaults: dict[str, Any] = {
        "namespace": kvstore.Namespace(model="tiny"),
        "block_tokens": BLOCK,
        "ssd_bytes": "64MiB",
        "device_bytes": 0,
        "window_bytes": 0,
    }
    return kvstore.PrefixCache.open(path, layout=layout, **{**defaults, **options})


def filled(model: Any, tokens: list[int]) -> DynamicCache:
    past = DynamicCache()
    CausalModel(model).forward(tokens, past)
    return past


def tensors(past: DynamicCache) -> list[torch.Tensor]:
    return [tensor for keys, values, *_ in past for tensor in (keys, values)]


@every_dtype
def test_the_layout_of_a_model_has_its_own_kv_dtype_and_grouped_heads(dtype: torch.dtype) -> None:
    layout = model_layout(tiny_model(dtype))
    assert [group.name for group in layout.groups] == ["k", "v"]
    for group in layout.groups:
        assert group.layers == tuple(range(LAYERS))
        assert group.entry_bytes == KV_HEADS * HEAD_DIM * dtype.itemsize
    assert layout.model == "llama"


@every_dtype
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_restored_cache_is_the_captured_one_bit_for_bit(
    dtype: torch.dtype, kv_heads: int, tmp_path: Path
) -> None:
    model = tiny_model(dtype, num_key_value_heads=kv_heads)
    past = filled(model, prompt(37))
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        restored = adapter.restore(adapter.capture(past))
    assert len(restored.layers) == LAYERS
    assert restored.get_seq_length() == 37
    for found, expected in zip(tensors(restored), tensors(past), strict=True):
        assert found.dtype == dtype
        assert found.stride() == expected.stride()
        assert found.is_contiguous()
        assert torch.equal(found, expected)


def test_one_entry_is_the_heads_of_one_layer_and_token(tmp_path: Path) -> None:
    model = tiny_model()
    past = filled(model, prompt(20))
    with open_cache(tmp_path, model_layout(model)) as cache:
        entries = TransformersAdapter(model, cache).capture(past, 5, 9)
    for name, position in (("k", 0), ("v", 1)):
        assert entries[name].shape == (LAYERS, 4, KV_HEADS * HEAD_DIM * 4)
        numbers = entries[name][2, 3].view(np.float32).reshape(KV_HEADS, HEAD_DIM)
        expected = list(past)[2][position][0, :, 8].numpy()
        np.testing.assert_array_equal(numbers, expected)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 21)])
def test_a_range_outside_the_cache_is_refused(start: int, stop: int, tmp_path: Path) -> None:
    model = tiny_model()
    past = filled(model, prompt(20))
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        with pytest.raises(ValueError, match=r"<= 20 tokens in the KV cache, found"):
            adapter.capture(past, start, stop)


@every_dtype
@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK - 1])
def test_a_new_cache_continues_with_exactly_the_cold_logits(
    dtype: torch.dtype, length: int, tmp_path: Path
) -> None:
    model = tiny_model(dtype)
    tokens = prompt(length)
    layout = model_layout(model)
    with open_cache(tmp_path, layout) as cache:
        cold = TransformersAdapter(model, cache).generate(tokens, 8)
    stages: list[str] = []
    with open_cache(tmp_path, layout) as cache:
        adapter = TransformersAdapter(model, cache, on_stage=stages.append)
        warm = adapter.generate(tokens, 8)
    assert cold.hit_tokens == 0
    assert warm.hit_tokens == (length - 1) // BLOCK * BLOCK
    assert warm.new_tokens == cold.new_tokens
    np.testing.assert_array_equal(warm.logits, cold.logits)
    assert stages == ["lookup", "read", "restore", "forward"]


def test_without_reuse_nothing_is_looked_up(tmp_path: Path) -> None:
    model = tiny_model()
    stages: list[str] = []
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache, on_stage=stages.append)
        adapter.generate(prompt(40), 1)
        cache.flush()
        stages.clear()
        assert adapter.prefill(prompt(40), reuse=False).hit_tokens == 0
    assert stages == ["forward"]


def test_a_prompt_that_goes_on_restores_what_it_shares(tmp_path: Path) -> None:
    model = tiny_model()
    first, longer = prompt(40), prompt(40) + prompt(30, seed=1)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        adapter.generate(first, 4)
        cache.flush()
        warm = adapter.generate(longer, 4)
        cache.flush()
        again = adapter.generate(longer, 4)
    cold = CausalModel(model).forward(longer)
    assert (warm.hit_tokens, again.hit_tokens) == (32, 64)
    # Cut at another place than a run in one piece, so equal up to rounding only.
    np.testing.assert_allclose(warm.logits[0], cold, atol=1e-5)
    np.testing.assert_allclose(again.logits[0], cold, atol=1e-5)


def forge(cache: kvstore.PrefixCache, tokens: list[int], target: int, source: int) -> None:
    """Give block ``target`` the payload of block ``source``, with every checksum made right."""
    ssd, prefix = tier_of(cache), cache.probe(tokens).prefix
    mine, other = ssd.frame(prefix.key(target)), ssd.frame(prefix.key(source))
    record = ssd.record(prefix.key(target))
    assert mine is not None
    assert other is not None
    assert record is not None
    forged = FrameFormat(cache.layout, cache.block_tokens).forge(mine, other)
    changed = replace(record, page=0, head_sum=head_sum(forged))
    ssd.put([Put(prefix.key(target), changed, forged)])


@every_dtype
def test_another_blocks_payload_shows_in_the_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    """The negative control: the exactness tests detect wrong bytes."""
    model = tiny_model(dtype)
    tokens = prompt(70)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        cold = adapter.generate(tokens, 1)
        cache.flush()
        forge(cache, tokens, target=1, source=2)
        warm = adapter.generate(tokens, 1)
    assert warm.hit_tokens == 64
    assert np.abs(warm.logits - cold.logits).max() > 0


class TakesPastKeyValues(LlamaForCausalLM):  # type: ignore[misc]
    """A model of the kind whose forward calls its cache ``past_key_values``."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **others: Any) -> Any:
        import inspect

        name = _cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
        return super().forward(input_ids=input_ids, **{name: past_key_values}, **others)


class TakesCache(LlamaForCausalLM):  # type: ignore[misc]
    """A model of the kind whose forward calls its cache ``cache``."""

    def forward(self, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        import inspect

        name = _cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
        return super().forward(input_ids=input_ids, **{name: cache}, **others)


@pytest.mark.parametrize("kind", [TakesPastKeyValues, TakesCache])
def test_either_name_of_the_cache_argument_works(
    kind: type[LlamaForCausalLM], tmp_path: Path
) -> None:
    model = tiny_model(kind=kind)
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        cold = adapter.generate(prompt(40), 2)
        cache.flush()
        warm = adapter.generate(prompt(40), 2)
    assert warm.hit_tokens == 32
    np.testing.assert_array_equal(warm.logits, cold.logits)


SMALL: dict[str, Any] = {"ssd_bytes": "64MiB", "device_bytes": 0, "window_bytes": 0}


def test_two_lines_serve_a_model(tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 5)
    for hit in (0, 3 * BLOCK):
        with open_adapter(tiny_model(), tmp_path / "s", block_tokens=BLOCK, **SMALL) as adapter:
            assert adapter.generate(tokens, 2).hit_tokens == hit


def _retrained(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data += 1e-3


def _adapted(model: Any) -> None:
    """A module with an attached LoRA adapter: additional parameters."""
    model.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Parameter(torch.ones(2, 3))


def _rotated(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}


@pytest.mark.parametrize("change", [_retrained, _adapted, _rotated])
def test_another_computation_never_hits(change: Any, tmp_path: Path) -> None:
    tokens = prompt(3 * BLOCK + 5)
    other = tiny_model()
    change(other)
    for model, hit in (
        (tiny_model(), 0),
        (other, 0),
        (other, 3 * BLOCK),
        (tiny_model(), 3 * BLOCK),
    ):
        with open_adapter(model, tmp_path / "s", block_tokens=BLOCK, **SMALL) as adapter:
            assert adapter.generate(tokens, 2).hit_tokens == hit


def test_what_a_model_is_called_changes_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    expected = model_namespace(model)
    tiny_model().save_pretrained(tmp_path / "elsewhere")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "elsewhere")
    assert model_namespace(loaded) == expected
    assert model_namespace(model.to(torch.bfloat16)) != expected


def test_one_changed_number_is_another_namespace() -> None:
    model = tiny_model()
    expected = model_namespace(model)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for place in (0, len(flat) // 2 + 1, len(flat) - 1):
            before = flat[place].item()
            flat[place] = before + 1
            assert model_namespace(model) != expected
            flat[place] = before
    assert model_namespace(model) == expected


def test_a_tenant_of_its_own_is_an_option(tmp_path: Path) -> None:
    tokens, model = prompt(3 * BLOCK + 5), tiny_model()
    for tenant, hit in (("a", 0), ("b", 0), ("a", 3 * BLOCK)):
        with open_adapter(model, tmp_path / "s", tenant=tenant, block_tokens=BLOCK, **SMALL) as it:
            assert it.generate(tokens, 2).hit_tokens == hit
            it.cache.flush()
    with (
        pytest.raises(ConfigError, match="found tenant 'a' and a namespace"),
        open_adapter(model, tmp_path / "s", tenant="a", namespace=model_namespace(model)),
    ):
        pass


def test_an_unknown_option_or_no_model_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"'tenat' is unknown, expected some of .*tenant.*ssd_bytes"
        ),
        open_adapter(tiny_model(), tmp_path / "s", tenat="a"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="must be a loaded transformers model, found str"),
        open_adapter("folder", tmp_path / "s"),
    ):
        pass
    assert not (tmp_path / "s").exists()


def test_another_tenant_or_tokenizer_never_hits(tmp_path: Path) -> None:
    tokens, model = prompt(3 * BLOCK + 5), tiny_model()
    spaces = [
        model_namespace(model),
        model_namespace(model, tenant="b"),
        model_namespace(model, tokenizer="2"),
        replace(model_namespace(model), adapter="sql"),
        replace(model_namespace(model), generation=1),
    ]
    for hit in (0, 3 * BLOCK):
        for space in spaces:
            options = {"namespace": space, "block_tokens": BLOCK, **SMALL}
            with open_adapter(model, tmp_path / "s", **options) as adapter:
                assert adapter.generate(tokens, 2).hit_tokens == hit


def test_another_dtype_or_block_size_is_refused_with_the_store_untouched(tmp_path: Path) -> None:
    tokens, model = prompt(3 * BLOCK + 5), tiny_model()
    with open_adapter(model, tmp_path / "s", block_tokens=BLOCK, **SMALL) as adapter:
        adapter.generate(tokens, 2)
    for options in ({"block_tokens": 8}, {"block_tokens": BLOCK, "dtype": "bf16"}):
        with (
            pytest.raises(
                LayoutMismatch,
                match="found block_tokens 16, expected 8"
                if "dtype" not in options
                else "found k: entry_format f32, expected bf16",
            ),
            open_adapter(model, tmp_path / "s", **options, **SMALL),
        ):
            pass
    with open_adapter(model, tmp_path / "s", block_tokens=BLOCK, **SMALL) as adapter:
        assert adapter.generate(tokens, 2).hit_tokens == 3 * BLOCK


def test_a_model_that_takes_no_cache_is_refused() -> None:
    class Bare:
        def forward(self, input_ids: Any) -> None: ...

    with pytest.raises(ConfigError, match="needs an argument cache or past_key_values"):
        CausalModel(Bare())


def test_a_cache_of_another_shape_is_refused(tmp_path: Path) -> None:
    other = model_layout(tiny_model(num_hidden_layers=2))
    with (
        open_cache(tmp_path, other) as cache,
        pytest.raises(LayoutMismatch, match=r"found groups k \(2 layers of 32\).* expected k \(3"),
    ):
        TransformersAdapter(tiny_model(), cache)


def test_a_model_of_sliding_windows_alone_is_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["sliding_attention"] * LAYERS
    with pytest.raises(
        ConfigError, match="sliding_attention in layer_types, which its class does not support"
    ):
        model_layout(model)


def test_a_model_that_caches_no_keys_and_values_is_refused() -> None:
    model = tiny_model()
    model.config.kv_lora_rank, model.config.qk_rope_head_dim = 16, 8
    with pytest.raises(
        ConfigError, match=r"uses latent attention \(kv_lora_rank\), expected plain keys"
    ):
        model_layout(model)


def test_other_formats_round_once_and_go_through_their_codec(tmp_path: Path) -> None:
    model = tiny_model(torch.float32)
    past = filled(model, prompt(33))
    layout = model_layout(model, dtype={"k": "bf16", "v": "nvfp4"})
    with open_cache(tmp_path, layout) as cache:
        adapter = TransformersAdapter(model, cache)
        restored = adapter.restore(adapter.capture(past))
    for (keys, values, *_), (k, v, *_) in zip(restored, past, strict=True):
        assert torch.equal(keys, k.to(torch.bfloat16).float())
        codec = codec_for(layout.group("v"))
        rows = v[0].transpose(0, 1).reshape(33, -1).contiguous()
        decoded: torch.Tensor = codec.decode(codec.encode(rows), "float32")
        assert torch.equal(values[0].transpose(0, 1).reshape(33, -1), decoded)
        assert not torch.equal(values, v)


def test_read_only_entries_are_restored_too(tmp_path: Path) -> None:
    model = tiny_model()
    past = filled(model, prompt(20))
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        entries: dict[str, NDArray[np.uint8]] = adapter.capture(past)
        for array in entries.values():
            array.setflags(write=False)
        restored = adapter.restore(entries)
    assert all(map(torch.equal, tensors(restored), tensors(past)))


def test_an_empty_prompt_and_no_new_tokens_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with open_cache(tmp_path, model_layout(model)) as cache:
        adapter = TransformersAdapter(model, cache)
        with pytest.raises(ValueError, match="needs at least one token"):
            adapter.prefill([])
        with pytest.raises(ValueError, match="count must be at least 1, found 0"):
            adapter.generate([1], 0)


def test_smollm2_continues_exactly_from_a_store_opened_anew(tmp_path: Path) -> None:
    folder = smollm2.prepare(lambda _message: None)
    loaded = smollm2.load(folder, smollm2.fastest_dtype())
    tokens = loaded.tokenizer(default_text()[:4000])["input_ids"][: 4 * 128 + 16]
    layout = model_layout(loaded.model)
    assert layout.bytes_per_token == 23_040 * loaded.model.dtype.itemsize // 2
    options = {"namespace": loaded.namespace, "block_tokens": 128, "ssd_bytes": "256MiB"}
    with open_cache(tmp_path, layout, **options) as cache:
        cold = TransformersAdapter(loaded.model, cache, store_wait=60).generate(tokens, 4)
    with open_cache(tmp_path, layout, **options) as cache:
        warm = TransformersAdapter(loaded.model, cache).generate(tokens, 4)
        forge(cache, tokens, target=1, source=3)
        control = TransformersAdapter(loaded.model, cache).generate(tokens, 1)
    assert (cold.hit_tokens, warm.hit_tokens, control.hit_tokens) == (0, 512, 512)
    assert warm.new_tokens == cold.new_tokens
    np.testing.assert_array_equal(warm.logits, cold.logits)
    difference = float(np.abs(control.logits[0] - cold.logits[0]).max())
    logging.getLogger(__name__).info("another block's payload moves a logit by %.3g", difference)
    assert difference > 0
