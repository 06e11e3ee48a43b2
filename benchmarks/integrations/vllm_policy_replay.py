"""Replay prompts through vLLM's CPU offloading manager; run by vLLM's interpreter."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

#: vLLM's name of each policy, and the module of one that is not vLLM's.
POLICIES = {"lru": None, "arc": None, "PigouPolicy": "pigou.integrations.vllm.policy"}


class Workload(TypedDict):
    """Prompts as (time in ns, chunk keys), and what a chunk's hit saves."""

    name: str
    tokens: int
    base: float
    slope: float
    restore: float
    prompts: list[tuple[int, list[str]]]


class Result(TypedDict):
    """One policy at one size."""

    policy: str
    size: int
    hits: int
    saved_s: float
    call_us: float


def replay(load: Workload, policy: str, size: int) -> Result:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager: Any = CPUOffloadingManager(size, policy, POLICIES[policy])
    now = [0]
    if hasattr(manager._policy, "clock"):
        manager._policy.clock = lambda: now[0]
    prompts = [
        (at, [make_offload_key(bytes.fromhex(key), 0) for key in keys])
        for at, keys in load["prompts"]
    ]
    hits, saved, calls = 0, 0.0, 0
    begin = time.process_time()
    for number, (at, keys) in enumerate(prompts):
        now[0] = at
        context = ReqContext(req_id=str(number))
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * load["tokens"])
        manager.on_new_request(context)
        held = 0
        while held < len(keys) and manager.lookup(keys[held], context) is LookupResult.HIT:
            held += 1
        calls += held + 7
        if held:
            manager.prepare_load(keys[:held], context)
            manager.complete_load(keys[:held], context)
        if held < len(keys):
            stored = manager.prepare_store(keys[held:], context)
            if stored is not None:
                manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
        hits += held
        saved += held * load["base"] + load["slope"] * held * (held - 1) / 2
        saved -= held * load["restore"]
    took = time.process_time() - begin
    call_us = took / calls * 1e6
    return {"policy": policy, "size": size, "hits": hits, "saved_s": saved, "call_us": call_us}


def main() -> None:
    load: Workload = json.loads(Path(sys.argv[1]).read_text())
    results = [replay(load, policy, int(size)) for size in sys.argv[2:] for policy in POLICIES]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
