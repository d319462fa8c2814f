"""vLLM connector without a function: the control of :mod:`bench.engines.vllm_overhead`."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class IdleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Finds nothing, stores nothing."""

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @override
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @override
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    @override
    def wait_for_save(self) -> None: ...

    @override
    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        return 0, False

    @override
    def update_state_after_alloc(self, *args: Any) -> None: ...

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    @override
    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        return False, None
