"""vLLM's OffloadingConnector in a real engine for CPU, with Pigou's policy and tier.

vLLM copies between device and CPU tier on CUDA and XPU only; `CopyingSpec` replaces that copy, and
nothing else. `python -m tests.peers.vllm_offload_engine MODEL FOLDER` prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found,unused-ignore]
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import (  # type: ignore[import-not-found,unused-ignore]
    SharedOffloadRegion,
)
from vllm.v1.kv_offload.tiering.spec import (  # type: ignore[import-not-found,unused-ignore]
    TieringOffloadingSpec,
)

BLOCK, PROMPTS, TOKENS = 32, 6, 320
PACKAGE = "pigou.integrations.vllm"


class CopyingWorker(OffloadingWorker):  # type: ignore[misc,unused-ignore]
    """Copies blocks of one KV cache group to rows of the CPU tier, and back, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._span, self._done = blocks_per_chunk, []
        self._pairs = [
            (each.tensor, region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk))
            for each in kv_caches.tensors
        ]

    def _copy(self, job_id: int, device: Any, host: Any, load: bool) -> bool:
        first = device.block_indices[0]
        for i, block in enumerate(device.block_ids.tolist()):
            chunk = host.block_ids[(first + i) // self._span - first // self._span]
            for blocks, rows in self._pairs:
                size = blocks.shape[1]
                at = (first + i) % self._span * size
                row = rows[int(chunk)][at : at + size]
                if load:
                    blocks[block].copy_(row)
                else:
                    row.copy_(blocks[block])
        self._done.append(TransferResult(job_id, True, 1, 1e-6))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, load=True)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class CopyingSpec(TieringOffloadingSpec):  # type: ignore[misc,unused-ignore]
    def get_worker(self, kv_caches: Any) -> Any:
        self._region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        return CopyingWorker(kv_caches, self.blocks_per_chunk, self._region)


class Engine:
    def __init__(self, model: str, extra: dict[str, Any] | None) -> None:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        self.llm = LLM(
            model=model, enforce_eager=True, block_size=BLOCK, max_model_len=512, seed=0,
            num_gpu_blocks_override=24, max_num_seqs=2, disable_log_stats=False, dtype="float32",
            kv_transfer_config=transfer if extra else None,
        )  # fmt: skip

    def tokens(self, salt: str = "", **params: Any) -> list[list[int]]:
        out = []
        for i in range(PROMPTS):
            prompt = {"prompt_token_ids": [6 + (i * 131 + j * 17) % 1900 for j in range(TOKENS)]}
            if salt:
                prompt["cache_salt"] = salt
            sampling = SamplingParams(
                temperature=0,
                max_tokens=8,
                ignore_eos=True,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            (answer,) = self.llm.generate([prompt], sampling, use_tqdm=False)
            out.append(list(answer.outputs[0].token_ids))
        return out

    def counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and ("external" in metric.name or "kv_offload" in metric.name):
                name = metric.name + "".join(
                    f":{v}" for k, v in metric.labels.items() if k == "tier"
                )
                found[name] = value
        return found

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def config(folder: Path, **extra: Any) -> dict[str, Any]:
    tier = {
        "type": "PigouTier",
        "module_path": f"{PACKAGE}.tier",
        "tiers": [f"disk=64MiB@{folder}"],
    }
    return {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": CPU_BYTES, "block_size": BLOCK,
        "eviction_policy": "PigouPolicy", "cache_policy_module_path": f"{PACKAGE}.policy",
        "secondary_tiers": [tier], **extra,
    }  # fmt: skip


def corrupt(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 65536:
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)


CPU_BYTES = 4 << 20


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    said: dict[str, Any] = {}
    plain = Engine(model, None)
    said["alone"] = plain.tokens()
    plain.stop()
    try:
        Engine(model, config(folder / "refused"))
    except BaseException as error:
        said["stock"] = str(error)
    engine = Engine(
        model,
        config(folder / "store", spec_name="CopyingSpec", spec_module_path=__spec__.name),
    )
    for name in ("first", "second", "third"):
        said[name] = engine.tokens()
        said[f"{name} counters"] = engine.counters()
    said["salted"] = engine.tokens("other")
    said["salted counters"] = engine.counters()
    corrupt(folder / "store")
    said["corrupted"] = engine.tokens()
    said["corrupted counters"] = engine.counters()
    engine.stop()
    print("RESULT" + json.dumps(said))


if __name__ == "__main__":
    main()
