"""Three tenants, one of which floods: what the others' first tokens wait for, by order.

    python -m benchmarks.control.fairness [--seconds 120] [--workers 4] [--flood 10] [--seeds 5]
        [--first 0] [--policy toll]

Workers are simulated: steps of continuous batching with chunked prefill, first come first served
inside, a step's seconds affine in its streams and prompt tokens. The control plane is the real
one, and sees what the gateway would tell it. Rates are shares of the fleet's measured
capacity. Each quiet tenant also runs alone on the same fleet, with the same requests.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pigou.config import ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Action,
    Decision,
    Ended,
    FirstToken,
    Route,
    Shed,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Worker

TICK = SECOND // 10
QUIET = ("ant", "bee")
FLOOD = "locust"
#: Share of the capacity that each quiet tenant asks for; the flood asks for a multiple of it.
SHARE = 0.2
TARGET = 1.3


@dataclass(frozen=True)
class Speed:
    """A simulated worker: seconds of a step, and its limits."""

    step: float = 0.008
    stream: float = 0.00008
    token: float = 0.00003
    max_seqs: int = 64
    budget: int = 2048


@dataclass
class Job:
    """A request inside a worker; `output` tokens will be generated."""

    request: Request
    output: int
    left: int
    tokens: int = 0
    told: int = 0


@dataclass
class Machine:
    """A worker: jobs wait in turn, then run in one batch."""

    name: str
    speed: Speed
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    stepping: bool = False
    firsts: list[Job] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)

    def step(self) -> float:
        """Compute one step; return its seconds."""
        while self.waiting and len(self.running) < self.speed.max_seqs:
            self.running.append(self.waiting.popleft())
        decoding = [job for job in self.running if job.left == 0]
        room = self.speed.budget - len(decoding)
        seconds = self.speed.step + self.speed.stream * len(decoding)
        self.firsts = []
        for job in self.running:
            if job.left and room > 0:
                chunk = min(room, job.left)
                room -= chunk
                job.left -= chunk
                seconds += self.speed.token * chunk
                if job.left == 0:
                    self.firsts.append(job)
        for job in (*decoding, *self.firsts):
            job.tokens += 1
        self.done = [job for job in self.running if job.tokens >= job.output]
        self.running = [job for job in self.running if job.tokens < job.output]
        return seconds


class Simulation:
    """Drives one control plane over simulated workers."""

    def __init__(self, config: ControlConfig, workers: int, speed: Speed) -> None:
        self.plane = ControlPlane(config)
        self.machines = {f"w{i}": Machine(f"w{i}", speed) for i in range(workers)}
        self.now = SECOND
        self.outputs: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.ttft: dict[str, float] = {}
        self.ended: dict[str, int] = {}
        self.shed: dict[str, Shed] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        for name in self.machines:
            self.plane.observe(WorkerUp(Worker(name, "u", max_seqs=speed.max_seqs)), self.now)

    def run(self, requests: Sequence[tuple[Request, int]], until: int) -> None:
        """Submit all, and go on until `until` (nanoseconds)."""
        for request, output in requests:
            self.requests[request.id], self.outputs[request.id] = request, output
            self._at(request.arrival, partial(self._submit, request))
        self._at(self.now, self._tick)
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _at(self, when: int, act: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, act))

    def _submit(self, request: Request) -> None:
        self._take([self.plane.submit(request, self.now)])

    def _tick(self) -> None:
        for machine in self.machines.values():
            for job in machine.running:
                self._tell(job)
        self._take(self.plane.tick(self.now))
        self._at(self.now + TICK, self._tick)

    def _tell(self, job: Job) -> None:
        if job.tokens > job.told:
            report_tokens(self.plane, [(job.request.id, job.tokens - job.told)], self.now)
            job.told = job.tokens

    def _take(self, decisions: Sequence[Decision] | Sequence[Action]) -> None:
        for decision in decisions:
            if isinstance(decision, Shed):
                self.shed[decision.request] = decision
            elif isinstance(decision, Route):
                request = self.requests[decision.request]
                machine = self.machines[decision.choice.decode]
                machine.waiting.append(Job(request, self.outputs[request.id], request.prompt))
                if not machine.stepping:
                    machine.stepping = True
                    self._step(machine)

    def _step(self, machine: Machine) -> None:
        if not (machine.running or machine.waiting):
            machine.stepping = False
            return
        seconds = machine.step()
        firsts, done = machine.firsts, machine.done
        self._at(self.now + int(seconds * SECOND), lambda: self._stepped(machine, firsts, done))

    def _stepped(self, machine: Machine, firsts: Sequence[Job], done: Sequence[Job]) -> None:
        for job in firsts:
            self.ttft[job.request.id] = (self.now - job.request.arrival) / SECOND
            self._take(self.plane.observe(FirstToken(job.request.id), self.now))
        for job in done:
            self._tell(job)
            self.ended[job.request.id] = self.now
            self._take(self.plane.observe(Ended(job.request.id, FinishReason.STOP), self.now))
        self._step(machine)


def requests(
    tenant: str, rate: float, seconds: float, seed: int, prompt: float = 1200.0
) -> list[tuple[Request, int]]:
    """Return a tenant's requests: Poisson arrivals, lognormal prompts and outputs."""
    generator = np.random.default_rng([seed, *tenant.encode()])
    found: list[tuple[Request, int]] = []
    when = 1.0
    while (when := when + generator.exponential(1.0 / rate)) < 1.0 + seconds:
        tokens = int(np.clip(generator.lognormal(np.log(prompt), 0.6), 16, 8000))
        output = int(np.clip(generator.lognormal(np.log(120.0), 0.6), 2, 1000))
        arrival = int(when * SECOND)
        name = f"{tenant}-{len(found)}"
        found.append((Request(name, tokens, 1000, arrival=arrival, tenant=tenant), output))
    return found


def capacity(workers: int, speed: Speed) -> float:
    """Return the requests a second that the fleet finishes when it is flooded."""
    simulation = Simulation(ControlConfig(max_queued=100_000), workers, speed)
    until = 61 * SECOND
    simulation.run(requests("all", 100.0 * workers, 60.0, 0), until)
    late = [when for when in simulation.ended.values() if when > 21 * SECOND]
    return len(late) / 40.0


def measure(
    config: ControlConfig, loads: Sequence[list[tuple[Request, int]]], workers: int,
    speed: Speed, seconds: float,
) -> Simulation:  # fmt: skip
    """Run one fleet over some tenants' requests, and let it finish."""
    simulation = Simulation(config, workers, speed)
    everything = sorted((each for load in loads for each in load), key=lambda pair: pair[0].arrival)
    simulation.run(everything, int((1.0 + seconds + 120.0) * SECOND))
    return simulation


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else float("nan")


ORDERS: dict[str, dict[str, Any]] = {
    "fcfs": {"admission": {"order": "fcfs"}},
    "fair": {"admission": {"order": "fair"}},
    "drf": {"admission": {"order": "drf"}},
    "karma": {"admission": {"order": "karma"}},
    "dlpm": {"admission": {"order": "dlpm"}},
    "d2lpm": {"admission": {"order": "d2lpm"}},
    "market": {"admission": {"order": "market"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--flood", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", default="toll")
    args = parser.parse_args()
    speed = Speed()
    most = capacity(args.workers, speed)
    rate = SHARE * most
    print(f"{args.workers} workers, capacity {most:.1f} requests/s; quiet tenants ask for "
          f"{rate:.1f} each, {FLOOD} for {rate * args.flood:.1f}")  # fmt: skip
    samples: dict[str, dict[str, list[float]]] = {}
    shed: dict[str, dict[str, list[int]]] = {name: {} for name in ORDERS}
    ratios: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(args.first, args.first + args.seeds):
        quiet = {t: requests(t, rate, args.seconds, seed) for t in QUIET}
        flood = requests(FLOOD, rate * args.flood, args.seconds, seed)
        alone = {}
        for tenant in QUIET:
            config = ControlConfig(policy=args.policy, max_queued=1024, seed=seed)
            run = measure(config, [quiet[tenant]], args.workers, speed, args.seconds)
            alone[tenant] = percentile(list(run.ttft.values()), 95)
            samples.setdefault("alone", {}).setdefault(tenant, []).extend(run.ttft.values())
        for name, options in ORDERS.items():
            config = ControlConfig(
                policy=args.policy,
                max_queued=1024,
                queue_timeout=600 * SECOND,
                seed=seed,
                **options,
            )
            run = measure(config, [*quiet.values(), flood], args.workers, speed, args.seconds)
            for tenant in (*QUIET, FLOOD):
                mine = [t for key, t in run.ttft.items() if key.startswith(tenant)]
                samples.setdefault(name, {}).setdefault(tenant, []).extend(mine)
                refused = [each.tenant for key, each in run.shed.items() if key.startswith(tenant)]
                counts = shed[name].setdefault(tenant, [0, 0, 0])
                counts[0] += len(mine)
                counts[1] += sum(refused)
                counts[2] += len(refused) - sum(refused)
                if tenant in QUIET:
                    ratios[name].append(percentile(mine, 95) / alone[tenant])
    print(f"\n{'TTFT, seconds':<16}{'alone P50':>10}{'P95':>8}", end="")
    for name in ORDERS:
        print(f"{name + ' P50':>12}{'P95':>8}{'/alone':>8}", end="")
    print()
    for tenant in (*QUIET, FLOOD):
        base = samples["alone"].get(tenant, [])
        print(f"{tenant:<16}{percentile(base, 50):>10.3f}{percentile(base, 95):>8.3f}", end="")
        for name in ORDERS:
            mine = samples[name][tenant]
            ratio = percentile(mine, 95) / percentile(base, 95)
            print(f"{percentile(mine, 50):>12.3f}{percentile(mine, 95):>8.3f}{ratio:>8.2f}", end="")
        print()
    print(f"\n{'served/429/503':<16}", end="")
    for name in ORDERS:
        shown = " ".join("/".join(map(str, shed[name][t])) for t in (*QUIET, FLOOD))
        print(f"  {name}: {shown}", end="")
    print()
    for name in ORDERS:
        worst = max(ratios[name])
        print(f"{name}: quiet tenants' P95 over alone, by seed and tenant: median "
              f"{np.median(ratios[name]):.2f}, worst {worst:.2f} "
              f"(target {TARGET}: {'met' if worst <= TARGET else 'missed'})")  # fmt: skip


if __name__ == "__main__":
    main()
