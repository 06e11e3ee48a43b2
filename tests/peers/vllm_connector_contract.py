"""Run in vLLM's Python: check PigouConnector against the classes of the installed engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace as Fake

import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from pigou.config import ConfigError
from pigou.integrations.vllm import connector

config = KVTransferConfig(
    kv_connector="PigouConnector", kv_role="kv_both",
    kv_connector_module_path="pigou.integrations.vllm.connector",
)  # fmt: skip
found = KVConnectorFactory.get_connector_class(config)
assert found is connector.PigouConnector
assert not found.__abstractmethods__
assert KVConnectorFactory.supports_hma_config(config)

ours = 0
for name, inherited in inspect.getmembers(KVConnectorBase_V1, callable):
    method = getattr(found, name)
    if method is inherited or name.startswith("__") or not inspect.isfunction(method):
        continue
    ours += 1
    wanted, given = (list(inspect.signature(each).parameters) for each in (inherited, method))
    assert wanted == given, f"{name}: {wanted} became {given}"
assert ours >= 14, ours


def spec(kind: type = FullAttentionSpec, **more: int) -> object:
    return kind(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, **more)


def check(layout: str = "LBHNC", sizes: tuple[int, int, int] = (1, 1, 1), *specs: object) -> str:
    names = ("pipeline_parallel_size", "decode_context_parallel_size",
             "prefill_context_parallel_size")  # fmt: skip
    parallel = Fake(**dict(zip(names, sizes, strict=True)))
    groups = [Fake(kv_cache_spec=each) for each in specs or (spec(),)]
    try:
        connector.check_supported(
            Fake(parallel_config=parallel), Fake(kv_cache_groups=groups, kv_cache_layout=layout)
        )
    except ConfigError as error:
        return str(error)
    return ""


assert not check()
window = spec(SlidingWindowSpec, sliding_window=64)
for specs in ((window,), (spec(), window)):
    assert "--disable-hybrid-kv-cache-manager" in check("LBHNC", (1, 1, 1), *specs)
assert "pipeline_parallel_size 1, not 2" in check("LBHNC", (2, 1, 1))
assert "VLLM_KV_CACHE_LAYOUT" in check("LHBNC")
print("contract holds for", ours, "methods")
