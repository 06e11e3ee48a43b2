"""Workloads: requests in sessions with their own times, or by users in a closed loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import kernel
from pigou.config import ConfigError, check_bounds, check_fields
from pigou.control.lengths import noisy_lengths
from pigou.request import SECOND, BlockHashes
from pigou.sim.arrival_rate import MAX_CV, MAX_SECONDS, MIN_CV, RateSchedule, renewal_times

#: Limit of a request's prompt, and of its output.
MAX_TOKENS = 2**24
#: Scope of templates; those of further parts of a workload have the next ones.
_TEMPLATE_SCOPE = 1
_MAX_USERS = 1_000_000  # limit of a closed loop
#: Scope of prompts that no other shares; scopes of workloads are other numbers.
_UNSHARED_SCOPE = 2**63
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request."""

    prompt_tokens: int  # tokens of the prompt, at least 1
    output_tokens: int  # tokens to generate, at least 1
    block_ids: tuple[int, ...] = ()  # block ids of the prompt; empty if none are shared
    hash_scope: int = 0
    block_tokens: float = 1.0
    think_ns: int = 0  # ns after the session's last request
    tenant: str = ""
    max_tokens: int = 0  # declared limit; 0 declares `output_tokens`
    expected: int = 0  # predicted output tokens; 0 for none
    priority: int = 0  # claimed; lower goes first
    deadline_ns: int = 0  # claimed for the first token, after arrival; 0 for none


@dataclass(frozen=True, slots=True)
class RequestSession:
    """Requests in sequence, the first at `start_ns`."""

    start_ns: int
    requests: Sequence[RequestSpec]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sessions with their own start times, however fast they are served."""

    sessions: Sequence[RequestSession]  # in the order of their starts
    concurrency: int = 0  # sessions at once, where starts do not count; 0 where they do
    rates: tuple[RateSchedule, ...] = ()  # rates of starts by part; empty if not drawn

    def __post_init__(self) -> None:
        if not any(session.requests for session in self.sessions):
            raise ConfigError("workload: it has no requests")
        if self.max_tokens > 2 * MAX_TOKENS:
            raise ConfigError(
                f"workload: a request has {self.max_tokens} tokens; it must be at most "
                f"{2 * MAX_TOKENS}, prompt and output"
            )
        for session in self.sessions:
            if not 0 <= session.start_ns <= MAX_SECONDS * SECOND:
                raise ConfigError(
                    f"workload: a request is sent after {session.start_ns / SECOND:g} s; it must "
                    f"be 0 to {MAX_SECONDS} (a year)"
                )

    @property
    def max_tokens(self) -> int:
        """Maximum tokens, prompt and output, of a request."""
        return max(
            spec.prompt_tokens + spec.output_tokens
            for session in self.sessions
            for spec in session.requests
        )

    @property
    def request_count(self) -> int:
        """How many there are."""
        return sum(len(session.requests) for session in self.sessions)

    @property
    def tenants(self) -> set[str]:
        """Tenants that send something."""
        return {spec.tenant for session in self.sessions for spec in session.requests}


class RequestLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Random requests by the ranges of their lengths."""

    input: tuple[int, int] = (512, 512)  # tokens of a prompt, drawn evenly from (minimum, maximum)
    output: tuple[int, int] = (128, 128)  # output tokens, drawn likewise
    templates: int = 0  # number of different prompts; 0 makes all prompts different

    def __post_init__(self) -> None:
        for name, (low, high) in (("in", self.input), ("out", self.output)):
            if not 1 <= low <= high <= MAX_TOKENS:
                raise ConfigError(
                    f"{name} is {low}:{high}; write N or MIN:MAX, from 1 to {MAX_TOKENS}"
                )
        check_bounds("templates", self.templates, ge=0)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens, prompt and output, of a request."""
        return self.input[1] + self.output[1]

    def sample(self, rng: Random) -> RequestSpec:
        """Return the next request."""
        input_, output = rng.randint(*self.input), rng.randint(*self.output)
        if not self.templates:
            return RequestSpec(input_, output)
        # A template has its own length, which the same generator gives it every time.
        template = rng.randrange(self.templates)
        if self.input[0] != self.input[1]:
            input_ = Random(template).randint(*self.input)
        return RequestSpec(
            input_, output, (template,), hash_scope=_TEMPLATE_SCOPE, block_tokens=float(input_)
        )


class ClosedLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Users who each send their next request when the one before has ended."""

    lengths: RequestLengths
    phases: tuple[tuple[int, float], ...]  # (users, seconds) one after another
    ramp: float = 0.0  # seconds over which the first phase's users start
    drain: bool = True  # wait for requests under way at the end; else they do not count
    barrier: float = 0.0  # seconds of a chunk, after which all wait for all; 0 for none
    think: float = 0.0  # seconds between two requests of a user
    requests: int = 0  # maximum requests; 0 for no limit

    def __post_init__(self) -> None:
        for users, seconds in self.phases:
            if users > _MAX_USERS:
                raise ConfigError(f"C is {users:,}; give at most {_MAX_USERS:,} users")
            if users < 1 or not 0.0 < seconds < float("inf"):
                raise ConfigError(
                    f"C is {users} for {seconds} s; it takes 1 user and more, and some seconds"
                )
        if not self.phases:
            raise ConfigError("closed: no phase is given; write C=USERS,hold=SECONDS")
        check_fields(
            self, "ramp", "barrier", "think", "seconds", ge=0, le=MAX_SECONDS, unit=" (a year)",
        )  # fmt: skip
        check_bounds("n", self.requests, ge=0)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens, prompt and output, of a request."""
        return self.lengths.max_tokens

    @property
    def request_count(self) -> None:
        """Nobody knows how many there will be."""
        return None

    @property
    def tenants(self) -> set[str]:
        """One, without a name."""
        return {""}

    @property
    def seconds(self) -> float:
        """Until no more is sent."""
        return self.ramp + sum(seconds for _, seconds in self.phases)


class RequestSampler(Protocol):
    """Draws requests, one after another."""

    def sample(self, rng: Random) -> RequestSpec:
        """Return the next request."""
        ...


def renewal(
    lengths: RequestSampler, rate: float | RateSchedule, cv: float, count: int, seconds: float,
    seed: int,
) -> OpenLoop:  # fmt: skip
    """Return requests with Gamma gaps (`renewal_times`), up to `count` or `seconds`."""
    known = isinstance(rate, RateSchedule) or 1 / MAX_SECONDS < rate < float("inf")
    if not known or (cv and not MIN_CV <= cv <= MAX_CV):
        raise ConfigError(
            f"rate is {rate} and cv {cv}; rate must be above 0 (one in a year), cv 0 or "
            f"{MIN_CV:g} to {MAX_CV:g}"
        )
    schedule = RateSchedule.of(rate)
    finite = count or seconds or schedule.is_finite
    if count < 0 or not 0.0 <= seconds <= MAX_SECONDS or not finite:
        raise ConfigError(
            f"n is {count} and hold {seconds} s; say how many requests: n=COUNT or hold=SECONDS, "
            f"up to {MAX_SECONDS} (a year)"
        )
    starts = renewal_times(rate, cv, np.random.default_rng(seed))
    rng = Random(seed)
    sessions: list[RequestSession] = []
    for start in starts:
        if (count and len(sessions) == count) or (seconds and start >= seconds * SECOND):
            break
        sessions.append(RequestSession(start, (lengths.sample(rng),)))
    return OpenLoop(tuple(sessions), rates=(schedule,))


def merged(loops: Sequence[OpenLoop]) -> OpenLoop:
    """Return all sessions of several loops at their own starts; their templates differ."""
    if any(loop.concurrency for loop in loops):
        raise ConfigError("workload: C has no start times that could be joined; leave it out")
    sessions = [
        (session.start_ns, part, number, _scoped(session, part))
        for part, loop in enumerate(loops)
        for number, session in enumerate(loop.sessions)
    ]
    sessions.sort(key=lambda entry: entry[:3])
    known = all(loop.rates for loop in loops)
    rates = tuple(rate for loop in loops for rate in loop.rates) if known else ()
    return OpenLoop(tuple(session for *_, session in sessions), rates=rates)


def with_declared_limits(loop: OpenLoop, tau: float | None, seed: int) -> OpenLoop:
    """Return requests that all declare the longest output, so that none gives its own away.

    With `tau`, each has a prediction of that rank correlation (`noisy_lengths`).
    """
    outputs = [spec.output_tokens for session in loop.sessions for spec in session.requests]
    drawn = iter([0] * len(outputs) if tau is None else noisy_lengths(outputs, tau, seed))
    max_output = max(outputs)
    sessions = tuple(
        replace(session, requests=tuple(
            replace(spec, max_tokens=spec.max_tokens or max_output, expected=next(drawn))
            for spec in session.requests
        ))
        for session in loop.sessions
    )  # fmt: skip
    return replace(loop, sessions=sessions)


def _scoped(session: RequestSession, part: int) -> RequestSession:
    """Return a session whose templates are those of a part; the first keeps its own."""
    if not part:
        return session
    requests = tuple(
        replace(spec, hash_scope=_TEMPLATE_SCOPE + part)
        if spec.hash_scope == _TEMPLATE_SCOPE and spec.block_ids
        else spec
        for spec in session.requests
    )
    return RequestSession(session.start_ns, requests)


def block_hashes(spec: RequestSpec, number: int, size: int) -> BlockHashes:
    """Return hashes of a prompt's full blocks and positions, (prompt_tokens // size, 2).

    Without ids, `number` stands for the content.
    """
    hashes = np.empty((spec.prompt_tokens // size, 2), dtype=np.uint64)
    if spec.block_ids:
        ids = np.array(spec.block_ids, dtype=np.int64).view(np.uint64)
        _chained(ids, np.uint64(spec.hash_scope & _MASK), spec.block_tokens, size, hashes)
    else:
        _chained(np.array([number], np.uint64), np.uint64(_UNSHARED_SCOPE), 1.0, size, hashes)
    return hashes


@kernel
def _chained(
    ids: NDArray[np.uint64], scope: np.uint64, block: float, size: int, hashes: NDArray[np.uint64]
) -> None:
    # SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
    one, two = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
    golden, other = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
    a, b, c = np.uint64(30), np.uint64(27), np.uint64(31)
    state = scope * golden + golden
    known = -1
    for i in range(len(hashes)):
        want = min(int(((i + 1) * size - 1) / block), len(ids) - 1)
        while known < want:
            known += 1
            state = state ^ (ids[known] + other)
            state = (state ^ (state >> a)) * one
            state = (state ^ (state >> b)) * two
            state = (state ^ (state >> c)) + golden
        for half in range(2):
            word = state + np.uint64(i + 1) * (golden if half else other)
            word = (word ^ (word >> a)) * one
            word = (word ^ (word >> b)) * two
            word = word ^ (word >> c)
            hashes[i, half] = word if word else np.uint64(1)
