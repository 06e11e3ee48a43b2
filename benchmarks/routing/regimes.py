"""Controllers of temperature and overlap weight beside one another, and beside the toll policy.

    python -m benchmarks.routing.regimes [--seeds 3] [--rate 45] [--zipf 1] [--only NAME]

The control plane is the real one (`pigou.control.plane`: index, estimates, routing policies); the
six workers are a queueing model. A prompt has one of 96 prefixes (2,048 tokens; Zipf, whose
exponent 3 gives 83 % of the prompts to one) and 256 tokens of its own. Prompts are computed one
after another (10 ms and 0.1 ms for each token that is not cached); streams share the worker by a
LatencyLaw with its pole at 48, 64 tokens each, past which a worker does ever less. A worker keeps
20 prefixes, least recently used. Prefill does not slow streams here.

Poisson arrivals: 60 s at half the rate, 120 s at the rate, 60 s at half; times and prompts are the
same for all. Latencies are means over seeds, +- the deviation between them; the first 20 s are left
out. `random` and `least-loaded` need no parameters, and are there for scale.
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pigou.config import ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import CacheChanged, Ended, FirstToken, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.control.routing.policy import load, params_of
from pigou.control.routing_controller import (
    Controller,
    E2ESample,
    Parameters,
    RoutingSetting,
    Static,
    StaticConfig,
)
from pigou.control.saturation.cusum_detector import CusumDetector
from pigou.control.saturation.regime import Detector, TTFTSample
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, BlockRemoved, BlockStored, FinishReason, Request, Worker
from pigou_lab.detectors import PaperConfig, PaperDetector
from pigou_lab.routing_controllers import (
    Bandit,
    BanditConfig,
    Interpolated,
    InterpolatedConfig,
    RegimeConfig,
    RegimeController,
)

Floats = NDArray[np.float64]
WORKERS, BLOCK, PREFIXES, PREFIX, OWN, OUTPUT, KEPT = 6, 64, 96, 2048, 256, 64, 20
BASE, TOKEN = 0.01, 1e-4
LAW = LatencyLaw(0.0003, 0.012, 0.15, 48.0, 1.0)
SECONDS, WARM = 240.0, 20.0
NO_PARENT = np.zeros((0, 2), dtype=np.uint64)


@dataclass
class Item:
    """A request on its way."""

    request: Request
    prefix: int
    came: float
    parameters: Parameters
    first: float = 0.0
    end: float = 0.0
    hit: bool = False
    goal: float = 0.0
    told: int = 0


@dataclass
class Node:
    """A worker: prompts one after another, streams side by side, prefixes by recency."""

    name: str
    queue: deque[Item] = field(default_factory=deque)
    streams: list[tuple[float, int, Item]] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    done: float = 0.0  # tokens that each stream generated since the beginning
    at: float = 0.0
    stamp: int = 0

    def advance(self, now: float) -> None:
        """Let streams run up to now."""
        if self.streams:
            self.done += (now - self.at) / LAW(float(len(self.streams)))
        self.at = now

    def next_end(self) -> float:
        """When the first of the streams ends if nothing comes between."""
        return self.at + max(0.0, self.streams[0][0] - self.done) * LAW(float(len(self.streams)))


def hashes(prefix: int) -> NDArray[np.uint64]:
    count = PREFIX // BLOCK
    first = np.arange(prefix * count, (prefix + 1) * count, dtype=np.uint64)
    return np.stack([first, first + np.uint64(1 << 40)], axis=1)


HASHES = [hashes(prefix) for prefix in range(PREFIXES)]


def arrivals(seed: int, rate: float, zipf: float) -> tuple[Floats, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, SECONDS, rng.poisson(rate * SECONDS)))
    level = np.where((times >= 60) & (times < 180), 1.0, 0.5)
    times = times[rng.random(len(times)) < level]
    weight = np.arange(1.0, PREFIXES + 1) ** -zipf
    return times, rng.choice(PREFIXES, len(times), p=weight / weight.sum())


class Fleet:
    """The plane, its workers, and a controller that sets each request's parameters."""

    def __init__(self, policy: str, make: Callable[[Detector], Controller], detector: Detector):
        self.plane = ControlPlane(
            ControlConfig(policy=policy, max_queued=100_000, queue_timeout=3600 * SECOND)
        )
        self.detector = detector
        self.controller = make(detector)
        known = params_of(load(policy))
        self.names = [name for name in ("overlap_weight",) if name in known]
        self.nodes = [Node(f"w{i}") for i in range(WORKERS)]
        self.events: list[tuple[float, int, str, int, Item | None]] = []
        self.count = 0
        self.waiting = 0
        self.items: list[Item] = []
        for node in self.nodes:
            self.plane.observe(WorkerUp(Worker(node.name, "", block_size=BLOCK)), 0)

    def run(self, times: Floats, prefixes: NDArray[np.int64]) -> list[Item]:
        """Serve all requests; return them."""
        for index, (time, prefix) in enumerate(zip(times, prefixes, strict=True)):
            request = Request(
                f"r{index}", PREFIX + OWN, OUTPUT, HASHES[prefix], arrival=nanos(time)
            )
            self.push(float(time), "come", 0, Item(request, int(prefix), float(time), Parameters()))
        for tick in range(int(2 * SECONDS)):
            self.push(tick / 2, "tick", 0, None)
        while self.events:
            now, _, kind, arg, item = heapq.heappop(self.events)
            if kind == "come" and item is not None:
                self.come(now, item)
            elif kind == "first" and item is not None:
                self.first(now, self.nodes[arg], item)
            elif kind == "end":
                self.end(now, arg)
            elif kind == "tick":
                self.tick(now)
        return self.items

    def push(self, time: float, kind: str, arg: int, item: Item | None) -> None:
        """Something is to happen."""
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, arg, item))

    def come(self, now: float, item: Item) -> None:
        """Route a request, under the parameters of now."""
        item.parameters = self.controller.parameters(nanos(now))
        overrides = {"temperature": item.parameters.temperature}
        overrides |= {name: getattr(item.parameters, name) for name in self.names}
        request = item.request
        item.request = Request(
            request.id, request.prompt, request.max_tokens, request.hashes,
            arrival=request.arrival, overrides=overrides,
        )  # fmt: skip
        decision = self.plane.submit(item.request, nanos(now))
        assert isinstance(decision, Route)
        assert decision.choice.prefill is None
        place = int(decision.choice.decode[1:])
        node = self.nodes[place]
        item.told = len(node.queue)  # until its first token: how many were ahead
        self.waiting += 1
        node.queue.append(item)
        if len(node.queue) == 1:
            self.begin(now, place)

    def begin(self, now: float, place: int) -> None:
        """Compute the next prompt of a worker."""
        node = self.nodes[place]
        item = node.queue[0]
        item.hit = item.prefix in node.cache
        if item.hit:
            node.cache.move_to_end(item.prefix)
        tokens = OWN if item.hit else OWN + PREFIX
        self.push(now + BASE + TOKEN * tokens, "first", place, item)

    def first(self, now: float, node: Node, item: Item) -> None:
        """A prompt is computed: its stream begins, its prefix is held."""
        at = nanos(now)
        node.queue.popleft()
        if not item.hit:
            self.keep(node, item, at)
        item.first, ahead, item.told = now, item.told, 1
        self.waiting -= 1
        self.plane.observe(FirstToken(item.request.id), at)
        tokens = OWN if item.hit else OWN + PREFIX
        inflight = self.waiting + 1
        sample = TTFTSample(now - item.came, tokens, inflight, ahead, item.parameters.setting)
        self.detector.update(at, sample)
        self.controller.observe(at, sample)
        node.advance(now)
        item.goal = node.done + OUTPUT - 1
        self.count += 1
        heapq.heappush(node.streams, (item.goal, self.count, item))
        self.plan(node)
        if node.queue:
            self.begin(now, self.nodes.index(node))

    def keep(self, node: Node, item: Item, at: int) -> None:
        """Hold a prefix, drop the one that was used least recently."""
        node.cache[item.prefix] = None
        stored = BlockStored(item.request.id, 0, HASHES[item.prefix], NO_PARENT)
        events: list[BlockStored | BlockRemoved] = [stored]
        if len(node.cache) > KEPT:
            old, _ = node.cache.popitem(last=False)
            events.append(BlockRemoved(HASHES[old]))
        self.plane.observe(CacheChanged(node.name, tuple(events)), at)

    def plan(self, node: Node) -> None:
        """Say anew when the next stream of a worker ends."""
        node.stamp += 1
        if node.streams:
            place = self.nodes.index(node)
            self.push(node.next_end(), "end", node.stamp * WORKERS + place, None)

    def end(self, now: float, arg: int) -> None:
        """The first of a worker's streams ends, unless that was planned anew."""
        stamp, place = divmod(arg, WORKERS)
        node = self.nodes[place]
        if stamp != node.stamp:
            return
        node.advance(now)
        _, _, item = heapq.heappop(node.streams)
        at, item.end = nanos(now), now
        report_tokens(self.plane, [(item.request.id, OUTPUT - item.told)], at)
        self.plane.observe(Ended(item.request.id, FinishReason.LENGTH), at)
        alone = BASE + TOKEN * (OWN + PREFIX) + (OUTPUT - 1) * LAW(1.0)
        self.controller.observe(at, E2ESample(now - item.came, alone, item.parameters.setting))
        self.items.append(item)
        self.plan(node)

    def tick(self, now: float) -> None:
        """Tell of tokens, and let time pass."""
        at = nanos(now)
        for node in self.nodes:
            node.advance(now)
            for goal, _, item in node.streams:
                made = OUTPUT - max(0, round(goal - node.done))
                if made > item.told:
                    report_tokens(self.plane, [(item.request.id, made - item.told)], at)
                    item.told = made
        self.detector.tick(at, self.waiting)
        self.plane.tick(at)


def nanos(seconds: float) -> int:
    return round(seconds * SECOND)


@dataclass(frozen=True)
class Contender:
    """A policy with a controller."""

    name: str
    policy: str
    make: Callable[[Detector], Controller]
    detector: Callable[[], Detector] = CusumDetector


def still(temperature: float, weight: float) -> Callable[[Detector], Controller]:
    setting = RoutingSetting(temperature=temperature, overlap_weight=weight)
    return lambda _: Static(StaticConfig(setting=setting))


def contenders(p99: float, seed: int) -> list[Contender]:
    def paper() -> Detector:
        return PaperDetector(PaperConfig.of_baseline(p99))

    def learner(_: Detector) -> Controller:
        return Bandit(BanditConfig(), None, np.random.default_rng(seed))

    one = "dynamo-paper"
    return [
        Contender("random", "random", still(0, 1)),
        Contender("least-loaded", "least-loaded", still(0, 1)),
        Contender("static (0, 1): Below", one, still(0, 1)),
        Contender("static (0.7, 1): Transition", one, still(0.7, 1)),
        Contender("static (0.8, 0.1): Saturated", one, still(0.8, 0.1)),
        Contender("static (0, 16)", one, still(0, 16)),
        Contender("regime, paper", one, lambda d: RegimeController(RegimeConfig(), d), paper),
        Contender("regime, cusum", one, lambda d: RegimeController(RegimeConfig(), d)),
        Contender(
            "interpolated, paper", one, lambda d: Interpolated(InterpolatedConfig(), d), paper
        ),
        Contender("interpolated, cusum", one, lambda d: Interpolated(InterpolatedConfig(), d)),
        Contender("bandit", one, learner),
        Contender("toll", "toll", still(0, 1)),
    ]


def figures(items: list[Item]) -> list[float]:
    """Mean and P99 of TTFT, mean latency, in seconds; hits in per cent."""
    kept = [item for item in items if item.came >= WARM]
    ttft = np.array([item.first - item.came for item in kept])
    latency = np.array([item.end - item.came for item in kept])
    hits = 100 * float(np.mean([item.hit for item in kept]))
    return [float(ttft.mean()), float(np.quantile(ttft, 0.99)), float(latency.mean()), hits]


def at_rest(seed: int) -> float:
    """TTFT P99 of the static fleet under little load, which the paper's thresholds rest on."""
    fleet = Fleet("dynamo-paper", still(0, 1), CusumDetector())
    return figures(fleet.run(*arrivals(seed, 6.0, 1.0)))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, nargs="*", default=[30.0, 45.0, 60.0])
    parser.add_argument("--zipf", type=float, nargs="*", default=[1.0, 3.0])
    parser.add_argument("--only", default="", help="run contenders whose name contains this")
    args = parser.parse_args()
    p99 = at_rest(99)
    print(f"TTFT P99 at rest: {p99:.3f} s\n")
    for zipf, rate in product(args.zipf, args.rate):
        print(f"{rate:g} requests a second at most, Zipf {zipf:g}\n")
        print("| controller | TTFT mean, s | TTFT P99, s | latency mean, s | hits % |")
        print("|---|---|---|---|---|")
        for each in contenders(p99, 0):
            if args.only not in each.name:
                continue
            rows = []
            for seed in range(args.seeds):
                fleet = Fleet(each.policy, each.make, each.detector())
                rows.append(figures(fleet.run(*arrivals(seed, rate, zipf))))
            mean, off = np.mean(rows, axis=0), np.std(rows, axis=0)
            cells = [f"{m:.3f} +- {s:.3f}" for m, s in zip(mean[:3], off[:3], strict=True)]
            print(f"| {each.name} | " + " | ".join(cells) + f" | {mean[3]:.1f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
