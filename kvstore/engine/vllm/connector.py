"""``KVStoreConnector``: vLLM's connector interface over ``SchedulerSide`` and ``WorkerSide``.

vLLM creates one in the scheduler and one in each worker. All open the same directories: a worker owns
the store of its rank, the scheduler reads the stores of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstore
from kvstore.engine.paged import shard_name, shard_of
from kvstore.engine.vllm.groups import engine_layout
from kvstore.engine.vllm.log import log, log_as_vllm
from kvstore.engine.vllm.messages import Identity, StepPlan, StoreStats, WorkerReport
from kvstore.engine.vllm.options import Options, adapter_rule, base_namespace, check_supported
from kvstore.engine.vllm.scheduler import SchedulerSide
from kvstore.engine.vllm.worker import WorkerSide
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def attention_backends(config: VllmConfig) -> list[str]:
    """Return the attention backend of each loaded layer."""
    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase)
    return sorted(
        f"{name} {'.'.join(layer.get_attn_backend().full_cls_name())}"
        for name, layer in layers.items()
    )


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM connector that stores the engine's prefix KV on SSD, across restarts.

    ``Options`` lists its options. A store that cannot be opened is logged, and every lookup misses.

    Raises:
        ConfigError: for an unknown option, pipeline or context parallelism, or an unsupported KV cache.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config)
        check_supported(vllm_config)
        self._is_identified = False  # in the scheduler: all workers reported the same namespace
        is_worker = role == KVConnectorRole.WORKER
        base = base_namespace(
            vllm_config,
            options.tenant,
            kv_cache_config.kv_cache_layout,
            attention_backends(vllm_config) if is_worker else (),
        )
        self._base = base
        engine = engine_layout(kv_cache_config, vllm_config.model_config.hf_config.model_type)
        parallel = vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        replicas = ranks if engine.is_replicated else kv_cache_config.kv_tp_replicas
        self._stores: list[kvstore.PrefixCache] = []

        def store(rank: int, **rights: Any) -> kvstore.PrefixCache | None:
            folder = Path(options.path) / shard_name(rank, ranks)
            try:
                opened = kvstore.PrefixCache.open(
                    folder,
                    layout=engine.layout,
                    namespace=base,
                    block_tokens=engine.block_tokens,
                    ssd_bytes=options.ssd_bytes,
                    window_bytes=options.window_bytes,
                    device_bytes=0,
                    secret=options.secret,
                    **rights,
                )
            except Exception as error:  # the engine can serve without a store
                log.error(
                    "%s cannot be opened, so nothing is loaded or stored there: %s",
                    *(folder, error),
                    exc_info=None if isinstance(error, KVStoreError) else error,
                )
                return None
            self._stores.append(opened)
            return opened

        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    "kv_load_failure_policy is %r: a block that cannot be read fails its request; "
                    "set it to 'recompute'",
                    transfer.kv_load_failure_policy,
                )
            if vllm_config.model_config.enable_sleep_mode and not options.fixed_weights:
                log.warning(
                    "stored blocks become unreachable whenever this engine sleeps, because vLLM resets "
                    "connectors for sleep as for new weights; if the weights never change while it "
                    "runs, set fixed_weights to true in kv_connector_extra_config"
                )
            shards = sorted({shard_of(rank, replicas) for rank in range(ranks)})
            found = [store(rank, role="reader") for rank in shards]
            readers = [reader for reader in found if reader is not None]
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerSide(
                engine,
                readers if len(readers) == len(shards) else (),
                base,
                options.tenant,
                lora=adapter_rule(vllm_config),
                sends_events=events is not None and events.enable_kv_cache_events,
                has_fixed_weights=options.fixed_weights,
            )
        else:
            rank = parallel.rank % ranks
            shard = shard_of(rank, replicas)
            writes = rank == shard
            self._worker = WorkerSide(
                engine,
                store(shard, role="auto") if writes else None,
                base,
                rank // replicas,
                writes=writes,
                open_late=lambda: None if writes else store(shard, role="reader"),
            )

    @property
    def scheduler_side(self) -> SchedulerSide:
        """Planner of the scheduler's connector."""
        assert self._scheduler is not None, "a worker's connector plans nothing"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """Loads and saves of a worker's connector."""
        assert self._worker is not None, "the scheduler's connector has no KV cache"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # ---- worker --------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register vLLM's KV tensors."""
        self.worker_side.register(kv_caches)

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Return the namespace, which depends on the loaded model."""
        return Identity(self._base)

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Cancel the saves of blocks that this step reassigns."""
        assert isinstance(kv_connector_metadata, StepPlan)
        self.worker_side.begin(kv_connector_metadata)

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step."""
        self.worker_side.load(self._plan)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: no step reads a block before its load is reported."""

    @override
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """No-op: blocks are saved after the last layer."""

    @override
    def wait_for_save(self) -> None:
        """Start the saves of this step; vLLM keeps their blocks until they are reported."""
        self.worker_side.save(self._plan)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests with ended saves, and those with an ended load."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests with ended saves, with an ended load, and with a failed load."""
        sent, received, failed = self.worker_side.finished(self._plan)
        return KVConnectorTransferResults(sent, received, failed)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads left unfilled."""
        return self.worker_side.take_invalid_blocks()

    @override
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the report to the scheduler's connector."""
        return self.worker_side.take_report()

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counters since the last call."""
        side = self._worker if self._worker is not None else self.scheduler_side
        stats = side.stats()
        return None if stats.is_empty() else stats

    @override
    def shutdown(self) -> None:
        """End all transfers and close the stores."""
        if self._worker is not None:
            self._worker.close()
        for opened in self._stores:
            try:
                opened.close()
            except KVStoreError as error:
                log.error("the last saves may be lost: %s", error)

    # ---- scheduler -----------------------------------------------------------------------------

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save is only a later miss."""
        return False

    @override
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Use the namespace that all workers reported. Without one, requests are not tracked."""
        said = {item.base for item in metadata.values() if isinstance(item, Identity)}
        self._is_identified = len(said) == 1
        if self._is_identified:
            self.scheduler_side.adopt(*said)

    @override
    def on_new_request(self, request: Request) -> None:
        """Start tracking a request, if the namespace is known."""
        if self._is_identified:
            self.scheduler_side.add(request)
            return
        self.scheduler_side.faults.say(
            "the workers reported no namespace or different ones, so nothing is stored or loaded; "
            "serve all ranks on machines of one kind with one vLLM"
        )

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens after the computed ones to load, and whether asynchronously."""
        count = self.scheduler_side.matched(request, num_computed_tokens)
        return count, count > 0

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks of a request, and plan its load."""
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        self.scheduler_side.admit(request, ids, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Return the plan of this step for the workers."""
        state = scheduler_output.kv_connector_block_state
        return self.scheduler_side.plan(
            scheduler_output.num_scheduled_tokens.items(),
            scheduler_output.preempted_req_ids or (),
            state.resolve_block_ids,
        )

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the reports of the workers."""
        report: KVConnectorWorkerMetadata | None = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        self.scheduler_side.take_report(
            report, connector_output.finished_recving or (), connector_output.finished_sending or ()
        )

    @override
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``, for the only KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether vLLM must keep the blocks of a finished request."""
        ids = tuple(tuple(group) for group in block_ids)
        return self.scheduler_side.finish(request, ids), None

    @override
    def has_pending_block_frees(self) -> bool:
        """Return whether vLLM should wait briefly for blocks before it preempts a request."""
        return self.scheduler_side.frees_blocks_soon()

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events since the last call."""
        return self.scheduler_side.take_events()

    @override
    def reset_cache(self) -> bool:
        """Make stored blocks unreachable, as for a weight update; not with ``fixed_weights``."""
        self.scheduler_side.reset()
        return True

    @override
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> None:
        """Return None: every layout is supported."""

    @override
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counters from plain data."""
        return StoreStats(data={} if data is None else data)
