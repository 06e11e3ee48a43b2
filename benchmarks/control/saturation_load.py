"""Load for `benchmarks.control.saturation`, and the fleet that serves it."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.selection import select
from pigou.control.saturation.regime import TTFTSample
from pigou.request import SECOND

Floats = NDArray[np.float64]
SERVERS, BASE, SLOPE, NOISE = 4, 0.02, 2e-4, 0.1
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
HOUR = 3600.0
WINDOW = 45  #: services


@dataclass
class Load:
    """Arrivals: when (s, rising) and how many tokens; `slow` multiplies each one's service."""

    times: Floats
    tokens: Floats
    slow: Floats
    token: float = SLOPE

    def service(self, rng: np.random.Generator) -> Floats:
        """Seconds that each takes."""
        noise = rng.lognormal(-(NOISE**2) / 2, NOISE, len(self.times))
        return (BASE + self.token * self.tokens) * self.slow * noise


@dataclass
class Run:
    """First tokens in order (ns), and the seconds in which the fleet queues."""

    events: list[tuple[int, TTFTSample]]
    truth: NDArray[np.bool_]
    window: int
    pending: NDArray[np.int64]  #: requests without a first token at the end of each second


def queues(times: Floats, waits: Floats, service: float, window: int) -> NDArray[np.bool_]:
    """Whether those who come about each second wait for a mean service."""
    seconds = int(times.max()) + 1
    box = np.ones(window)
    total = np.convolve(np.bincount(times.astype(int), waits, seconds), box, mode="same")
    count = np.convolve(np.bincount(times.astype(int), None, seconds), box, mode="same")
    return closed(total >= service * np.maximum(count, 1), window * 3 // 2)


def closed(on: NDArray[np.bool_], gap: int) -> NDArray[np.bool_]:
    """Close gaps shorter than `gap`."""
    out = on.copy()
    for start, end in intervals(~on):
        if end - start < gap and start > 0 and end < len(on):
            out[start:end] = True
    return out


def intervals(on: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def simulate(load: Load, seed: int, explore: bool = False) -> Run:
    """Run the fleet; with `explore`, every request is sent by a temperature of its own."""
    rng = np.random.default_rng(seed)
    service = load.service(rng)
    settings = rng.integers(len(TEMPERATURES), size=len(service)) if explore else None
    free = np.zeros(SERVERS)
    ends: list[list[float]] = [[] for _ in range(SERVERS)]
    waits = np.zeros(len(service))
    imagined: list[float] = []
    events = []
    for i, now in enumerate(load.times):
        while len(imagined) <= now:
            imagined.append(max(0.0, float(free.min()) - len(imagined)))
        work = np.maximum(free - now, 0.0)
        setting = 0 if settings is None else int(settings[i])
        if setting:
            pick = select(work, rng, TEMPERATURES[setting])
            assert pick is not None
            server = pick.index
        else:
            server = int(free.argmin())
        for each in range(SERVERS):
            ends[each] = [end for end in ends[each] if end > now]
        begin = max(now, float(free[server]))
        end = begin + service[i]
        waits[i] = begin - now
        inflight, ahead = sum(map(len, ends)) + 1, len(ends[server])
        ends[server].append(end)
        free[server] = end
        sample = TTFTSample(end - now, int(load.tokens[i]), inflight, ahead, setting)
        events.append((round(end * SECOND), sample))
    events.sort(key=lambda each: each[0])
    mean = float(service.mean())
    window = max(2, round(WINDOW * mean))
    clock = np.arange(len(imagined))
    truth = queues(np.append(load.times, clock), np.append(waits, imagined), mean, window)
    come = np.searchsorted(load.times, clock + 1, side="right")
    served = np.searchsorted([now for now, _ in events], (clock + 1) * SECOND, side="right")
    return Run(events, truth, window, come - served)


def prompts(rng: np.random.Generator, count: int, mean: float = 1000.0) -> Floats:
    return np.maximum(1.0, rng.lognormal(math.log(mean) - 0.32, 0.8, count))


def poisson(seed: int, seconds: float, utilisation: Callable[[Floats], Floats]) -> Load:
    """Poisson arrivals of a utilisation that changes with time (s), by thinning."""
    rng = np.random.default_rng(seed)
    capacity = SERVERS / (BASE + SLOPE * 1000.0)
    most = float(utilisation(np.linspace(0, seconds, 10_000)).max()) * capacity
    times = np.sort(rng.uniform(0, seconds, rng.poisson(most * seconds)))
    times = times[rng.random(len(times)) < utilisation(times) * capacity / most]
    return Load(times, prompts(rng, len(times)), np.ones(len(times)))


def steady(level: float, seconds: float = 1800) -> Callable[[int], Load]:
    return lambda seed: poisson(seed, seconds, lambda t: np.full_like(t, level))


def step(level: float) -> Callable[[int], Load]:
    return lambda seed: poisson(
        seed, 900, lambda t: np.where((t >= 400) & (t < 520), level, 0.5)
    )  # fmt: skip


def ramp(seed: int) -> Load:
    corners = [0, 300, 600, 660, 960, 1500], [0.4, 0.4, 1.3, 1.3, 0.4, 0.4]
    return poisson(seed, 1500, lambda t: np.interp(t, *corners))


def bursts(seed: int) -> Load:
    rng = np.random.default_rng(seed + 1000)
    lengths = rng.exponential(np.tile([60.0, 20.0], 60))
    ends = np.cumsum(lengths)
    return poisson(
        seed, 1800, lambda t: np.where(np.searchsorted(ends, t) % 2 == 0, 0.4, 1.5)
    )  # fmt: skip


def longer(seed: int) -> Load:
    """From 600 s on prompts are 4 times as long, and come a quarter as often: load stays at 0.5."""
    load = poisson(seed, 1800, lambda t: np.where(t < 600, 0.5, 0.5 * 0.22 / 0.82))
    late = load.times >= 600
    return Load(load.times, np.where(late, 4 * load.tokens, load.tokens), load.slow)


def slower(seed: int) -> Load:
    """From 600 s on all takes 3 times as long, and load is a third: it stays at 0.5."""
    load = poisson(seed, 1800, lambda t: np.where(t < 600, 0.5, 0.5 / 3))
    return Load(load.times, load.tokens, np.where(load.times >= 600, 3.0, 1.0))


def shared() -> Path | None:
    value = os.environ.get("PIGOU_SHARED")
    return Path(value) / "traces" if value else None


def lines(path: Path) -> Iterator[str]:
    text = subprocess.run(["zstdcat", str(path)], check=True, capture_output=True, text=True).stdout
    return iter(text.splitlines())


def recorded(name: str, level: float) -> Load:
    """A trace, on servers of such a speed that the mean utilisation is `level`."""
    root = shared()
    assert root is not None
    if name == "azure":
        rows = list(csv.DictReader(lines(root / "azure/AzureLLMInferenceTrace_code.csv.zst")))
        stamps = [datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp() for r in rows]
        tokens = np.array([float(r["ContextTokens"]) for r in rows])
    else:
        found = [json.loads(line) for line in lines(root / "mooncake/conversation_trace.jsonl.zst")]
        stamps, tokens = [r["timestamp"] / 1000 for r in found], uncached(found)
    times = np.array(stamps) - min(stamps)
    token = (level * SERVERS * times[-1] - BASE * len(times)) / float(tokens.sum())
    return Load(times, tokens, np.ones(len(times)), token)


def at_rest(name: str, level: float, share: float, explore: bool = False) -> Run:
    """The fleet of `recorded(name, level)` with Poisson arrivals of its prompts at `share`."""
    load, rng = recorded(name, level), np.random.default_rng(904)
    tokens = rng.choice(
        load.tokens, size=round(HOUR * share / level * len(load.times) / load.times[-1])
    )
    times = np.sort(rng.uniform(0, HOUR, len(tokens)))
    return simulate(Load(times, tokens, np.ones(len(times)), load.token), 904, explore)


def uncached(rows: Sequence[dict[str, object]]) -> Floats:
    """Tokens beyond the longest prefix of 512-token blocks that was seen before."""
    seen: set[int] = set()
    out = []
    for row in rows:
        hashes, length = row["hash_ids"], row["input_length"]
        assert isinstance(hashes, list)
        assert isinstance(length, int)
        hits = next((i for i, each in enumerate(hashes) if each not in seen), len(hashes))
        seen.update(hashes)
        out.append(float(max(1, length - 512 * hits)))
    return np.array(out)
