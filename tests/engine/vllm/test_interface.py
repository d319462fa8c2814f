"""The connector's assumptions about vLLM: signatures and specs; and its options."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvstore
from kvstore import Pages
from kvstore.engine.vllm import KVStoreConnector
from kvstore.engine.vllm.groups import engine_layout, page_views
from kvstore.engine.vllm.options import (
    Options,
    adapter_identity,
    block_format,
    check_supported,
    request_namespace,
    updated,
)
from kvstore.tier.engine_copy import PagedEntries

LBNHC, LBHNC = KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

pytestmark = pytest.mark.filterwarnings("ignore")

SIGNATURES = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "bind_connector_metadata": ["connector_metadata"],
    "build_connector_meta": ["scheduler_output"],
    "build_connector_worker_meta": [],
    "get_block_ids_with_load_errors": [],
    "get_finished": ["finished_req_ids"],
    "get_handshake_metadata": [],
    "get_kv_connector_stats": [],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "get_transfer_results": ["finished_req_ids"],
    "handle_preemptions": ["kv_connector_metadata"],
    "on_new_request": ["request"],
    "register_kv_caches": ["kv_caches"],
    "request_finished": ["request", "block_ids"],
    "reset_cache": [],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "set_xfer_handshake_metadata": ["metadata"],
    "shutdown": [],
    "start_load_kv": ["forward_context", "kwargs"],
    "take_events": [],
    "update_connector_output": ["connector_output"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "wait_for_layer_load": ["layer_name"],
    "wait_for_save": [],
}
"""Parameters of the methods that this connector defines or relies on, as of vLLM 0.32."""


@pytest.mark.parametrize("method", SIGNATURES)
def test_the_interface_is_the_one_that_was_read(method: str) -> None:
    theirs = getattr(base.KVConnectorBase_V1, method)
    found = [name for name in inspect.signature(theirs).parameters if name != "self"]
    assert found == SIGNATURES[method], "vLLM changed its interface: read it again"
    ours = getattr(KVStoreConnector, method)
    assert [n for n in inspect.signature(ours).parameters if n != "self"] == found


def test_nothing_abstract_is_missing_and_nothing_is_defined_that_vllm_never_calls() -> None:
    assert not inspect.isabstract(KVStoreConnector)
    assert issubclass(KVStoreConnector, base.SupportsHMA)
    ours = {n for n, v in vars(KVStoreConnector).items() if not n.startswith("_")}
    known = set(dir(base.KVConnectorBase_V1)) | set(dir(base.SupportsHMA))
    assert ours - known == {"scheduler_side", "worker_side"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            SchedulerOutput,
            ["num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state"],
        ),
        (KVConnectorBlockState, ["resolve_block_ids"]),
        (KVConnectorOutput, ["kv_connector_worker_meta", "finished_recving", "finished_sending"]),
        (
            base.KVConnectorTransferResults,
            ["finished_sending", "finished_recving", "failed_recving"],
        ),
        (KVCacheConfig, ["kv_tp_replicas", "kv_cache_layout", "cache_hit_alignment_tokens"]),
    ],
)
def test_values_have_the_fields_that_are_read(kind: type, names: list[str]) -> None:
    assert set(names) <= set(kind.__dataclass_fields__)  # type: ignore[attr-defined]


def test_a_request_has_the_fields_that_are_read() -> None:
    source = inspect.getsource(Request)
    for name in (
        "all_token_ids",
        "cache_salt",
        "kv_transfer_params",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_embeds",
        "skip_reading_prefix_cache",
    ):
        assert name in source, f"a request of this vLLM has no {name}"


def test_a_store_that_cannot_be_closed_keeps_no_other_open() -> None:
    closed = []

    class Store:
        def close(self) -> None:
            closed.append(self)
            raise kvstore.StoreError("the disk is gone")

    connector: Any = SimpleNamespace(_worker=None, _stores=[Store(), Store()])
    KVStoreConnector.shutdown(connector)
    assert closed == connector._stores


# ---- groups ------------------------------------------------------------------------------------


def config(*groups: tuple[list[str], Any], **more: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups],
        **more,
    )


def names(*layers: int, ending: str = "attn") -> list[str]:
    return [f"model.layers.{layer}.self_attn.{ending}" for layer in layers]


def dense(block_size: int = 16, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{
            "block_size": block_size,
            "num_kv_heads": 3,
            "head_size": 64,
            "dtype": torch.bfloat16,
            **more,
        }
    )


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 48])
def test_a_dense_model(block_size: int) -> None:
    found = engine_layout(config((names(*range(30)), dense(block_size))), "smollm2")
    assert found.block_tokens == {256: 256, 48: 384}.get(block_size, 128)
    assert found.layout.bytes_per_token == kvstore.layout("smollm2-135m").bytes_per_token == 23040
    assert found.layout.alignment == block_size
    assert not found.is_replicated
    assert not found.windows
    other = engine_layout(config((names(*range(30)), dense(2 * block_size))), "smollm2")
    assert other.layout.fingerprint != found.layout.fingerprint, "pages of another size"


def test_a_hybrid_model_with_full_layers_in_two_groups() -> None:
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, sliding_window=100
    )
    found = engine_layout(
        config((names(0, 2), sliding), (names(3, 1), dense()), (names(5), dense())), "hybrid"
    )
    assert [group.name for group in found.layout.global_groups] == ["kv.0", "kv.1"]
    assert found.layout.group("kv.0").layers == (1, 3)
    assert [layers.layer_names for layers in found.layers][1] == tuple(names(1, 3))
    assert [layers.index for layers in found.layers] == [0, 1, 2]
    assert [layers.name for layers in found.windows] == ["kv_window"]
    assert found.layout.window_tokens == 100


def v41() -> KVCacheConfig:
    """The groups of DeepSeek-V4.1-Flash, out of vLLM's own classes, as its layers announce them."""
    shared: dict[str, Any] = {"num_kv_heads": 1, "model_version": "deepseek_v4", "alignment": 512}

    def main(ratio: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=64 * ratio,
            head_size=512,
            dtype=torch.uint8,
            tokens_per_state=ratio,
            cache_dtype_str="nvfp4_ds_mla",
            kv_quant_mode=KVQuantMode.NVFP4_DS_MLA,
            state_content_bytes=288,
            **shared,
        )

    def index(ratio: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=64 * ratio, head_size=68, dtype=torch.uint8, tokens_per_state=ratio, **shared
        )

    window = SlidingWindowMLASpec(
        block_size=64,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=128,
        state_content_bytes=528,
        model_version="deepseek_v4",
        bounded_replay=True,
    )
    ring = CircularBufferSpec(
        block_size=8, num_kv_heads=1, head_size=2048, head_size_v=0, dtype=torch.float32
    )
    pairs = {
        **dict.fromkeys(names(2, 8, 14), main(2)),
        **dict.fromkeys(names(2, 8, 14, ending="indexer.k_cache"), index(2)),
    }
    single = {names(20)[0]: main(1), names(20, ending="indexer.k_cache")[0]: index(1)}
    return config(
        (list(pairs), UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=pairs)),
        (list(single), UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=single)),
        (names(*range(40), ending="swa"), window),
        (names(2, 8, 14, ending="compressor"), ring),
    )


def test_of_v41_exactly_the_prefix_cacheable_groups_are_kept() -> None:
    engine_config = v41()
    assert engine_config.prefix_cacheable_group_ids == (0, 1)
    found = engine_layout(engine_config, "v4.1")
    assert found.layout.bytes_per_token == 890, "as the model's authors say"
    assert found.block_tokens == 128
    assert found.is_replicated, "one latent head: the same on every rank"
    assert not found.windows, "vLLM replays them"
    assert not found.layout.window_groups
    assert {layers.index for layers in found.layers} == {0, 1}
    assert found.group_count == 4
    assert {layers.page_tokens for layers in found.layers} == {64, 128}
    flat = [name for layers in found.layers for name in layers.layer_names]
    assert sorted(flat) == sorted(
        n for g in engine_config.kv_cache_groups[:2] for n in g.layer_names
    )


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,)), "MambaSpec"),
        (dense(attention_chunk_size=8), "in chunks"),
        (dense(dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "INT8_PER_TOKEN"),
        (
            SlidingWindowMLASpec(
                block_size=64, num_kv_heads=1, head_size=8, dtype=torch.uint8, sliding_window=128
            ),
            "SlidingWindowMLASpec",
        ),
    ],
)
def test_what_cannot_be_kept_is_named(spec: Any, what: str) -> None:
    with pytest.raises(kvstore.ConfigError, match=what):
        engine_layout(config((names(0), spec)), "other")


def test_two_sizes_of_windows_are_refused() -> None:
    sliding = [
        SlidingWindowSpec(
            block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=size
        )
        for size in (64, 128)
    ]
    with pytest.raises(kvstore.ConfigError, match="one size"):
        engine_layout(
            config((names(0), dense()), (names(1), sliding[0]), (names(2), sliding[1])), "other"
        )


class TestTensors:
    def layers(self) -> Any:
        return engine_layout(config((names(0), dense(32))), "one").layers[0]

    def views(self, cache: torch.Tensor) -> torch.Tensor:
        return page_views(self.layers(), {names(0)[0]: cache})[0]

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
    def test_a_block_is_its_bytes_in_whatever_order(self, order: tuple[int, ...]) -> None:
        shape = [(5, 3, 32, 128)[axis] for axis in order]
        memory = torch.arange(5 * 3 * 32 * 128).to(torch.bfloat16).reshape(shape)
        cache = memory.permute(*(order.index(axis) for axis in range(4)))
        view = self.views(cache)
        assert view.shape == (5, 1, 3 * 32 * 128 * 2)
        assert torch.equal(view[3, 0], memory[3].reshape(-1).view(torch.uint8))
        view[2] = 0
        assert not cache[2].any()
        assert cache[1].any()

    def test_kernel_blocks_are_put_together_again(self) -> None:
        memory = torch.arange(10 * 3 * 16 * 128).to(torch.bfloat16).reshape(10, 3, 16, 128)
        view = self.views(memory)
        assert view.shape == (5, 1, 3 * 32 * 128 * 2)
        assert torch.equal(view[3, 0], memory[6:8].reshape(-1).view(torch.uint8))

    def test_padding_between_blocks_is_not_read(self) -> None:
        memory = torch.zeros(5, 3 * 32 * 128 + 64, dtype=torch.bfloat16)
        cache = memory.as_strided((5, 3, 32, 128), (memory.stride(0), 32 * 128, 128, 1))
        self.views(cache)[...] = 0xFF
        assert not memory[:, 3 * 32 * 128 :].any()
        assert bool(cache.isnan().all())

    @pytest.mark.parametrize(
        "cache",
        [
            torch.zeros(5, 3, 32, 64, dtype=torch.bfloat16),
            torch.zeros(1, 3, 32, 128, dtype=torch.bfloat16).expand(5, 3, 32, 128),
            torch.zeros(5, 1, 32, 128, dtype=torch.bfloat16).expand(5, 3, 32, 128),
            torch.zeros(5, 3, 32, 256, dtype=torch.bfloat16)[:, :, :, ::2],
        ],
    )
    def test_other_tensors_are_refused(self, cache: torch.Tensor) -> None:
        with pytest.raises(kvstore.LayoutMismatch, match="expected blocks of"):
            self.views(cache)

    @pytest.mark.parametrize(
        ("layout", "kernel_block"),
        # vLLM cuts blocks into kernel blocks only where each is one run of bytes.
        [*((layout, 32) for layout in KVCacheLayout), (LBNHC, 16), (LBNHC, 8), (LBHNC, 16)],
    )
    def test_every_layout_of_vllm_is_read_and_written_whole(
        self, layout: KVCacheLayout, kernel_block: int
    ) -> None:
        """Blocks of two layers go out of one engine's memory and into that of another."""
        blocks, spec = 6, dense(32)
        found = engine_layout(config((names(0, 1), spec)), "one")
        [layers] = found.layers
        layer_step, block_step, *_ = compute_layout_strides(spec, blocks, 2, layout)
        size = 2 * blocks * layers.page_bytes
        place = KVCacheTensor(size, names(0, 1), layer_step, block_step)
        engines, paged = [], []
        for seed, ids in enumerate(([4, 1, 0, 3], [1, 2, 5, 0])):
            memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
            caches = create_kv_cache_views(
                memory.view(torch.int8), spec, blocks, layout, place, kernel_block
            )
            views = page_views(layers, dict(zip(names(0, 1), caches, strict=True)))
            engines.append(caches)
            paged.append(PagedEntries(found.layout, Pages({"kv": views}, ids), 128))
        held = [cache.clone() for cache in engines[1]]
        entries = paged[0].gather(0, 128)["kv"]
        assert entries.shape == (2, 4, layers.page_bytes)
        for layer in range(2):
            paged[1].scatter(found.layout.groups[0], layer, 0, entries[layer])
        for caches in zip(*engines, held, strict=True):
            source, target, before = (
                cache.view(torch.uint8).unflatten(0, (blocks, -1)) for cache in caches
            )
            assert torch.equal(target[[1, 2, 5, 0]], source[[4, 1, 0, 3]])
            assert torch.equal(target[[3, 4]], before[[3, 4]]), "blocks of others stay"

    def test_a_missing_tensor_is_named(self) -> None:
        with pytest.raises(kvstore.LayoutMismatch, match=names(0)[0]):
            page_views(self.layers(), {})


# ---- options and identity ----------------------------------------------------------------------


def test_options() -> None:
    found = Options.of({"path": "/store", "ssd_bytes": "1GiB", "tenant": "a"})
    assert found == Options(path="/store", ssd_bytes="1GiB", tenant="a")


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "/store", "ssd_byte": 1}, "ssd_byte"),
        ({"path": "/store", "tenant": 3}, "tenant"),
        ({"path": "/store", "secret": 1}, "secret"),
        ({"path": "/store", "fixed_weights": "yes"}, "fixed_weights"),
    ],
)
def test_options_that_are_refused(extra: dict[str, Any], what: str) -> None:
    with pytest.raises(kvstore.ConfigError, match=what):
        Options.of(extra)


@pytest.mark.parametrize(
    "name",
    [
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
)
def test_pipelines_and_context_parallelism_are_refused(name: str) -> None:
    sizes = dict.fromkeys(
        [
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ],
        1,
    )
    with pytest.raises(kvstore.ConfigError, match=f"{name}=2"):
        check_supported(SimpleNamespace(parallel_config=SimpleNamespace(**sizes | {name: 2})))


def test_namespaces_of_requests() -> None:
    base_of = kvstore.Namespace(model="m", weights="w", tenant=json.dumps(["t", None]))
    made = [
        request_namespace(base_of, tenant, salt, adapter)
        for tenant, salt, adapter in [
            ("t", None, None),
            ("t", "", None),
            ("t", "s", None),
            ("ts", None, None),
            ("ts", "", None),
            ('t", "s', None, None),
            ("t", None, "a"),
            ("t", "s", "a"),
        ]
    ]
    assert made[0] == base_of
    assert len(set(made)) == len(made)


def test_an_update_twice_is_another_namespace_each_time() -> None:
    first = updated(kvstore.Namespace(model="m", weights="w", generation=4), "1")
    assert (first.weights, first.generation) == ("w+1", 0)
    assert updated(first, "2").weights == "w+2"


def test_an_adapter_is_its_name_and_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    one = adapter_identity("a", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    two = adapter_identity("a", str(tmp_path))
    others = {adapter_identity("b", str(tmp_path)), adapter_identity("a", str(tmp_path), "rule")}
    assert len({one, two} | others) == 4
    with pytest.raises(kvstore.ConfigError):
        adapter_identity("a", str(tmp_path / "missing"))


def test_a_block_format_names_the_version_and_the_machine() -> None:
    found = block_format("LBHNC")
    assert vllm.__version__ in found
    assert found != block_format("LBNHC")
    assert len(found) > 3
