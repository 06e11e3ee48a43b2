"""LoRA adapters: routes that weigh their loads beside others, and what a batch of them costs.

usage: python -m benchmarks.runtime.lora routing [--workers 4] [--slots 2] [--adapters 40]
       python -m benchmarks.runtime.lora batch [MODEL]

`routing` drives the ControlPlane and an EngineCore a worker in virtual time: Poisson arrivals, Zipf
adapters, a step of BASE + SEQ a sequence + tokens / RATE, loads one after another on each worker.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pigou.config import ControlConfig, EngineConfig
from pigou.control.messages import (
    AdapterReport,
    Ended,
    FirstToken,
    Queue,
    Route,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.engine.core import EngineCore
from pigou.engine.plan import Plan, Result
from pigou.request import SECOND, Request, Worker

BASE_S, SEQ_S, RATE = 0.008, 0.0003, 20_000.0
REPORT_S = 1.0


class SimulatedWorker:
    """An engine core, its slots and its one loader."""

    def __init__(self, name: str, slots: int, load_s: float, evict: str) -> None:
        config = EngineConfig(blocks=8192, max_seqs=32, max_batched_tokens=2048,
                              max_model_len=4096, max_loras=slots)  # fmt: skip
        self.name, self.slots, self.load_s = name, slots, load_s
        self.core = EngineCore(config)
        if evict == "lru":  # ties go to the least recently used
            self.core._state.adapters.value = lambda _: 0.0  # type: ignore
        self.device: dict[int, str] = {}
        self.loader_free = self.loads = 0
        self.plan: Plan | None = None


class Fleet:
    """Runs arrivals through a plane and its workers, in virtual nanoseconds."""

    def __init__(
        self, policy: str, workers: int, slots: int, load_s: float, priced: bool, evict: str
    ) -> None:
        self.plane = ControlPlane(ControlConfig(policy=policy))
        names = [f"w{i}" for i in range(workers)]
        self.workers = {name: SimulatedWorker(name, slots, load_s, evict) for name in names}
        for name in self.workers:
            self.plane.observe(WorkerUp(Worker(name, "http://x", blocks=8192, max_seqs=32)), 0)
        self.priced = priced
        self.events: list[tuple[int, int, Any]] = []
        self.numbers = itertools.count()
        self.arrivals: dict[str, int] = {}
        self.models: dict[str, Request] = {}
        self.first: dict[str, int] = {}
        self.ends: dict[str, int] = {}

    def at(self, when: int, call: Any) -> None:
        """Call at a time."""
        heapq.heappush(self.events, (when, next(self.numbers), call))

    def run(self, requests: list[Request]) -> None:
        """Serve all requests."""
        for request in requests:
            self.at(request.arrival, lambda now, r=request: self.arrive(r, now))
        self.at(0, self.report)
        while len(self.ends) < len(requests):
            now, _, call = heapq.heappop(self.events)
            call(now)

    def report(self, now: int) -> None:
        """Tell the plane what is loaded, and let it tick."""
        for worker in self.workers.values() if self.priced else ():
            loaded = tuple(worker.device.values())
            self.plane.observe(AdapterReport(worker.name, worker.slots, loaded, worker.load_s), now)
        for decision in self.plane.tick(now):
            self.take(decision, now)
        self.at(now + int(REPORT_S * SECOND / 10), self.report)

    def arrive(self, request: Request, now: int) -> None:
        """Route a request."""
        self.arrivals[request.id] = now
        self.models[request.id] = request
        self.take(self.plane.submit(request, now), now)

    def take(self, decision: Any, now: int) -> None:
        """Send a routed request to its worker."""
        if isinstance(decision, Route):
            worker = self.workers[decision.choice.decode]
            worker.core.add(self.models[decision.request])
            self.step(worker, now)
        else:
            assert isinstance(decision, Queue), decision

    def step(self, worker: SimulatedWorker, now: int) -> None:
        """Begin a step unless one is under way."""
        if worker.plan is not None:
            return
        plan = worker.core.schedule(now)
        for load in plan.adapters:
            worker.device.pop(load.slot, None)
            worker.loader_free = max(worker.loader_free, now) + int(worker.load_s * SECOND)
            worker.loads += 1
            self.at(worker.loader_free, lambda at, it=load: self.loaded(worker, it, at))
        if not plan:
            return
        worker.plan = plan
        chunks = plan.chunk_tokens
        took = BASE_S + SEQ_S * len(plan.rows) + chunks / RATE
        self.at(now + int(took * SECOND), lambda at: self.finish(worker, at))

    def loaded(self, worker: SimulatedWorker, load: Any, now: int) -> None:
        """End a load."""
        worker.device[load.slot] = load.adapter
        worker.core.adapter_loaded(load.adapter, True, worker.load_s)
        self.step(worker, now)

    def finish(self, worker: SimulatedWorker, now: int) -> None:
        """Apply a step, and tell the plane."""
        plan, worker.plan = worker.plan, None
        assert plan is not None
        owners = [worker.core.rows.owner[row] for row in plan.rows.tolist()]
        ids = [seq.request.id for seq in owners if seq is not None]
        for id, samples in zip(ids, plan.samples.tolist(), strict=True):
            if samples and id not in self.first:
                self.first[id] = now
                self.plane.observe(FirstToken(id), now)
        for ended in worker.core.apply(plan, Result(steps=1)).finished:
            self.ends[ended.request] = now
            for decision in self.plane.observe(Ended(ended.request, ended.reason), now):
                self.take(decision, now)
        self.step(worker, now)


def workload(seed: int, count: int, rate: float, adapters: int, skew: float) -> list[Request]:
    """Poisson arrivals of Zipf adapters; prompts of 64 to 512 tokens, outputs of 16 to 96."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, adapters + 1) ** skew
    names = rng.permutation(adapters)[rng.choice(adapters, count, p=weights / weights.sum())]
    times = np.cumsum(rng.exponential(1.0 / rate, count))
    return [
        Request(f"r{i}", int(rng.integers(64, 513)), int(rng.integers(16, 97)),
                arrival=int(times[i] * SECOND), model=f"a{names[i]}")
        for i in range(count)
    ]  # fmt: skip


def routing(options: argparse.Namespace) -> None:
    """Print TTFT and loads of each router on the same arrivals."""
    print(f"{options.adapters} adapters (Zipf {options.skew}) over {options.workers} x "
          f"{options.slots} slots, load {options.load} s, {options.rate} requests/s, "
          f"{options.count} requests, mean of seeds {options.seeds}")  # fmt: skip
    kinds = {
        "round-robin": ("round-robin", False),
        "least-loaded": ("least-loaded", False),
        "toll, no adapter prices": ("toll", False),
        "toll, adapter prices": ("toll", True),
    }
    table: dict[str, list[tuple[float, float, float]]] = {}
    for seed in options.seeds:
        for (label, (policy, priced)), evict in itertools.product(kinds.items(), options.evict):
            fleet = Fleet(policy, options.workers, options.slots, options.load, priced, evict)
            work = workload(seed, options.count, options.rate, options.adapters, options.skew)
            fleet.run(work)
            ttft = np.array([fleet.first[r.id] - fleet.arrivals[r.id] for r in work]) / SECOND
            loads = sum(worker.loads for worker in fleet.workers.values()) / len(work)
            row = float(ttft.mean()), float(np.quantile(ttft, 0.99)), loads
            table.setdefault(f"{label}, {evict}", []).append(row)
    best = np.mean(table[f"toll, adapter prices, {options.evict[-1]}"], axis=0)
    print(f"{'router, eviction':32}{'TTFT mean':>12}{'P99':>10}{'loads/request':>15}{'of ours':>9}")
    for label, rows in table.items():
        mean, p99, loads = np.mean(rows, axis=0)
        print(f"{label:32}{mean:10.3f} s{p99:8.3f} s{loads:15.3f}{mean / best[0]:8.2f}x")


def batch(options: argparse.Namespace) -> None:
    """Print seconds of a decode step without adapters, with one, and with four."""
    import torch
    from tests.lib.lora_adapters import PROJECTIONS, write_adapter

    from pigou.models import bundled_path
    from pigou.request import SamplingParams
    from pigou.runtime.local_engine import LocalEngine
    from pigou.runtime.lora import attach
    from pigou.runtime.models.load import load

    torch.set_num_threads(1)
    base = bundled_path() if options.model == "bundled" else Path(options.model)
    model = load(base, options.dtype)
    bank = attach(model.decoder, 4, 16, 64)
    with TemporaryDirectory() as folder:
        kind = {"r": 16, "lora_alpha": 16, "target_modules": list(PROJECTIONS)}
        adapters = {}
        for seed in range(4):
            path = write_adapter(Path(folder) / str(seed), base, kind, seed)
            began = time.perf_counter()
            adapters[f"a{seed}"] = bank.read(path)
            read_s = time.perf_counter() - began
    engine = LocalEngine(model, EngineConfig(blocks=1024, max_seqs=64, max_model_len=512,
                                             max_loras=4), bank, adapters)  # fmt: skip
    prompts = np.random.default_rng(0).integers(3, 300, (options.rows, 32))
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    cases = {"none": [""], "one": ["a0"], "four": list(adapters)}
    seconds: dict[str, list[float]] = {label: [] for label in cases}
    for turn in range(options.repeat + 1):
        for label, names in cases.items():
            outputs = [engine.add(prompt, params, adapter=names[i % len(names)])
                       for i, prompt in enumerate(prompts)]  # fmt: skip
            while any(len(output.tokens) < 2 for output in outputs):
                engine.step()
            began, tokens = time.process_time(), sum(len(output.tokens) for output in outputs)
            while any(output.reason is None for output in outputs):
                engine.step()
            tokens = sum(len(output.tokens) for output in outputs) - tokens
            if turn:
                seconds[label].append((time.process_time() - began) / tokens)
    none = statistics.median(seconds["none"])
    size_mb = adapters["a0"].bytes / 1e6
    print(f"{base.name}, {options.dtype}, {options.rows} rows, rank 16 in all projections; "
          f"an adapter of {size_mb:.1f} MB is read in {read_s * 1e3:.1f} ms")  # fmt: skip
    for label, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{label:6}{median * 1e6:10.1f} CPU-us a token{median / none:8.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    routes = parts.add_parser("routing")
    routes.add_argument("--workers", type=int, default=4)
    routes.add_argument("--slots", type=int, default=2)
    routes.add_argument("--adapters", type=int, default=40)
    routes.add_argument("--skew", type=float, default=1.0)
    routes.add_argument("--rate", type=float, default=12.0)
    routes.add_argument("--load", type=float, default=0.1)
    routes.add_argument("--count", type=int, default=1200)
    routes.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    routes.add_argument("--evict", nargs="+", default=["lru", "value"], choices=["lru", "value"])
    routes.set_defaults(call=routing)
    batches = parts.add_parser("batch")
    batches.add_argument("model", nargs="?", default="bundled")
    batches.add_argument("--dtype", default="fp32")
    batches.add_argument("--rows", type=int, default=8)
    batches.add_argument("--repeat", type=int, default=5)
    batches.set_defaults(call=batch)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
