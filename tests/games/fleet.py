"""A fleet in a few lines: workers that share their time by a latency law, under a virtual clock.

With n present, each advances by 1 / f(n) of its stage a second; so it takes f(n) if n stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pigou.games.latency import LatencyLaw
from pigou.games.request_window import RequestWindow

Router = Callable[[list[int], np.random.Generator], int]


def least_loaded(loads: list[int], rng: np.random.Generator) -> int:
    best = [w for w, n in enumerate(loads) if n == min(loads)]
    return int(rng.choice(best))


def always_first(loads: list[int], rng: np.random.Generator) -> int:
    return 0


def at_random(loads: list[int], rng: np.random.Generator) -> int:
    return int(rng.integers(len(loads)))


@dataclass
class Stage:
    """A pool: its workers' laws, who is on each, and how much of each one's stage is left."""

    laws: Sequence[LatencyLaw]
    router: Router
    left: list[dict[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = [{} for _ in self.laws]

    def enter(self, request: int, rng: np.random.Generator, noise: float) -> int:
        worker = self.router([len(here) for here in self.left], rng)
        self.left[worker][request] = float(np.exp(rng.normal(-0.5 * noise**2, noise)))
        return worker

    def rate(self, worker: int) -> float:
        return 1.0 / self.laws[worker](float(len(self.left[worker])))

    def next_end(self) -> tuple[float, int, int]:
        """Seconds until the next one is through, its worker and itself."""
        ends = [(np.inf, -1, -1)]
        for worker, here in enumerate(self.left):
            if here:
                request = min(here, key=here.__getitem__)
                ends.append((here[request] / self.rate(worker), worker, request))
        return min(ends)

    def advance(self, seconds: float) -> None:
        for worker, here in enumerate(self.left):
            for request in here:
                here[request] -= seconds * self.rate(worker)


def simulate(
    decode_laws: Sequence[LatencyLaw],
    router: Router = least_loaded,
    *,
    prefill_laws: Sequence[LatencyLaw] = (),
    arrivals: float | None = None,
    clients: int | None = None,
    requests: int = 1500,
    noise: float = 0.1,
    seed: int = 0,
) -> RequestWindow:
    """Serve Poisson ``arrivals`` a second, or a closed loop of ``clients``.

    Prefill workers are numbered first, decode workers after them. The first fifth is not scored.
    """
    rng = np.random.default_rng(seed)
    prefill, decode = Stage(prefill_laws, least_loaded), Stage(decode_laws, router)
    times = np.full((4, requests), np.nan)
    where = np.full((2, requests), -1)
    now, came, done = 0.0, 0, 0
    coming = 0.0
    while done < requests:
        p, d = prefill.next_end(), decode.next_end()
        wait = coming - now if came < requests else np.inf
        step = min(wait, p[0], d[0])
        prefill.advance(step)
        decode.advance(step)
        now += step
        if step == wait:
            times[:2, came] = now
            if prefill_laws:
                where[0, came] = prefill.enter(came, rng, noise)
            else:
                times[2, came] = now
                where[1, came] = decode.enter(came, rng, noise)
            came += 1
            coming = now + rng.exponential(1.0 / arrivals) if arrivals else now
            if clients is not None and came - done >= clients:
                coming = np.inf
        elif step == p[0]:
            _, worker, request = p
            del prefill.left[worker][request]
            times[2, request] = now
            where[1, request] = decode.enter(request, rng, noise)
        else:
            _, worker, request = d
            del decode.left[worker][request]
            times[3, request] = now
            done += 1
            if clients is not None:
                coming = now
    decoders = where[1] + len(prefill_laws)
    scored = np.zeros(requests, dtype=bool)
    scored[requests // 5 : -max(64, clients or 0)] = True
    return RequestWindow.from_times(
        arrived=times[0],
        started=times[1],
        prefill_done=times[2],
        ended=times[3],
        prefill=where[0],
        decode=decoders,
        scored=scored,
    )
