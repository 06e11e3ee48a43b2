"""The workload that `--workload` describes: a trace or made-up requests, and their client."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, count, islice
from pathlib import Path
from random import Random
from typing import Self, TypeVar

import msgspec
import numpy as np

from pigou.config import ConfigError, check_fields, key_values
from pigou.registry import read_struct
from pigou.request import SECOND
from pigou.sim.arrival_rate import (
    MAX_SECONDS,
    RateSchedule,
    check_cv,
    read_rate,
    renewal_times,
)
from pigou.sim.client import ClientConfig
from pigou.sim.workload import (
    MAX_TOKENS,
    ClosedLoop,
    OpenLoop,
    RequestLengths,
    RequestSession,
    RequestSpec,
    merged,
    renewal,
)
from pigou.workload.trace import Trace
from pigou.workload.trace_formats import read_trace

_PART = re.compile(r"([\d.]+):(\d+)/(\d+)")
#: Tokens of a block id.
_BLOCK = 16
#: Scope of the block ids.
_SCOPE = 2
_CLIENT = ("pool", "take", "barging", "timeout", "retries", "backoff")
_POOLED = ("take", "barging")
_LENGTHS = ("in", "out", "templates")
T = TypeVar("T", bound=msgspec.Struct)


class LengthMix(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a few lengths."""

    parts: tuple[tuple[float, int, int], ...]  # share (sum 1), prompt tokens, output tokens
    prefix: int = 0  # tokens at the beginning of each prompt that all have in common

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str]:
        """Parse `mix=0.7:512/128,0.3:4096/256[,prefix=N]`; also return the remaining keys."""
        parts: list[tuple[float, int, int]] = []
        prefix, others = 0, []
        for item in text.removeprefix("mix=").split(","):
            match = _PART.fullmatch(item.strip())
            if match is not None:
                parts.append((float(match[1]), int(match[2]), int(match[3])))
            elif item.startswith("prefix="):
                prefix = _tokens("prefix", item.removeprefix("prefix="))
            elif "=" in item:
                others.append(item)
            else:
                raise ConfigError(f"mix has {item!r}; write SHARE:PROMPT/OUTPUT, like 0.7:512/128")
        for _, prompt, output in parts:
            if not 1 <= prompt <= MAX_TOKENS or not 1 <= output <= MAX_TOKENS:
                raise ConfigError(f"mix has {prompt}/{output}; tokens must be 1 to {MAX_TOKENS}")
        total = sum(share for share, _, _ in parts)
        if abs(total - 1.0) > 1e-6:
            raise ConfigError(f"mix: the shares add up to {total:g}; they must add up to 1")
        if parts and prefix >= min(prompt for _, prompt, _ in parts):
            raise ConfigError(f"mix: prefix is {prefix}; it must be below the shortest prompt")
        return cls(parts=tuple(parts), prefix=prefix), ",".join(others)

    def arrivals(
        self, rate: float | RateSchedule, cv: float, requests: int, seconds: float, seed: int
    ) -> OpenLoop:
        """Return requests at random times (`renewal`, which has the meaning of 0)."""
        return renewal(_Sampler(self), rate, cv, requests, seconds, seed)


class _Sampler:
    def __init__(self, mix: LengthMix) -> None:
        self._parts = mix.parts
        self._bounds = list(accumulate(share for share, _, _ in mix.parts))
        self._shared = tuple(range(mix.prefix // _BLOCK))
        self._fresh = count(len(self._shared))

    def sample(self, rng: Random) -> RequestSpec:
        kind = bisect(self._bounds, rng.random() * self._bounds[-1])
        _, prompt, output = self._parts[min(kind, len(self._parts) - 1)]
        if not self._shared:
            return RequestSpec(prompt, output)
        rest = islice(self._fresh, prompt // _BLOCK - len(self._shared))
        return RequestSpec(prompt, output, (*self._shared, *rest), _SCOPE, float(_BLOCK))


def _tokens(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"mix: {name} is {text!r}; it must be a number of tokens")
    return int(text)


class _Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of `closed:`; `C` may be a list of phases, as in `C=32x60/128x120`."""

    C: str
    ramp: float = 0.0
    hold: float = 0.0
    drain: bool = True
    barrier: float = 0.0
    think: float = 0.0
    n: int = 0


class _Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of `poisson:` and `gamma:`."""

    rate: str
    cv: float = 1.0
    n: int = 0
    hold: float = 0.0


class _Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys after the name of a trace."""

    speed: float = 1.0
    scale: float = 1.0
    block: float = 0.0
    unit: str = ""
    sessions: int = 0
    C: int = 0
    rate: str = ""
    cv: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "speed", "scale", gt=0)
        check_cv("cv", self.cv)
        check_fields(self, "sessions", "C", ge=0)
        if self.C and self.rate:
            raise ConfigError("give C (sessions at once) or rate, not both")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload and its client."""

    workload: OpenLoop | ClosedLoop
    client: ClientConfig


def read_workload_spec(text: str, seed: int = 0) -> WorkloadSpec:
    """Parse `--workload`: one workload, or several open ones joined by `;`."""
    if ";" not in text or Path(text).exists():
        return _read_part(text, seed)
    parts = [_read_part(part.strip(), seed + n) for n, part in enumerate(text.split(";"))]
    client, loops = parts[0].client, []
    for part in parts:
        if not isinstance(part.workload, OpenLoop):
            raise ConfigError("workload: closed: cannot be joined with others; give it alone")
        if part.client not in (client, ClientConfig()):
            raise ConfigError(
                "workload: parts have clients of their own; give pool, timeout, retries and the "
                "like in the first part alone"
            )
        loops.append(part.workload)
    return WorkloadSpec(merged(loops), client)


def _read_part(text: str, seed: int) -> WorkloadSpec:
    """Parse one workload, with client keys such as `pool=100,barging=0.9`.

    `closed:C=128,in=128,out=256,templates=5,ramp=30,hold=120`; `poisson:rate=5,in=512,out=64:256`;
    `gamma:rate=5@0/15@120,cv=2,n=1000`; `mix=0.7:512/128,0.3:4096/256,rate=5,n=1000`; or a trace:
    `trace.jsonl.zst,speed=2,block=16,unit=ms`.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind in ("closed", "poisson", "gamma") and not Path(text).exists():
        values = key_values("workload", rest)
        client = _client(values)
        lengths = _lengths(_take(values, _LENGTHS))
        if kind == "closed":
            return WorkloadSpec(_closed(values, lengths), client)
        if kind == "poisson" and "cv" in values:
            raise ConfigError("workload: gaps of poisson have cv 1; write gamma: for others")
        shape = _convert(values, _Arrivals, (*_LENGTHS, *_CLIENT))
        rate = read_rate(shape.rate)
        return WorkloadSpec(renewal(lengths, rate, shape.cv, shape.n, shape.hold, seed), client)
    if text.startswith("mix=") and not Path(text).exists():
        mix, rest = LengthMix.parse(text)
        values = key_values("workload", rest)
        client = _client(values)
        shape = _convert(values, _Arrivals, _CLIENT)
        loop = mix.arrivals(read_rate(shape.rate), shape.cv, shape.n, shape.hold, seed)
        return WorkloadSpec(loop, client)
    path, _, rest = (text, "", "") if Path(text).exists() else text.partition(",")
    values = key_values("workload", rest)
    client = _client(values)
    if "cv" in values and "rate" not in values:
        raise ConfigError(
            f"workload: cv is {values['cv']!r}, and the times are the trace's; give rate=... too, "
            "or leave cv out"
        )
    options = _convert(values, _Trace, _CLIENT)
    trace = read_trace(path, options.block, options.unit)
    return WorkloadSpec(_open(trace.scaled(options.scale, options.speed), options, seed), client)


def from_trace(trace: Trace, concurrency: int = 0) -> OpenLoop:
    """Return a trace's sessions as jobs, `concurrency` at once; tenants share no blocks."""
    sessions = []
    for session in trace.sessions:
        scope = _scope(f"{session.tenant}/{session.scope}")
        jobs = tuple(
            RequestSpec(
                turn.input, turn.output, turn.blocks, scope, trace.block,
                round(turn.think * SECOND), session.tenant,
            )
            for turn in session.turns
        )  # fmt: skip
        sessions.append(RequestSession(round(session.start * SECOND), jobs))
    return OpenLoop(tuple(sessions), concurrency)


def _open(trace: Trace, options: _Trace, seed: int) -> OpenLoop:
    if options.sessions:
        trace = replace(trace, sessions=trace.sessions[: options.sessions])
    if not options.C and not options.rate:
        trace.check_timed("give rate=REQUESTS_A_SECOND or C=SESSIONS")
    loop = from_trace(trace, options.C)
    rate = read_rate(options.rate) if options.rate else 0.0
    if rate:
        return _moved(loop, rate, options.cv, seed)
    return loop


def _moved(loop: OpenLoop, rate: float | RateSchedule, cv: float, seed: int) -> OpenLoop:
    """Return the sessions with other starts; those after the end of a schedule are left out."""
    schedule = RateSchedule.of(rate)
    times = renewal_times(rate, cv, np.random.default_rng(seed))
    starts = islice(times, len(loop.sessions))
    moved = [
        replace(session, start_ns=at) for session, at in zip(loop.sessions, starts, strict=False)
    ]
    return OpenLoop(tuple(moved), rates=(schedule,))


def _closed(values: dict[str, str], lengths: RequestLengths) -> ClosedLoop:
    shape = _convert(values, _Shape, (*_LENGTHS, *_CLIENT))
    hold_s = 0.0 if "x" in shape.C else _loop_seconds(shape)
    phases = []
    for part in shape.C.split("/"):
        users, times, seconds = part.partition("x")
        try:
            phases.append((int(users), float(seconds) if times else hold_s))
        except ValueError:
            raise ConfigError(
                f"C is {shape.C!r}; write USERS (with hold=SECONDS or n=COUNT), or "
                "USERSxSECONDS/..."
            ) from None
    if shape.hold and "x" in shape.C:
        raise ConfigError("closed: phases have their own seconds; leave hold out")
    return ClosedLoop(
        lengths=lengths, phases=tuple(phases), ramp=shape.ramp, drain=shape.drain,
        barrier=shape.barrier, think=shape.think, requests=shape.n,
    )  # fmt: skip


def _loop_seconds(shape: _Shape) -> float:
    """Return the seconds of a loop without phases; where only `n` is given, that ends it."""
    if shape.hold:
        return shape.hold
    if not shape.n:
        raise ConfigError("closed: say how long, or how many requests: hold=SECONDS or n=COUNT")
    return MAX_SECONDS - min(max(shape.ramp, 0.0), MAX_SECONDS / 2)


def _client(values: dict[str, str]) -> ClientConfig:
    """Take the client's keys; refuse keys of a connection queue without one."""
    given = _take(values, _CLIENT)
    client = _convert(given, ClientConfig)
    for name in _POOLED:
        if name in given and not client.pool:
            raise ConfigError(
                f"workload: {name} is {given[name]!r}, and nobody waits for a connection; give "
                f"pool=CONNECTIONS too, or leave {name} out"
            )
    return client


def _lengths(values: Mapping[str, str]) -> RequestLengths:
    fields: dict[str, object] = {}
    for key, name in (("in", "input"), ("out", "output")):
        if key in values:
            low, colon, high = values[key].partition(":")
            try:
                fields[name] = (int(low), int(high if colon else low))
            except ValueError:
                raise ConfigError(f"{key} is {values[key]!r}; write N or MIN:MAX") from None
    if "templates" in values:
        fields["templates"] = values["templates"]
    return _convert(fields, RequestLengths)


def _scope(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest())


def _take(values: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: values.pop(name) for name in names if name in values}


def _convert(values: Mapping[str, object], kind: type[T], others: tuple[str, ...] = ()) -> T:
    """Convert keys to a `kind`; `others` are keys that are allowed too, and already taken."""
    known = (*kind.__struct_fields__, *others)
    for name in values:
        if name not in known:
            raise ConfigError(
                f"workload: {name} is no key of it; there are: {', '.join(known)}; leave it out"
            )
    return read_struct("workload", kind, values)
