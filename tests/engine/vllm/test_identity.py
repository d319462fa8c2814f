"""Whose blocks an engine is served: nothing that another setting, model, adapter or image has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import require

require.engine("vllm", "vllm", "tests.engine.vllm.engine")

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

import kvstore
from kvstore.engine.vllm import KVStoreConnector
from kvstore.engine.vllm.connector import attention_backends
from kvstore.engine.vllm.images import NAMES, Images
from kvstore.engine.vllm.messages import Identity
from kvstore.engine.vllm.options import (
    ADAPTERS,
    DECIDES,
    ENCODER,
    base_namespace,
    check_supported,
    settings,
)
from tests.engine.vllm.engine import ask, connectors, engine, prompt, save_model, transfer
from tests.identity_contract import IdentityContract

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE, PAGES = 16, 40
LENGTH = 300
LAYER = "model.layers.{}.self_attn.attn"


class Backend:
    """An attention backend as far as its name."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return "tests", cls.__name__


class OtherBackend(Backend):
    """Another format, with blocks of equal size."""


class Layer(AttentionLayerBase):  # type: ignore[misc]
    """A loaded layer as far as its backend."""

    def __init__(self, backend: type[Backend]) -> None:
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


def shown(value: float, **options: Any) -> MultiModalKwargsItem:
    """The output of a processor for a picture."""
    tensor = torch.full((3, 8), value, **options)
    element = MultiModalFieldElem(data=tensor, field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": element})


def image(
    data: MultiModalKwargsItem | None, name: str = "a", offset: int = 10, length: int = 60
) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset, length))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One engine and one request to it."""

    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    backend: type[Backend] = Backend
    layers: int = 1
    page: int = PAGE
    window: int = 0
    cache: dict[str, Any] = field(default_factory=dict)
    """Other fields of the KV cache config."""
    seed: int = 1
    salt: str | None = None
    lora: LoRARequest | None = None
    images: Sequence[MultiModalFeatureSpec] = ()

    def config(self, store: Path) -> VllmConfig:
        """Return vLLM's own config of such an engine."""
        arguments = {"dtype": "float16", "enforce_eager": True, "skip_tokenizer_init": True}
        arguments |= {"kv_transfer_config": transfer(store, **self.extra), "max_model_len": 2048}
        made = EngineArgs(model=str(self.model), **arguments | self.options).create_engine_config()
        for layer in range(self.layers):
            made.compilation_config.static_forward_context[LAYER.format(layer)] = Layer(
                self.backend
            )
        return made

    def caches(self) -> KVCacheConfig:
        """Return the groups that such an engine has."""
        shape: dict[str, Any] = {"block_size": self.page, "num_kv_heads": 2, "head_size": 32}
        shape["dtype"] = torch.float16
        groups = [KVCacheGroupSpec([LAYER.format(0)], FullAttentionSpec(**shape))]
        if self.window:
            sliding = SlidingWindowSpec(**shape, sliding_window=self.window)
            groups.append(KVCacheGroupSpec([LAYER.format(1)], sliding))
        elif self.layers > 1:
            names = [LAYER.format(layer) for layer in range(self.layers)]
            groups = [KVCacheGroupSpec(names, FullAttentionSpec(**shape))]
        return KVCacheConfig(PAGES, [], groups, **self.cache)


class Sides:
    """The connectors of an engine, driven by hand."""

    def __init__(self, setting: Setting, store: Path) -> None:
        self.setting = setting
        config, caches = setting.config(store), setting.caches()
        self.worker = KVStoreConnector(config, KVConnectorRole.WORKER, caches)
        pages = torch.arange(PAGES * setting.page * 128).to(torch.float16)
        self.worker.register_kv_caches(
            {
                LAYER.format(layer): pages.reshape(PAGES, setting.page, 128).clone()
                for layer in range(setting.layers)
            }
        )
        self.scheduler = KVStoreConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.side = self.scheduler.scheduler_side

    def hit(self, name: str) -> int:
        """Return how many tokens of the setting's request are found."""
        setting = self.setting
        request = Request(
            name,
            prompt(LENGTH, setting.seed),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=setting.salt,
            lora_request=setting.lora,
            mm_features=list(setting.images),
        )
        self.scheduler.on_new_request(request)
        count, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.request = request
        return count or 0

    def store(self) -> None:
        """Store the setting's request, as far as it is not there."""
        self.hit("stored")
        pages = tuple(range(1, 1 + -(-LENGTH // self.setting.page)))
        table = (pages,) * (2 if self.setting.window else 1)
        self.side.admit(self.request, table, 0)
        plan = self.side.plan([("stored", LENGTH)], (), lambda _: table)
        self.worker.worker_side.save(plan)
        self.worker.worker_side.flush()
        self.side.take_report(self.worker.worker_side.take_report(), (), ())
        assert not self.side.faults.counts
        assert not self.worker.worker_side.faults.counts

    def forget(self) -> None:
        """Replace the weights."""
        self.side.reset()
        self.worker.worker_side.begin(self.side.plan((), (), lambda _: ()))

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@contextmanager
def sides(setting: Setting, store: Path) -> Iterator[Sides]:
    made = Sides(setting, store)
    try:
        yield made
    finally:
        made.close()


def save_adapter(folder: Path, value: float) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((4,), value)}, folder / "adapter_model.safetensors")
    return LoRARequest("a", 1, str(folder))


class VllmIdentity:
    """This connector, as the contract of identity asks it."""

    def __init__(self) -> None:
        self.absent = {
            "tokenizer": "vLLM hands over token ids: what a tokenizer decides is in the tokens",
        }

    def served(self, path: Path, row: str | None) -> int:
        base = Setting(model=Path(save_model(path.parent / "model", "llama")))
        match row:
            case "windows":
                return self._served_windows(base, path)
            case "images":
                base = replace(base, images=[image(shown(1.0))])
            case "adapter":
                lora = {"enable_lora": True, "max_lora_rank": 8}
                base = replace(base, options=lora, lora=save_adapter(path.parent / "a", 1.0))
        with sides(base, path) as stored:
            stored.store()
            if row == "generation":
                stored.forget()
        with sides(base, path) as again:
            unchanged = again.hit("unchanged")
        if row is None:
            return unchanged
        assert unchanged > 0 or row == "generation", "or the change proves nothing"
        found = [unchanged] if row == "generation" else []
        for changed in self._changed(base, row, path.parent):
            with sides(changed, path) as other:
                found.append(other.hit("changed"))
        assert found, row
        return max(found)

    def _changed(self, base: Setting, row: str, folder: Path) -> Iterable[Setting]:
        """Yield settings that differ from ``base`` in one thing that the row names."""
        for name, values in CHANGES.get(row, ()):
            value = getattr(base, name) | values if isinstance(values, dict) else values
            yield replace(base, **{name: value})
        if row == "weights":
            yield replace(base, model=Path(save_model(folder / "model", "llama", seed=8)))
        if row == "adapter":
            limited = base.options | {"lora_target_modules": ["q_proj"]}
            yield replace(base, options=limited)
            yield replace(base, lora=None)
            assert base.lora is not None
            yield replace(base, lora=LoRARequest("b", 1, base.lora.lora_path))
            yield replace(base, lora=save_adapter(folder / "a", 2.0))  # in the same folder

    def _served_windows(self, base: Setting, path: Path) -> int:
        """As ``served``, with windows: they live in the pool of the engine that took them."""
        base = replace(
            base, window=100, layers=2, options={"hf_overrides": {"sliding_window": 100}}
        )
        other = replace(base, window=200, options={"hf_overrides": {"sliding_window": 200}})
        with sides(base, path) as stored:
            stored.store()
            assert stored.hit("again") == 256
            try:
                with sides(other, path) as changed:
                    changed.side._pools = stored.side._pools
                    return changed.hit("changed")
            finally:
                assert stored.hit("once more") == 256


CHANGES: dict[str, list[tuple[str, Any]]] = {
    "tokens": [("seed", 2)],
    "layout": [("layers", 2), ("options", {"dtype": "bfloat16"})],
    "block_tokens": [("page", 32), ("cache", {"cache_hit_alignment_tokens": 256})],
    "positions": [
        ("options", {"max_model_len": 1024}),
        ("options", {"max_model_len": -1}),
        (
            "options",
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}},
        ),
        ("options", {"hf_overrides": {"max_position_embeddings": 8192}}),
    ],
    "images": [
        ("images", [image(shown(2.0))]),  # under the same name
        ("images", [image(shown(1.0), offset=11)]),
        ("images", [image(shown(1.0, dtype=torch.float16))]),
        ("images", [image(None)]),
        ("images", []),
    ],
    "compute": [
        ("backend", OtherBackend),
        ("options", {"attention_config": {"flash_attn_version": 2}}),
        ("options", {"kernel_config": {"linear_backend": "torch"}}),
        ("options", {"model_impl": "transformers"}),
        ("options", {"kv_cache_dtype": "fp8_e5m2"}),
        ("cache", {"kv_cache_layout": "LBNHC"}),
    ],
    "rank": [("options", {"tensor_parallel_size": 2})],
    "tenant": [("salt", "s"), ("salt", ""), ("extra", {"tenant": "t"})],
    "secret": [("extra", {"secret": True})],
}
"""The change of a row: a field of a setting, and its value or an addition to it."""


class TestIdentity(IdentityContract):
    adapter = VllmIdentity()


# ---- images --------------------------------------------------------------------------------------


def test_a_name_stands_for_the_first_content_that_it_came_with() -> None:
    images = Images()
    first, again = shown(1.0), shown(1.0)
    digest = images.digest(image(first))
    assert digest is not None
    assert images.digest(image(first)) == images.digest(image(again)) == digest
    assert images.digest(image(again, name="renderer0-mm-1-image-0")) == digest, "names say nothing"
    other = shown(2.0)
    assert images.digest(image(other)) is None, "vLLM may show what it has under that name"
    assert images.digest(image(other, name="b")) not in (None, digest)
    assert images.digest(image(first)) == digest
    in_shared_memory = shown(1.0)
    in_shared_memory["address"] = in_shared_memory["pixel_values"]
    assert images.digest(image(in_shared_memory)) is None
    assert images.digest(image(None)) is None


def test_names_are_forgotten_in_the_order_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine.vllm.images.NAMES", 2)
    images, data = Images(), [shown(float(number)) for number in range(3)]
    for number in (0, 1, 0, 2):
        assert images.digest(image(data[number], name=str(number)))
    assert list(images._names) == ["0", "2"]
    assert NAMES > 10_000


def test_what_comes_before_an_image_of_unknown_content_is_kept(tmp_path: Path) -> None:
    model = Path(save_model(tmp_path / "model", "llama"))
    # Names that vLLM counts, with prefix caching and its processor's cache off: one name, two pictures.
    name = "renderer0-mm-1-image-0"
    for content, hits in ((1.0, 0), (2.0, 128), (1.0, 256)):
        with sides(
            Setting(model=model, images=[image(shown(content), name, 200)]), tmp_path / "s"
        ) as one:
            assert one.hit("hit") == hits
            one.store()
    unknown = Setting(model=model, images=[image(None, "uuid", 200)], seed=3)
    with sides(unknown, tmp_path / "s") as one:
        one.store()
        assert one.hit("again") == 128
        assert one.side.stats().data["unknown_images"] == 2
        assert one.worker._stores[0].stats()["tiers"]["ssd"]["blocks"] == 4, "one of the last"


# ---- settings ------------------------------------------------------------------------------------


def test_a_setting_that_this_vllm_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    made = Setting(model=Path(save_model(tmp_path / "model", "llama"))).config(tmp_path / "s")
    for part, names in DECIDES.items():
        assert settings(getattr(made, part), names)
    assert settings(MultiModalConfig(), ENCODER)
    assert settings(LoRAConfig(), ADAPTERS)
    assert settings(None, ENCODER) is None
    with pytest.raises(kvstore.ConfigError, match="LoRAConfig .* has no 'colour'"):
        settings(LoRAConfig(), ["colour"])


def test_weights_from_elsewhere_and_kv_that_later_tokens_decide_are_refused(tmp_path: Path) -> None:
    made = Setting(model=Path(save_model(tmp_path / "model", "llama"))).config(tmp_path / "s")
    check_supported(made)
    made.attention_config.use_non_causal = True
    with pytest.raises(kvstore.ConfigError, match="use_non_causal"):
        check_supported(made)
    base_namespace(made, "", None)
    made.load_config.load_format = "tensorizer"
    with pytest.raises(kvstore.ConfigError, match="come from tensorizer"):
        base_namespace(made, "", None)
    made.load_config.load_format = "auto"
    made.model_config.model_weights = "s3://models/one"
    with pytest.raises(kvstore.ConfigError, match="come from s3://models/one"):
        base_namespace(made, "", None)


def test_the_folder_and_the_served_name_are_no_part_of_it(tmp_path: Path) -> None:
    def described(folder: str, **options: Any) -> kvstore.Namespace:
        setting = Setting(model=tmp_path / folder, options=options)
        return base_namespace(setting.config(tmp_path / "s"), "", "LBHNC")

    for folder in ("a", "b"):
        save_model(tmp_path / folder, "llama")
    first = described("a")
    assert described("b", served_model_name="another", seed=3) == first
    others = [
        described("a", quantization="fp8"),
        described("a", load_format="dummy"),
        described("a", load_format="dummy", seed=1),
        described("a", load_format="safetensors"),
    ]
    assert len({first, *others}) == len(others) + 1
    (tmp_path / "a" / "model.safetensors").unlink()
    assert described("a") != first


def test_weights_that_are_nowhere_are_refused(tmp_path: Path) -> None:
    made = Setting(model=Path(save_model(tmp_path / "model", "llama"))).config(tmp_path / "s")
    made.model_config.model = str(tmp_path / "missing")
    with pytest.raises(kvstore.ConfigError, match="local folder"):
        base_namespace(made, "", None)


def test_layers_that_draft_are_part_of_it(tmp_path: Path) -> None:
    model = Path(save_model(tmp_path / "model", "llama"))
    made = Setting(model=model).config(tmp_path / "s")
    drafts = []
    for number, kind in enumerate(("llama", "gemma3", "gemma3")):
        folder = Path(save_model(tmp_path / f"draft{number}", kind, seed=number))
        setting = Setting(model=folder, options={"dtype": "float32"})
        draft = setting.config(tmp_path / "s").model_config
        drafts.append(
            SimpleNamespace(method="eagle", draft_model_config=draft, draft_load_config=None)
        )
    found = []
    for speculative in (None, *drafts):
        made.speculative_config = speculative
        found.append(base_namespace(made, "", None))
    assert found[0] == found[1], "n-grams draft with the model's own config: they have no layers"
    assert len(set(found)) == 3


def test_ranks_that_disagree_store_and_find_nothing(tmp_path: Path) -> None:
    model = Path(save_model(tmp_path / "model", "llama"))
    with sides(Setting(model=model), tmp_path / "s") as one:
        one.store()
        assert one.hit("a") == 256
        mine = one.worker.get_handshake_metadata()
        other = Identity(replace(mine.base, model="another machine"))
        for said in ({0: mine, 1: other}, {}):
            one.scheduler.set_xfer_handshake_metadata(said)
            assert one.hit(f"b{len(said)}") == 0
        [(what, _)] = one.side.faults._logged
        assert "reported no namespace" in what


# ---- engines -------------------------------------------------------------------------------------


def test_the_scheduler_knows_which_attention_its_worker_uses(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    with engine(model, tmp_path / "s") as llm:
        scheduler, worker = connectors(llm)
        config = llm.llm_engine.vllm_config
        assert [name.split()[1].split(".")[-1] for name in attention_backends(config)] == [
            "CPUAttentionBackend"
        ] * 3
        assert scheduler.scheduler_side._base == worker._base
        assert scheduler._base != worker._base


def test_a_table_chosen_by_the_longest_prompt_is_not_mixed_with_another(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0 + n for n in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    overrides = {"rope_parameters": rope | factors, "max_position_embeddings": 4096}
    prompts = [prompt(450)]

    def run(length: int, store: Path | None) -> tuple[tuple[int, ...], int]:
        with engine(model, store, max_model_len=length, hf_overrides=overrides) as llm:
            return ask(llm, prompts)[0]

    short, long = run(512, tmp_path / "s"), run(2048, None)
    assert short[0] != long[0], "the tables differ"
    assert run(2048, tmp_path / "s") == long
    assert run(512, tmp_path / "s") == (short[0], 384)
