"""The contract of identity for SGLang: its own hashes, host pools and published settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.require import engine
from tests.identity_contract import IdentityContract

engine("sglang", "tests.engine.sglang.engine")

from safetensors.torch import save_file
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import (
    get_context,
    get_exec,
    get_lora,
    get_mm,
    get_model,
    get_serving,
    reset_context,
)

from kvstore import ConfigError
from tests.engine.sglang.engine import PAGE, backend, device_pool, host_pool, tokens

pytestmark = pytest.mark.filterwarnings("ignore")


def image(content: int) -> list[int]:
    """Return the ids that SGLang writes over the placeholders of an image."""
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.tensor([content]))
    item.set_pad_value()
    return list(item.padding_sequence(PAGE - 1))


def save_adapter(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    save_file({"lora_A": torch.full((4, 4), value)}, folder / "adapter_model.safetensors")


class Side:
    """A prompt, and a server that is asked for it."""

    def __init__(self, folder: Path) -> None:
        path = str(folder)
        self.adapter = LoRARef(LoRARef.deterministic_id("a", path), "a", path)
        self.ids = [7, *image(1), *tokens(3, seed=1)]
        self.salt = "mine"
        self.device: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.settings: list[tuple[Callable[[], Any], dict[str, Any]]] = []
        self.transfers: list[Any] = []

    @contextmanager
    def backend(self, path: Path) -> Iterator[Any]:
        with ExitStack() as stack:
            stack.enter_context(get_lora().override(lora_paths=[self.adapter]))
            for bag, values in self.settings:
                stack.enter_context(bag().override(**values))
            pool = host_pool(device_pool(**self.device))
            yield stack.enter_context(backend(path, pool, self.options, **self.fields))

    def keys(self) -> list[str]:
        key = RadixKey(self.ids, extra_key=self.adapter.lora_id, cache_salt=self.salt)
        return list(get_storage_hash_str(key, None, page_size=self.device.get("page", PAGE)))


class HiCache:
    """SGLang's adapter, as the contract asks it."""

    absent: dict[str, str] = {  # noqa: RUF012 - as the contract has it
        "tokenizer": "SGLang hashes token ids (get_storage_hash_str), which no tokenizer is part of",
    }

    def served(self, path: Path, row: str | None) -> int:
        folder = path.parent / "lora"
        save_adapter(folder, 1.0)
        one, other = Side(folder), Side(folder)
        with one.backend(path) as b:
            flat = b.mem_pool_host.get_dummy_flat_data_page()
            pages = [torch.full_like(flat, n) for n in range(4)]
            assert b.batch_set(one.keys(), pages)
            assert b.batch_exists(one.keys()) == 4
        if row is not None:
            getattr(self, row)(other, folder)
        with other.backend(path) as b:
            pages = b.batch_exists_v2(other.keys(), other.transfers).kv_hit_pages
            came = [page for page in b.batch_get(other.keys()[:pages]) if page is not None]
        return len(came) * PAGE

    def tokens(self, side: Side, _: Path) -> None:
        side.ids[0] += 1

    def layout(self, side: Side, _: Path) -> None:
        side.device["dtype"] = torch.float16

    def windows(self, side: Side, _: Path) -> None:
        swa = PoolTransfer(PoolName.SWA, keys=side.keys()[-1:])
        swa.hit_policy = PoolHitPolicy.TRAILING_PAGES
        side.transfers = [swa]

    def block_tokens(self, side: Side, _: Path) -> None:
        side.device = {"page": PAGE // 2, "dtype": torch.float32}  # pages of as many bytes

    def weights(self, side: Side, _: Path) -> None:
        side.options["weights"] = "revision 2"

    def adapter(self, _: Side, folder: Path) -> None:
        save_adapter(folder, 2.0)  # under the name and path, and so the id, that it had

    def positions(self, side: Side, _: Path) -> None:
        scaled = {"json_model_override_args": '{"rope_scaling": {"rope_type": "dynamic"}}'}
        side.settings = [(get_model, scaled)]

    def images(self, side: Side, _: Path) -> None:
        side.ids[1:PAGE] = image(2)

    def compute(self, side: Side, _: Path) -> None:
        side.settings = [(lambda: get_exec().kernel, {"attention_backend": "another"})]

    def rank(self, side: Side, _: Path) -> None:
        side.fields["tp_size"] = 2

    def tenant(self, side: Side, _: Path) -> None:
        side.options["tenant"] = "another"

    def generation(self, side: Side, _: Path) -> None:
        side.settings = [(get_serving, {"weight_version": "2"})]

    def secret(self, side: Side, _: Path) -> None:
        side.options["secret"] = True


class TestIdentity(IdentityContract):
    adapter = HiCache()


SETTINGS: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (get_model, {"dtype": "float16"}),
    (get_model, {"kv_cache_dtype": "fp8_e5m2"}),
    (get_model, {"quantization": "fp8"}),
    (get_model, {"context_length": 8192}),
    (get_model, {"model_impl": "transformers"}),
    (get_mm, {"mm_attention_backend": "another"}),
    (lambda: get_exec().kernel, {"prefill_attention_backend": "another"}),
    (lambda: get_exec().deterministic, {"enable_deterministic_inference": True}),
    (lambda: get_exec().moe, {"moe_runner_backend": "another"}),
]


@pytest.mark.parametrize(
    ("bag", "value"), SETTINGS, ids=[next(iter(value)) for _, value in SETTINGS]
)
def test_another_setting_of_sglang_is_a_miss(
    bag: Callable[[], Any], value: dict[str, Any], tmp_path: Path
) -> None:
    for values, hit in (({}, 0), (value, 0), ({}, 1)):
        with bag().override(**values), backend(tmp_path) as b:
            assert b.batch_exists(["k"]) == hit
            if not values:
                b.set("k", torch.ones_like(b.mem_pool_host.get_dummy_flat_data_page()))


def test_weights_that_were_replaced_in_the_engine_end_every_hit_until_it_attaches_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with backend(tmp_path) as b:
        page = torch.ones_like(b.mem_pool_host.get_dummy_flat_data_page())
        assert b.set("k", page)
        get_context().override("scheduler.weight_version", weight_version="step 2")
        assert not b.exists("k")
        assert b.get("k") is None
        assert not b.set("l", page), "it may be of the old weights"
        assert b.stats()["counts"] == {"weights replaced": 3}
        assert "attach again" in caplog.text
    with backend(tmp_path) as b:
        assert not b.exists("k")
        assert b.set("k", page)
        assert b.exists("k")


def test_unchecked_serves_other_weights_under_the_same_name(tmp_path: Path) -> None:
    unchecked = {"weights": "unchecked"}
    with get_lora().override(lora_paths=[LoRARef("1", "a", "nowhere/to/be/found")]):
        for hit in (False, True):
            with backend(tmp_path, None, unchecked) as b:
                assert b.exists("k") == hit
                b.set("k", torch.ones_like(b.mem_pool_host.get_dummy_flat_data_page()))
        with pytest.raises(ConfigError, match="no weights at nowhere/to/be/found"):
            backend(tmp_path / "other").__enter__()


def test_settings_that_cannot_be_read_refuse_the_attach(tmp_path: Path) -> None:
    reset_context()
    with pytest.raises(ConfigError, match="cannot be read: .*not published"):
        backend(tmp_path).__enter__()
