"""`PigouConnector`: prefill and decode on two vLLM servers, over Pigou's KV transfer.

```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "PigouConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "pigou.integrations.vllm.connector",
  "kv_load_failure_policy": "recompute"}'
```
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pigou.config import ConfigError
from pigou.integrations.vllm.transfer import (
    CacheBlocks,
    ConnectorConfig,
    SchedulerHalf,
    StepWork,
    WorkerHalf,
)
from pigou.kv.block import KVLayout
from pigou.runtime.tensor_io import rows_in_storage
from pigou.worker.kv_transfer.transfer_params import TransferParams

#: Engine version that this was written against.
SEAM = "vllm 0.32"
KVConnectorMetadata.register(StepWork)
KVConnectorHandshakeMetadata.register(TransferParams)


class PigouConnector(SchedulerHalf, WorkerHalf, KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler, one in each worker; each uses its half."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        check_supported(vllm_config, kv_cache_config)
        self._config = ConnectorConfig.read(transfer.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            self.open_scheduler(
                kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                self._config.key(),
                sends=transfer.is_kv_producer,
                pulls=transfer.is_kv_consumer,
            )

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Serve and fill these caches from now on."""
        rank, parallel = get_tensor_model_parallel_rank(), self._vllm_config.parallel_config
        cache, (planes, width) = self._kv_cache_config, planes_of(self._kv_cache_config)
        rows = rows_in_storage(next(iter(kv_caches.values())), width)
        layout = layout_of(self._vllm_config, cache, planes * width, rank)
        index = parallel.data_parallel_index * parallel.tensor_parallel_size + rank
        limits, key = self._config.transfer(index), self._config.key()
        store = CacheBlocks(rows, planes, cache.num_blocks, layout)
        self.open_worker(store, limits, key, rank)

    def bind_connector_metadata(self, connector_metadata: StepWork) -> None:
        """Begin the step's transfers, which do not depend on its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self.run(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: pulls run since `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request is computed before its pull has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: finished prompts are read out of the cache."""

    def wait_for_save(self) -> None:
        """Do nothing, as `save_kv_layer`."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what this connector cannot transfer; raises ConfigError with the remedy."""
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if len(kinds) != 1 or not issubclass(kinds[0], FullAttentionSpec):
        raise ConfigError(
            "PigouConnector transfers one KV cache group of full attention or MLA, not "
            f"{[kind.__name__ for kind in kinds]}; start with "
            "--disable-hybrid-kv-cache-manager, and without a draft model"
        )
    for way in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(vllm_config.parallel_config, f"{way}_parallel_size")
        if size != 1:
            raise ConfigError(f"PigouConnector needs {way}_parallel_size 1, not {size}")
    if kv_cache_config.kv_cache_layout == "LHBNC":
        raise ConfigError("a block is scattered in LHBNC; set VLLM_KV_CACHE_LAYOUT=LBHNC")


def planes_of(kv_cache_config: Any) -> tuple[int, int]:
    """Return the planes of `CacheBlocks`, and the bytes of a row; raises ConfigError."""
    blocks, parts = kv_cache_config.num_blocks, kv_cache_config.kv_cache_tensors
    width = parts[0].block_stride
    if all(part.block_stride * blocks == part.size for part in parts):
        return 1, width
    numbered = [(part, n) for part in parts for n in range(len(part.layers))]
    starts = sorted({part.offset + n * part.layer_stride for part, n in numbered})
    if starts != [n * blocks * width for n in range(len(starts))]:
        raise ConfigError("layers differ in page size; set VLLM_KV_CACHE_LAYOUT=BLHNC")
    return len(starts), width


def layout_of(vllm_config: Any, kv_cache_config: Any, block_bytes: int, rank: int) -> KVLayout:
    """Return the layout; its digest covers what must be equal on both servers."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    [group], parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    spec = group.kv_cache_spec
    compared = (vllm_version, model.revision, model.quantization, cache.cache_dtype, block_bytes,
             cache.kv_cache_layout, repr(spec), rank, parallel.tensor_parallel_size)  # fmt: skip
    digest = blake2b(repr(compared).encode(), digest_size=16).hexdigest()
    shape = (spec.block_size, len(group.layer_names), spec.num_kv_heads, spec.head_size)
    return KVLayout(model.model, digest, str(spec.dtype)[6:], *shape, block_bytes)
