"""TTFT of a prefill-decode fleet by how its workers are placed, and by who routes.

    python -m benchmarks.sim.placement [--seeds 3] [--rate 12] [--count 600]

8 hosts of 8 H100 in 4 racks and 2 zones; 6 prefill and 6 decode workers of llama-3.1-8b, prompts of
2,000 to 8,000 tokens. `random` puts each worker on any host with room, `cost` places all as one
gang. The toll routes by the learned seconds of each pair of hosts; least-loaded does not look.
"""

from __future__ import annotations

import argparse
from statistics import mean

import msgspec

from pigou.config import ControlConfig
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, HostGroup, TopologyConfig, WorkerGroup
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import RequestLengths, renewal

HOSTS = tuple(
    HostGroup(count=2, gpus=8, rack=f"rack-{rack}", zone=f"zone-{rack // 2}") for rack in range(4)
)


def ttft_s(placement: str, policy: str, seed: int, rate: float, count: int) -> dict[str, float]:
    """Return figures of TTFT in seconds of one run."""
    topology = msgspec.convert({"hosts": HOSTS, "placement": placement}, TopologyConfig)
    groups = tuple(WorkerGroup(role=role, count=6) for role in (Role.PREFILL, Role.DECODE))
    lengths = RequestLengths(input=(2000, 8000), output=(50, 200))
    control = {"policy": policy, "max_inflight": UNLIMITED, "max_inflight_tokens": UNLIMITED}
    simulation = Simulation(
        renewal(lengths, rate, 1.0, count, 0.0, seed),
        FleetConfig(workers=groups, topology=topology),
        Setup(model="llama-3.1-8b", gpu="H100"),
        msgspec.convert(control, ControlConfig),
        ClientConfig(),
        seed=seed,
    )
    figures: dict[str, float] = simulation.run().document()["ttft_s"]
    return figures


def main() -> None:
    """Print a row for each placement and policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--count", type=int, default=600)
    args = parser.parse_args()
    print(f"{'placement':<10} {'policy':<14} {'mean':>8} {'p50':>8} {'p99':>8}  TTFT, seconds")
    for placement in ("cost", "random"):
        for policy in ("toll", "least-loaded"):
            runs = [
                ttft_s(placement, policy, seed, args.rate, args.count) for seed in range(args.seeds)
            ]
            row = [mean(run[name] for run in runs) for name in ("mean", "p50", "p99")]
            print(f"{placement:<10} {policy:<14} " + " ".join(f"{value:8.3f}" for value in row))


if __name__ == "__main__":
    main()
