"""Simulated faults: a small fleet for each failure mode; modes 1, 5 and 15 edit a healthy run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import msgspec

from pigou.config import ControlConfig
from pigou.kv.offload import RecomputeCost
from pigou.request import SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, Outage, Slow, WorkerGroup
from pigou.sim.observed_windows import WindowObserver
from pigou.sim.request_run import Leg
from pigou.sim.setup import Setup, TierConfig
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker import SimWorker
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec
from pigou.windows.observations import FleetObservation, WorkerObservation

#: Mode 0: a healthy fleet.
HEALTHY = 0
_TENANTS = ("anna", "bert", "carl", "dora")
#: Tokens in a block of the workloads' prompts.
_BLOCK = 16
_SCOPE = 7


_AGENTS_GROUP = WorkerGroup(count=2, blocks=3000)
#: Key of releases, behind other events of a moment.
_LAST = 2**50
_SETUP = Setup(model="llama-3.1-8b", gpu="H100", max_batched_tokens=512)
_UNLIMITED, _TWO, _PATIENT = unlimited(), WorkerGroup(count=2), ClientConfig()


@dataclass(frozen=True)
class FaultTrial:
    """A small fleet, its load, and its fault."""

    sessions: Sequence[RequestSession]
    group: WorkerGroup = _TWO
    setup: Setup = _SETUP
    control: ControlConfig = _UNLIMITED  # limits of the control plane, in place of none
    client: ClientConfig = _PATIENT  # how the load is sent
    prepare: Callable[[Simulation], None] | None = None
    inject: Callable[[list[FleetObservation], Random], list[FleetObservation]] | None = None


def run_trial(mode: int, seed: int, **remedy: Any) -> list[FleetObservation]:
    """Return the windows of a mode's trial, of the healthy fleet for mode 0.

    `remedy` are fields of the trial in place of its own.
    """
    rng = Random(f"{mode}/{seed}")
    trial = replace(TRIALS[mode](rng), **remedy)
    simulation = _simulation(trial, seed)
    observer = WindowObserver(simulation)
    simulation.run()
    windows = list(observer.windows)
    return windows if trial.inject is None else trial.inject(windows, rng)


def simulate(mode: int, seed: int, assess_every: float) -> Simulation:
    """Return a mode's trial before it runs; the Price of Anarchy is assessed periodically."""
    return _simulation(TRIALS[mode](Random(f"{mode}/{seed}")), seed, assess_every)


def _simulation(trial: FaultTrial, seed: int, assess_every: float = 60.0) -> Simulation:
    fleet = FleetConfig(workers=(trial.group,))
    control = msgspec.structs.replace(trial.control, seed=seed)
    simulation = Simulation(
        OpenLoop(trial.sessions), fleet, trial.setup, control, trial.client, seed=seed,
        assess_every=assess_every,
    )  # fmt: skip
    if trial.prepare is not None:
        trial.prepare(simulation)
    return simulation


# --- loads ------------------------------------------------------------------------------------


def _spec(
    rng: Random, prompt: tuple[int, int] = (200, 800), output: tuple[int, int] = (64, 192), *,
    shared: int = 160, tenant: str | None = None, think_s: float = 0.0,
) -> RequestSpec:  # fmt: skip
    """Return a request: the first `shared` tokens are those of all others."""
    name = rng.choice(_TENANTS) if tenant is None else tenant
    tokens = shared + rng.randint(*prompt)
    count = -(-tokens // _BLOCK) - shared // _BLOCK
    blocks = (*range(shared // _BLOCK), *(rng.getrandbits(60) for _ in range(count)))
    return RequestSpec(tokens, rng.randint(*output), blocks, _SCOPE, float(_BLOCK),
                       think_ns=round(think_s * SECOND), tenant=name)  # fmt: skip


def _poisson(rng: Random, rate: float, seconds: float, begin: float = 0.0) -> Iterator[int]:
    at = begin
    while (at := at + rng.expovariate(rate)) < begin + seconds:
        yield round(at * SECOND)


def _open(
    rng: Random, rate: float, seconds: float, begin: float = 0.0, **lengths: Any
) -> list[RequestSession]:
    return [RequestSession(at, (_spec(rng, **lengths),))
            for at in _poisson(rng, rate, seconds, begin)]  # fmt: skip


def _closed(
    rng: Random, users: int, count: int, ramp: float = 5.0, **lengths: Any
) -> list[RequestSession]:
    return [RequestSession(round(ramp * SECOND * user / users),
                           tuple(_spec(rng, **lengths) for _ in range(count)))
            for user in range(users)]  # fmt: skip


def _merged(*parts: Sequence[RequestSession]) -> list[RequestSession]:
    return sorted((one for part in parts for one in part), key=lambda one: one.start_ns)


# --- trials -----------------------------------------------------------------------------------


def _healthy(rng: Random) -> FaultTrial:
    return FaultTrial(_open(rng, rng.uniform(5.0, 9.0), 240.0))


def _out_of_memory(rng: Random) -> FaultTrial:
    at = rng.uniform(60.0, 120.0)
    group = WorkerGroup(count=2, fails=(Outage(start=at, end=at + 20.0),))

    def inject(windows: list[FleetObservation], _: Random) -> list[FleetObservation]:
        return _with_workers(windows, lambda w, _: {"out_of_memory": w.restarts})

    return FaultTrial(_open(rng, rng.uniform(5.0, 8.0), 180.0), group, inject=inject)


def _kv_exhaustion(rng: Random) -> FaultTrial:
    users = rng.randint(70, 90)
    return FaultTrial(_closed(rng, users, 9, output=(300, 600)),
                      WorkerGroup(count=2, blocks=1200))  # fmt: skip


def _fragmentation(rng: Random) -> FaultTrial:
    load = _open(rng, rng.uniform(10.0, 14.0), 150.0, prompt=(100, 200), output=(64, 192))
    return FaultTrial(load, WorkerGroup(count=2, blocks=20, block_size=512))


def _miss_storm(rng: Random) -> FaultTrial:
    rate, at = rng.uniform(4.0, 7.0), rng.uniform(100.0, 140.0)
    before = _open(rng, rate, at, shared=2400, prompt=(100, 300))
    after = _open(rng, rate, 240.0 - at, at, shared=0, prompt=(2500, 2700))
    return FaultTrial(_merged(before, after))


def _staleness(rng: Random) -> FaultTrial:
    at, share = rng.uniform(60.0, 120.0), rng.uniform(0.1, 0.5)

    def inject(windows: list[FleetObservation], rng: Random) -> list[FleetObservation]:
        changed = []
        for window in windows:
            hits = rng.randint(10, 30)
            stale = sum(rng.random() < share for _ in range(hits)) if window.start_s > at else 0
            changed.append(msgspec.structs.replace(
                window, answer_hits=hits, stale_answer_hits=stale))  # fmt: skip
        return changed

    return FaultTrial(_open(rng, rng.uniform(5.0, 9.0), 180.0), inject=inject)


def _queue_build_up(rng: Random) -> FaultTrial:
    load = _open(rng, rng.uniform(66.0, 80.0), 60.0)
    return FaultTrial(load, WorkerGroup(count=1), control=unlimited(max_inflight=64))


def _prefill_spikes(rng: Random) -> FaultTrial:
    setup = msgspec.structs.replace(_SETUP, max_batched_tokens=8192)
    load = _open(rng, rng.uniform(4.0, 6.0), 150.0, prompt=(3000, 7000))
    return FaultTrial(load, setup=setup)


def _head_of_line(rng: Random) -> FaultTrial:
    shorts = _open(rng, rng.uniform(4.0, 6.0), 240.0)
    gap = rng.uniform(30.0, 40.0)
    longs = [
        RequestSession(
            round((gap * (i + 0.5) + rng.uniform(0, 10)) * SECOND), (_spec(rng, (60_000, 80_000)),)
        )
        for i in range(int(230 / gap))
    ]
    return FaultTrial(_merged(shorts, longs), WorkerGroup(count=1))


def _starvation(rng: Random) -> FaultTrial:
    shorts = _closed(rng, rng.randint(70, 86), 40, prompt=(600, 1000), output=(64, 192))
    longs = _open(rng, 0.15, 60.0, prompt=(8000, 12_000))
    order = {"order": "shortest", "ageing": 1}
    return FaultTrial(_merged(shorts, longs), WorkerGroup(count=1),
                      control=unlimited(admission=order, max_inflight=48))  # fmt: skip


def _batch_inefficiency(rng: Random) -> FaultTrial:
    return FaultTrial(_closed(rng, rng.randint(30, 50), 20), WorkerGroup(count=2, max_seqs=4))


def _noisy_neighbour(rng: Random) -> FaultTrial:
    loud = _closed(rng, rng.randint(110, 130), 12, tenant="anna", output=(100, 300))
    quiet = _open(rng, rng.uniform(3.0, 5.0), 60.0)
    return FaultTrial(
        _merged(loud, quiet), WorkerGroup(count=1), control=unlimited(max_inflight=64)
    )


def _retry_storm(rng: Random) -> FaultTrial:
    load = _merged(_open(rng, 5.0, 60.0), _open(rng, rng.uniform(66.0, 80.0), 40.0, 60.0))
    return FaultTrial(load, WorkerGroup(count=1), control=unlimited(max_inflight=64),
                      client=ClientConfig(timeout=4.0, retries=6))  # fmt: skip


def _stream_stall(rng: Random) -> FaultTrial:
    begin = rng.uniform(40.0, 60.0)
    slow = tuple(Slow(factor=rng.uniform(80.0, 150.0), start=begin + 45.0 * i,
                      end=begin + 45.0 * i + rng.uniform(2.0, 4.0)) for i in range(3))  # fmt: skip
    return FaultTrial(_open(rng, rng.uniform(5.0, 8.0), 200.0), WorkerGroup(count=2, slow=slow))


def _tool_wait(rng: Random) -> FaultTrial:
    return FaultTrial(agents(rng), _AGENTS_GROUP, prepare=hold_in_tools)


def agents(rng: Random) -> list[RequestSession]:
    """Return agents: six turns of growing prompts, with tools of 20 to 40 s between them."""
    sessions = []
    for agent in range(rng.randint(36, 44)):
        turns: list[RequestSpec] = []
        for _ in range(6):
            new = rng.randint(500, 1100)
            blocks = (*turns[-1].block_ids,) if turns else tuple(range(10))
            blocks = (*blocks, *(rng.getrandbits(60) for _ in range(-(-new // _BLOCK))))
            think_s = rng.uniform(20.0, 40.0) if turns else 0.0
            turns.append(RequestSpec(
                len(blocks) * _BLOCK, rng.randint(64, 192), blocks, _SCOPE, float(_BLOCK),
                think_ns=round(think_s * SECOND), tenant=_TENANTS[agent % 4]))  # fmt: skip
        sessions.append(RequestSession(round(rng.uniform(0.0, 30.0) * SECOND), tuple(turns)))
    return _merged(sessions)


def hold_in_tools(simulation: Simulation) -> None:
    """Let workers hold each prompt's blocks for 40 s after it was sent, as if for its tool."""
    for worker in simulation.fleet.workers:
        assert worker.sim is not None
        vars(worker.sim)["add"] = partial(_add_held, simulation.clock, worker.sim, worker.sim.add)


def _add_held(
    clock: Clock, worker: SimWorker, add: Callable[[Leg, int], None], leg: Leg, now: int
) -> None:
    leg.request = msgspec.structs.replace(leg.request, hold=True)
    add(leg, now)
    for wait_s in range(40, 240, 20):  # again where it had not ended
        at = now + wait_s * SECOND
        clock.at(at, Phase.TICK, _LAST, lambda then: worker.release(leg.request.id, then))


def _adapter_pressure(rng: Random) -> FaultTrial:
    def inject(windows: list[FleetObservation], rng: Random) -> list[FleetObservation]:
        def change(*_: object) -> dict[str, object]:
            loads = rng.randint(2, 8)
            return {"adapter_loads": loads, "adapter_load_s": loads * rng.uniform(0.1, 0.5)}

        return _with_workers(windows, change)

    return FaultTrial(_open(rng, rng.uniform(5.0, 9.0), 150.0), inject=inject)


def _offload_collapse(rng: Random) -> FaultTrial:
    bases = [tuple(rng.getrandbits(60) for _ in range(250)) for _ in range(40)]
    sessions = []
    for at in _poisson(rng, rng.uniform(2.0, 3.0), 200.0):
        tail = rng.randint(32, 96)
        blocks = (*rng.choice(bases), *(rng.getrandbits(60) for _ in range(-(-tail // _BLOCK))))
        sessions.append(RequestSession(at, (RequestSpec(
            4000 + tail, rng.randint(32, 96), blocks, _SCOPE, float(_BLOCK),
            tenant=rng.choice(_TENANTS)),)))  # fmt: skip

    def prepare(simulation: Simulation) -> None:
        for worker in simulation.fleet.workers:
            tiers = worker.sim.core.tiers if worker.sim is not None else None
            assert tiers is not None
            cost = tiers.recompute_cost or RecomputeCost()
            tiers.recompute_cost = RecomputeCost(30 * cost.base, 30 * cost.slope)

    tier = TierConfig(name="host", gib=64.0, gbps=8.0)
    return FaultTrial(sessions, WorkerGroup(count=2, blocks=2500, tiers=(tier,)), prepare=prepare)


def _under_use(rng: Random) -> FaultTrial:
    return FaultTrial(_open(rng, rng.uniform(0.1, 0.25), 800.0), WorkerGroup(count=2))


def _saturation(rng: Random) -> FaultTrial:
    lengths = {"prompt": (1200, 2000), "output": (200, 400), "shared": 1200}
    return FaultTrial(_closed(rng, rng.randint(480, 560), 5, ramp=20.0, **lengths),
                      WorkerGroup(count=2, max_seqs=160))  # fmt: skip


def _back_pressure_failure(rng: Random) -> FaultTrial:
    """Crash-looping workers under an unbounded queue."""
    begin = rng.uniform(20.0, 30.0)
    fails = tuple(Outage(start=begin + 2.5 * i, end=begin + 2.5 * i + 0.5) for i in range(16))
    return FaultTrial(_open(rng, rng.uniform(66.0, 80.0), 60.0), WorkerGroup(count=1, fails=fails))


def _with_workers(
    windows: list[FleetObservation],
    change: Callable[[WorkerObservation, FleetObservation], dict[str, object]],
) -> list[FleetObservation]:
    return [
        msgspec.structs.replace(window, workers=tuple(
            msgspec.structs.replace(worker, **change(worker, window)) for worker in window.workers))
        for window in windows
    ]  # fmt: skip


#: The trial of each mode, by number; `HEALTHY` has none.
TRIALS: Mapping[int, Callable[[Random], FaultTrial]] = {
    HEALTHY: _healthy, 1: _out_of_memory, 2: _kv_exhaustion, 3: _fragmentation, 4: _miss_storm,
    5: _staleness, 6: _queue_build_up, 7: _prefill_spikes, 8: _head_of_line, 9: _starvation,
    10: _batch_inefficiency, 11: _noisy_neighbour, 12: _retry_storm, 13: _stream_stall,
    14: _tool_wait, 15: _adapter_pressure, 16: _offload_collapse, 17: _under_use, 18: _saturation,
    19: _back_pressure_failure,
}  # fmt: skip
