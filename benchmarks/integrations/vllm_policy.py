"""Price against lru and arc in vLLM's CPU tier, under vLLM's own manager, on traces.

    PIGOU_PEER_VLLM=DIR python -m benchmarks.integrations.vllm_policy
        [--mooncake FILE] [--agents FOLDER] [--requests 4000] [--sessions N]
        [--sizes 1000,2500,5000,10000]

Needs vLLM for CPU, no device: transfers end at once, and the policy reads the trace's clock. Each
prompt loads its leading chunks and stores the rest, whole. Columns: share of prompt chunks loaded;
seconds of prefill saved (a roofline of Llama-3.1-8B on an H200, less 50 GB/s to read them back);
CPU microseconds of each call of the manager. Policies take turns at each size.

The constants were chosen on Mooncake's requests from 4,001 on and 60 of the agents' sessions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.integrations.vllm_policy_replay import POLICIES, Result, Workload
from benchmarks.kv.tier_replay import worth
from benchmarks.kv.tier_traces import Replay, agents, mooncake
from benchmarks.lib.peers import vllm_home


def workload(replay: Replay, requests: int | None) -> Workload:
    """The prompts of a replay, in the order of time."""
    prompts = [event for event in replay.events if event.asks][:requests]
    cost = worth(replay.tokens)
    return {
        "name": replay.name, "tokens": replay.tokens,
        "base": cost.base, "slope": cost.slope, "restore": cost.restore,
        "prompts": [(event.at, [key.hex() for key in event.keys]) for event in prompts],
    }  # fmt: skip


def replayed(load: Workload, sizes: list[int]) -> list[Result]:
    """Replay under vLLM's interpreter."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(load, file)
        file.flush()
        path = f"src{os.pathsep}."
        done = subprocess.run(
            [str(vllm_home() / "bin/python"), "-m", "benchmarks.integrations.vllm_policy_replay",
             file.name, *map(str, sizes)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    results: list[Result] = json.loads(done.stdout.splitlines()[-1])
    return results


def table(load: Workload, results: list[Result]) -> None:
    prompts = load["prompts"]
    chunks = sum(len(keys) for _, keys in prompts)
    different = len({key for _, keys in prompts for key in keys})
    print(
        f"\n{load['name']}: {len(prompts)} prompts, {chunks} chunks of {load['tokens']} tokens, "
        f"{different} different\n"
    )
    print("| chunks | lru | arc | price | price/lru | price/arc | CPU us: lru | arc | price |")
    print("|---" * 9 + "|")
    for size in dict.fromkeys(result["size"] for result in results):
        of = {result["policy"]: result for result in results if result["size"] == size}
        lru, arc, price = (of[name] for name in POLICIES)
        cells = [
            f"{each['hits'] / chunks:.4f}, {each['saved_s']:,.0f} s" for each in (lru, arc, price)
        ]
        cells += [f"{price['saved_s'] / other['saved_s']:.2f}" for other in (lru, arc)]
        cells += [f"{each['call_us']:.1f}" for each in (lru, arc, price)]
        print(f"| {size:,} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--agents", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--sizes", default="1000,2500,5000,10000")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    loads = []
    if options.mooncake:
        loads.append(workload(mooncake(options.mooncake), options.requests))
    if options.agents:
        loads.append(workload(agents(options.agents, sessions=options.sessions), None))
    for load in loads:
        table(load, replayed(load, sizes))


if __name__ == "__main__":
    main()
