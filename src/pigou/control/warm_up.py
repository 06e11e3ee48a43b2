"""Compiles the control plane's kernels before the first request."""

from __future__ import annotations

from importlib import import_module
from itertools import count

import msgspec
import numpy as np

from pigou.config import ControlConfig
from pigou.control import prefix_index
from pigou.control.journal import report_tokens
from pigou.control.messages import (
    Assess,
    Assessed,
    CacheChanged,
    Ended,
    FirstToken,
    LoadReport,
    PrefillDone,
    Queue,
    Route,
    WorkerUp,
)
from pigou.control.plane import ControlPlane
from pigou.control.router import RouteMeter
from pigou.request import SECOND, FinishReason, Rehearsed, Request, Role, Worker
from pigou.wire.kv_event_decoding import Removed, Stored

_BLOCK = 16
_PROMPT = 8 * _BLOCK
_OUTPUT = 24
#: Requests, how many of them run at once, and nanoseconds between two: long enough for an
#: assessment of the Price of Anarchy.
_REQUESTS, _AT_ONCE, _GAP = 48, 6, SECOND // 4


def warm_up(config: ControlConfig | None = None) -> None:
    """Run every kernel once, and a `config`'s policy, whose exceptions propagate."""
    prefix_index.warm_up()
    toll = ControlConfig(policy="toll")
    _drive(toll)
    import_module("scipy.optimize")  # assessments import it when they need it
    if config is not None and msgspec.structs.replace(config, seed=toll.seed) != toll:
        _drive(config)


def _drive(config: ControlConfig) -> None:
    """Drive a plane through some seconds of a small fleet."""
    plane = ControlPlane(config)
    plane.router.meter = RouteMeter()  # as with a planner
    for role in Role:
        for number in range(2):
            plane.observe(WorkerUp(_worker(role, number)), 0)
    now, under_way = 0, list[str]()
    for number in range(_REQUESTS):
        now += _GAP
        _tick(plane, now)
        request = _request(number, now)
        decision = plane.submit(request, now)
        if isinstance(decision, (Route, Queue)):
            under_way.append(request.id)
        if isinstance(decision, Route):
            _begin(plane, request, decision, now)
        if len(under_way) >= _AT_ONCE:
            _end(plane, under_way.pop(0), now)
    for name in under_way:
        plane.decision(name)
        _end(plane, name, now)
    plane.status(now)


def _worker(role: Role, number: int) -> Worker:
    measured = (Rehearsed(0, 1, 8, 0.08), Rehearsed(256, 0, 1, 0.05), Rehearsed(256, 2, 2, 0.06))
    return Worker(
        f"{role.value}-{number}", "", role, _BLOCK, 64, 8,
        events=number == 0, layout="one", rehearsed=measured if number else (),
    )  # fmt: skip


def _request(number: int, now: int) -> Request:
    # Every other prompt begins as the one before.
    keys = np.arange(1, 1 + _PROMPT // _BLOCK, dtype=np.uint64) + np.uint64(100 * (number // 2))
    return Request(
        str(number), _PROMPT, _OUTPUT, keys={_BLOCK: keys}, arrival=now, priority=number % 2
    )


def _begin(plane: ControlPlane, request: Request, route: Route, now: int) -> None:
    choice, times = route.choice, count(now + SECOND // 100, SECOND // 100)
    computes = choice.prefill or choice.decode
    keys = request.keys_of(_BLOCK)
    tokens = np.arange(_PROMPT, dtype=np.uint32) + np.uint32(int(keys[0]))
    stored = Stored(keys, None, tokens, _BLOCK)
    plane.observe(CacheChanged(computes, (stored,)), next(times))
    if choice.prefill is not None:
        plane.observe(PrefillDone(request.id), next(times))
    plane.observe(LoadReport(choice.decode, 1, 0, 0.1), next(times))
    plane.observe(FirstToken(request.id), next(times))
    for _ in range(4):
        report_tokens(plane, ((request.id, 2),), next(times))
    plane.observe(CacheChanged(computes, (Removed(keys[-1:]),)), next(times))


def _end(plane: ControlPlane, name: str, now: int) -> None:
    plane.observe(Ended(name, FinishReason.STOP), now + SECOND // 8)


def _tick(plane: ControlPlane, now: int) -> None:
    for action in plane.tick(now):
        if isinstance(action, Assess):
            plane.observe(Assessed(plane.assess(action.snapshot)), now)
