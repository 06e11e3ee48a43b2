"""The simulations: each is a command of `pigou`, and what it covers.

Names in braces stand for files that the run needs: a fleet of `fleets`, an input of `traces`.
"""

from __future__ import annotations

from typing import NamedTuple


class Simulation(NamedTuple):
    """A simulation."""

    covers: str
    command: str  # arguments of `pigou`, but for the files that it writes
    # whether the page's data is recorded too: curves, course, samples of each worker.
    report: bool = False


_LLAMA = "--model llama-3.1-8b --gpu H200"
_SMALL = "--model llama-3.1-8b --gpu H100 --blocks 2500"
_CLOSED = "--workload closed:C=128,in=128,out=128,templates=5,ramp=6,hold=40"
_PREFIXES = "--workload poisson:rate=36,in=256:3000,out=16:200,templates=90,hold=20"
_AGENTS = "--workload {agents},C=10 --fleet 2xboth --model llama-3.1-8b --gpu H100 --blocks 700"
_STEPS = "closed:C=6x30/160x60/6x70,in=600:1400,out=100:200"
_PLANNED = (
    "--model llama-3.1-8b --gpu L40S --planner price --slo ttft=1s,itl=50ms --max-workers 8 "
    "--start-up 8 --planner-interval 5"
)
_FLOOD = "--fleet 2xboth --model llama-3.1-8b --gpu L40S --workload {flood}"


def _policy(covers: str, policy: str, rest: str, *, report: bool = False) -> Simulation:
    return Simulation(covers, f"simulate {rest} --policy {policy}", report)


SIMULATIONS: dict[str, Simulation] = {
    # --- fleets, and the toll policy on them ---------------------------------------------------
    "one-worker": _policy(
        "1xboth, closed loop, a law's timing", "least-loaded",
        "--workload closed:C=16,in=128,out=64,ramp=2,hold=20 --fleet 1xboth --timing law:70b",
    ),
    "toll-340b-1p2d": _policy(
        "the paper's fleet, toll, a learned prefill bottleneck", "toll",
        f"{_CLOSED} --fleet 1p+2d --timing law:340b", report=True,
    ),
    "toll-70b-1p5d-unfair": _policy(
        "toll without urgency, phases of users", "toll,urgency=0",
        "--workload closed:C=32x6/96x8/48x6,in=128,out=128,ramp=2 --fleet 1p+5d --timing law:70b",
    ),
    "toll-4xboth": _policy(
        "toll on aggregated workers, shared prefixes", "toll",
        f"{_PREFIXES} --fleet 4xboth {_LLAMA}", report=True,
    ),
    "toll-1p2d-open": _policy(
        "toll, 1p+2d, roofline", "toll",
        "--workload poisson:rate=9,in=200:4000,out=16:200,hold=20 --fleet 1p+2d "
        f"{_LLAMA} --seed 3",
    ),
    "toll-3p5d-bursts": _policy(
        "toll, 3p+5d, gamma arrivals, half the tolls", "toll,toll=0.5",
        "--workload gamma:rate=30,cv=3,in=100:3000,out=8:120,templates=80,n=400 --fleet 3p+5d "
        f"{_LLAMA}",
    ),
    "toll-12xboth": _policy(
        "12 workers", "toll",
        "--workload poisson:rate=120,in=64:2000,out=8:100,templates=200,n=900 "
        f"--fleet 12xboth {_LLAMA}",
    ),
    "toll-mixed-gpus": _policy(
        "H100, A100 with tp 2, L40S", "toll", f"{_PREFIXES} --fleet {{mixed_gpus}} {_LLAMA}",
    ),
    "toll-mixed-gpus-split": _policy(
        "H200 for prefill, H100 and A100 for decode, a slow link", "toll,toll=0.5",
        f"{_PREFIXES} --fleet {{mixed_gpus_split}} {_LLAMA}",
    ),
    "toll-mixed-roles": _policy(
        "prefill, decode and both in one fleet", "toll",
        f"--workload {{mooncake}} --fleet {{mixed_roles}} {_LLAMA}", report=True,
    ),
    "toll-70b-tp4": _policy(
        "a 70B model on 4 GPUs a worker", "toll",
        "--workload poisson:rate=8,in=300:3000,out=16:160,hold=15 --fleet 3xboth "
        "--model llama-3.1-70b --gpu H100 --tp 4",
    ),
    "toll-experts": _policy(
        "a mixture of experts, 1p+1d", "toll",
        "--workload poisson:rate=20,in=100:2000,out=16:160,n=250 --fleet 1p+1d "
        "--model qwen3-30b-a3b --gpu B200",
    ),
    "toll-quantised": _policy(
        "FP8 weights on an RTX4090", "toll",
        "--workload poisson:rate=4,in=100:1500,out=16:160,n=100 --fleet 2xboth "
        "--model llama-3.1-8b-FP8 --gpu RTX4090",
    ),
    "toll-memory-short": _policy(
        "evictions, ghosts, the placement game, preemptions", "toll",
        "--workload {mooncake},speed=2 --fleet 4xboth --model llama-3.1-8b --gpu H100 "
        "--blocks 1200", report=True,
    ),
    # --- the other policies --------------------------------------------------------------------
    "random-2p2d": _policy(
        "random, 2p+2d", "random", f"--workload {{burst}},speed=2 --fleet 2p+2d {_LLAMA}",
    ),
    "round-robin-burst": _policy(
        "round-robin, BurstGPT's format", "round-robin",
        f"--workload {{burst}},speed=2 --fleet 3xboth {_LLAMA}",
    ),
    "power-of-two-azure": _policy(
        "power-of-two, Azure's format, other arrivals", "power-of-two",
        f"--workload {{azure}},rate=20,cv=0.5 --fleet 4xboth {_LLAMA} --seed 7",
    ),
    "dynamo-paper-regime": _policy(
        "dynamo-paper under the regime controller, cusum detector", "dynamo-paper",
        f"{_CLOSED} --fleet 1p+2d --timing law:340b --controller regime --temperature 0.7",
        report=True,
    ),
    "dynamo-paper-detector": _policy(
        "the paper's detector, the interpolated controller", "dynamo-paper,overlap_weight=0.5",
        f"{_CLOSED},pool=48,barging=0.9 --fleet 1p+2d --timing law:340b "
        "--controller interpolated --detector paper,theta1=1,theta2=10",
    ),
    "dynamo": _policy(
        "dynamo with KV weights", "dynamo,prefill_load_scale=0.5",
        f"{_PREFIXES} --fleet 2p+2d {_SMALL} --temperature 0.3",
    ),
    "dynamo-conditional": _policy(
        "conditional disaggregation by Dynamo's bounds", "dynamo-conditional,inner=dynamo-paper",
        f"{_PREFIXES} --fleet 1p+3d {_LLAMA}",
    ),
    "llm-d": _policy("llm-d", "llm-d", f"{_PREFIXES} --fleet 4xboth {_SMALL}"),
    "llm-d-blend": _policy(
        "llm-d-blend", "llm-d-blend", f"--workload {{mooncake}} --fleet 2p+2d {_LLAMA}",
    ),
    "llm-d-conditional": _policy(
        "conditional disaggregation by llm-d's threshold",
        "llm-d-conditional,non_cached_tokens=256",
        f"{_PREFIXES} --fleet 1p+3d {_SMALL}",
        report=True,
    ),
    "lmetric": _policy("lmetric", "lmetric", f"{_PREFIXES} --fleet 4xboth {_SMALL}"),
    "lmetric-dynamo": _policy(
        "lmetric's port to Dynamo", "lmetric,port=dynamo", f"{_PREFIXES} --fleet 2p+2d {_SMALL}",
    ),
    "sglang-cache-aware": _policy(
        "sglang-cache-aware", "sglang-cache-aware", f"{_PREFIXES} --fleet 4xboth {_SMALL}",
    ),
    "aibrix-prefix": _policy(
        "aibrix-prefix", "aibrix-prefix", f"{_PREFIXES} --fleet 4xboth {_SMALL}",
    ),
    "ray-prefix": _policy(
        "ray-prefix", "ray-prefix", f"--workload {{mooncake}} --fleet 4xboth {_SMALL}",
    ),
    "mooncake": _policy(
        "mooncake's conductor", "mooncake", f"--workload {{mooncake}} --fleet 2p+3d {_LLAMA}",
        report=True,
    ),
    "saturation-second-difference": _policy(
        "the second-difference detector, raw temperature", "least-loaded",
        f"{_CLOSED} --fleet 1p+2d --timing law:340b --controller regime "
        "--detector second-difference,theta1=0.0001,theta2=0.001",
    ),
    # --- failures, slow workers, stale signals, networks ---------------------------------------
    "killed-workers": _policy(
        "workers die and return empty, streams move", "toll",
        f"{_PREFIXES} --fleet {{killed}} {_LLAMA}", report=True,
    ),
    "killed-split": _policy(
        "prefill and decode workers die, leases end, legs take time", "toll",
        f"{_PREFIXES} --fleet {{killed_split}} {_LLAMA}", report=True,
    ),
    "killed-round-robin": _policy(
        "failures under round-robin, client timeouts and retries", "round-robin",
        f"{_PREFIXES},timeout=3,retries=2,backoff=0.2 --fleet {{killed}} {_SMALL}",
    ),
    "lost-for-good": _policy(
        "workers that never return, one that starts late, the only prefill worker lost",
        "dynamo-conditional", f"{_PREFIXES} --fleet {{lost_for_good}} {_LLAMA} --queue-timeout 4",
    ),
    "slow-workers": _policy(
        "slow steps, a late start", "toll", f"{_PREFIXES} --fleet {{slow}} {_LLAMA}",
    ),
    "stale-signals": _policy(
        "late and lost KV events and load reports, replay", "toll",
        f"{_PREFIXES} --fleet {{stale}} {_SMALL}", report=True,
    ),
    "forgetful-signals": _policy(
        "lost events without replay, a worker without events, no reports", "toll",
        f"{_PREFIXES} --fleet {{forgetful}} {_SMALL}",
    ),
    "fifo-receiver-link": _policy(
        "a fifo link, shared at the receiver", "toll",
        f"--workload {{mooncake}} --fleet {{fifo_receiver}} {_LLAMA}",
    ),
    "latency-only-link": _policy(
        "a link without bandwidth limit", "least-loaded",
        f"--workload {{azure}} --fleet {{no_bandwidth}} {_LLAMA}",
    ),
    # --- KV: tiers, peers, none ----------------------------------------------------------------
    "tiers-price": _policy(
        "host and disk tiers by price, recall", "toll",
        f"{_AGENTS} --tier host=1GiB --tier disk=4GiB,gbps=24,latency_us=150", report=True,
    ),
    "tiers-lru-arc": _policy(
        "tiers by lru and arc, no recall", "toll",
        f"{_AGENTS} --tier host=0.5GiB,policy=lru --tier disk=2GiB,policy=arc --no-tier-recall",
    ),
    "tiers-fifo-frequency": _policy(
        "tiers by fifo and frequency", "dynamo",
        f"{_AGENTS} --tier host=0.5GiB,policy=fifo --tier disk=2GiB,policy=frequency",
    ),
    "tiers-gdsf-kvbm": _policy(
        "tiers by gdsf and kvbm", "toll",
        f"{_AGENTS} --tier host=0.5GiB,policy=gdsf --tier disk=2GiB,policy=kvbm",
    ),
    "tiers-lfu-random": _policy(
        "tiers by lfu and random", "lmetric",
        f"{_AGENTS} --tier host=0.5GiB,policy=lfu --tier disk=2GiB,policy=random",
    ),
    "tiers-s3fifo-sieve": _policy(
        "tiers by s3fifo and sieve", "toll",
        f"{_AGENTS} --tier host=0.5GiB,policy=s3fifo --tier disk=2GiB,policy=sieve",
    ),
    "tiers-of-each-worker": _policy(
        "tiers that differ by worker, a disk that outlives its worker", "toll",
        "--workload {sessions},speed=2 --fleet {tiers_each} --model llama-3.1-8b --gpu H100",
        report=True,
    ),
    "peer-reads": _policy(
        "Pigou's engine, reads from peers, rehearsed speeds, a small step", "toll",
        f"{_PREFIXES} --fleet 4xboth {_SMALL} --engine pigou --max-batched-tokens 512", report=True,
    ),
    "peer-reads-split": _policy(
        "reads from peers by prefill workers, tiers, vLLM's ways", "least-loaded",
        f"--workload {{sessions}} --fleet 2p+2d {_SMALL} --peer-reads --rehearses "
        "--tier host=1GiB",
    ),
    "no-prefix-caching": _policy(
        "no prefix caching, blocks of 32", "toll", f"{_PREFIXES} --fleet {{uncached}} {_LLAMA}",
    ),
    # --- timings -------------------------------------------------------------------------------
    "measured-timing": _policy(
        "a profiled worker with rhythm and scatter, Pigou's engine", "toll",
        "--workload poisson:rate=12,in=16:400,out=8:64,templates=30,n=220 --fleet 2xboth "
        "--timing {measured} --engine pigou --seed 5",
    ),
    "table-timing": _policy(
        "layer tables of a profiler", "toll",
        "--workload poisson:rate=6,in=100:2000,out=16:120,n=150 --fleet 2xboth "
        "--model llama-3.1-8b --gpu RTX4090 --timing profile:{tables} --blocks 2588",
    ),
    "law-timing": _policy(
        "a law of one's own, think time, barrier", "power-of-two",
        "--workload closed:C=24,in=64:256,out=16:96,hold=20,think=0.3,barrier=5 --fleet 1p+2d "
        "--timing law:itl_a=0.01,itl_b=0.0004,prefill=0.01,prefill_token=0.00003 --blocks 3000",
    ),
    # --- tenants, admission, the client --------------------------------------------------------
    "fair-tenants": _policy(
        "fair admission, bounded streams and tokens", "toll",
        f"{_FLOOD} --admission fair --max-inflight 12 --max-inflight-tokens 40000", report=True,
    ),
    "priority-fair-tenants": _policy(
        "priority-fair admission, a bounded queue that sheds", "least-loaded",
        f"{_FLOOD},retries=2 --admission priority-fair,credit=4096 --max-inflight 6 "
        "--max-queued 12",
    ),
    "shortest-first": _policy(
        "shortest prompt first, a queue timeout", "toll",
        f"{_FLOOD} --admission shortest,ageing=300 --max-inflight 6 --queue-timeout 3",
    ),
    "edf": _policy(
        "earliest deadline first, tenants' sessions", "round-robin",
        "--workload {sessions},speed=4 --fleet 2xboth --model llama-3.1-8b --gpu L40S "
        "--admission edf,patience_ms=2000 --max-inflight 8",
    ),
    "priority-queue": _policy(
        "priority admission, the queue's bound, client timeouts", "toll",
        f"{_FLOOD},timeout=4,retries=1 --admission priority --max-inflight 8 --max-queued 20",
    ),
    "bandit": _policy(
        "the bandit controller, connections taken last in first out", "dynamo-paper",
        f"{_CLOSED},pool=80,take=lifo,barging=0.5 --fleet 1p+2d --timing law:70b "
        "--controller bandit",
    ),
    # --- planners: the fleet grows and shrinks -------------------------------------------------
    "planner-price": _policy(
        "the price planner on a load that steps up and down, aggregated workers", "toll",
        f"--workload {_STEPS} --fleet 1xboth {_PLANNED}", report=True,
    ),
    "planner-price-split": _policy(
        "the price planner on prefill and decode pools", "toll",
        f"--workload {_STEPS} --fleet 1p+1d {_PLANNED}",
    ),
    "planner-dynamo": _policy(
        "Dynamo's planner by load on prefill and decode pools", "toll",
        f"--workload {_STEPS} --fleet 1p+1d {_PLANNED}".replace("price", "dynamo-load"),
    ),
    # --- experiments ---------------------------------------------------------------------------
    "experiment-table4": Simulation(
        "Experiment 1 at two levels", "experiment table4 --fleet 70b-1p2d --levels 16,96 --runs 1",
    ),
    "experiment-regimes": Simulation(
        "Experiment 2 at one level", "experiment regimes --fleet 70b-1p2d --levels 96 --runs 1",
    ),
    "experiment-toll": Simulation(
        "toll against thresholds", "experiment toll --fleet 70b-1p2d --levels 32 --runs 1",
    ),
}  # fmt: skip
