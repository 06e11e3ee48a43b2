"""A prefill and a decode pool: prompts that would wait too long prefill on decode workers.

| symbol | meaning |
|---|---|
| Q | seconds until a prefill worker is free for a prompt |
| s, x | prefill seconds on a prefill worker, and of the KV transfer |
| z | seconds a prompt takes from a decode worker's streams |
| c, d | workers of the prefill and of the decode pool |
| n, f | streams of a decode worker, and seconds of its step |
| n' | requests on the decode worker with the fewest, waiting prompts included |
| q | seconds of prompts waiting on a decode worker (M/G/d) |
| m | mean TTFT |
| l, l' | prompts a second per prefill worker (lambda / c), per decode worker |
| tau | Q above which a prompt prefills locally |
| phi | share of local prefills: P(Q > tau) |

The router takes the cheaper way (`pigou.control.routing.toll.terms`, default weights):

    remote(Q) = T + T^2 / m + min(l s (Q + s / 2), e) (1 + (Q + s) / m),   T = Q + s + x
    local     = T' + T'^2 / m + n' z + l' z (q + z / 2) (1 + (q + z) / m),   T' = q + 1.5 f + z

where e = q + (1 + n') z - x - s - max(0, Q - 1 / l) is the next (mean) prompt's loss by local
prefill. tau of a class solves remote(Q) = local, at four pairs of n' and q, which rise together.

Q is a diffusion with state-dependent drift: prompts with tau > Q come, lambda(Q) a second, load
rho(Q). With v = s (ca2 + cs2) / (2 c), its density satisfies

    g'(Q) = -g(Q) (1 - rho(Q)) / v(Q),   g(0) = P(Q = 0) B / (1 - B) / v(0)

(Erlang's B): M/G/c without tau, and a local share of 1 - 1 / rho in overload. phi, m, n and local
prefill time depend on one another, and are solved together.

Local prefills cluster while Q is near tau. Rejected work of a queue between 0 and tau has variance
D times its mean: D = 2 v / |1 - rho| far from tau, 2 tau / 3 at rho = 1 (Williams, "Asymptotic
variance parameters for the boundary local times of reflected Brownian motion on a compact
interval", 1992), joined by D = 1 / (|1 - rho| / 2 v + 3 / 2 tau). A stream of life t sees 1 - (1 -
e^(-t / u)) u / t of it, with u = D^2 / (4 v) the duration of a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pigou.games.queueing import erlang_b, erlang_c
from pigou.objectives import Slo
from pigou.performance.pool_load import PoolLoad, PromptWork, quantile_s

#: Grid points of Q.
_POINTS = 64
#: Fixed-point rounds for the shares, and their damping.
_ROUNDS, _DAMPING = 24, 0.5
#: Convergence: change of the decode workers' busy share in the last round.
_CLOSE = 2e-3
#: Bisections of a rate.
_RATE_HALVINGS = 6
#: Largest local prefill share of a decode worker's time while solving.
_MAX_BUSY = 0.9
#: Factor on the damping where rounds oscillate.
_SLOWER = 0.7
#: Streams by which the emptiest decode worker is below the mean, and deviations at which tau is
#: computed.
_FEWER, _LEVELS = 1.3, np.array([-1.15, -0.32, 0.32, 1.15])
#: Waits behind local prefills over their mean, at these deviations.
_QUEUES = np.array([0.0, 0.3, 0.9, 2.8])
#: Midpoints of the thirds of an exponential wait's distribution.
_THIRDS = np.array([1.0, 3.0, 5.0]) / 6.0
#: Tau of a class that always prefills locally.
_NEVER = -1.0


@dataclass(frozen=True)
class SplitState:
    """State of a prefill and a decode pool at a rate."""

    rate_rps: float  # requests a second
    waits_s: np.ndarray  # points of Q; shape (points,)
    below: np.ndarray  # P(Q <= point), (points,)
    until_s: np.ndarray  # partial means of Q up to each point; at infinity its mean
    limits_s: np.ndarray  # tau per level of streams and class; shape (levels, classes)
    local: np.ndarray  # share of local prefills, (classes,)
    work: PromptWork
    services_s: np.ndarray  # local TTFT of each class without waits
    joining_s: float  # seconds that remote first tokens wait for a decode step
    mean_s: float  # mean TTFT
    busy: float = 0.0  # probability that all decode workers prefill
    delay_s: float = 0.0  # mean wait behind local prefills then


class SplitLoad:
    """A prefill and a decode pool under a mix of lengths."""

    def __init__(
        self, prefill: PoolLoad, decode: PoolLoad, prefill_workers: int, decode_workers: int
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._servers, self._decoders = prefill_workers, decode_workers
        self._last: SplitState | None = None

    def state(self, rate_rps: float) -> SplitState | None:
        """Return the pools' state at a rate; None in overload."""
        if self._last is None or self._last.rate_rps != rate_rps:
            state = self._solve(rate_rps)
            if state is None:
                return None
            self._last = state
        return self._last

    def _solve(self, rate_rps: float) -> SplitState | None:
        first, second, shares = self._prefill, self._decode, self._prefill.classes.shares
        served, taken = first.prompt_s, second.stalls_s
        fixed = first.overheads_s
        mean_s, local = float(shares @ (served + fixed)), np.zeros(len(shares))
        if self._last is not None:
            mean_s, local = self._last.mean_s, self._last.local
        damping, change, overloaded = _DAMPING, 0.0, False
        for _ in range(_ROUNDS):
            work = self._work(rate_rps, local)
            streams = second.streams(rate_rps, self._decoders, work)
            overloaded = math.isinf(streams)
            streams = min(streams, second.max_streams)
            step = second.step_s(streams)
            limits = self._limits(rate_rps, mean_s, streams, work, local)
            points, below, until = self._wait_distribution(rate_rps, limits)
            joining = second.joining_of(streams)
            services = second.overheads_s + second.mixed_service_s(streams)
            wanted = 1.0 - _at(limits, points, below)
            remote = _at(limits, points, until) + (1.0 - wanted) * (served + fixed + joining)
            mean_s += damping * (float(shares @ (remote + wanted * services)) - mean_s)
            previous, change = change, float(shares @ ((wanted - local) * taken))
            local = local + damping * (wanted - local)
            if abs(change) * rate_rps < _CLOSE * self._decoders:
                break
            damping *= _SLOWER if previous * change < 0.0 else 1.0
        if overloaded:
            return None
        return self._described(
            SplitState(
                rate_rps, points, below, until, limits, wanted, self._work(rate_rps, local),
                services, joining, mean_s,
            ),
            step,
        )  # fmt: skip

    def _described(self, state: SplitState, step_s: float) -> SplitState:
        """Return the state with the effect of prompt clusters on decode workers."""
        first, second, work = self._prefill, self._decode, state.work
        weights = first.classes.shares * state.local
        total = float(weights.sum())
        if work.busy <= 0.0 or total <= 0.0:
            return state
        s = first.prompt_s
        mean, scv = first.classes.mean_and_scv(s)
        v = mean * (first.arrival_scv + scv) / (2.0 * self._servers)
        rho = state.rate_rps * mean / self._servers
        done = weights * s
        tau = max(float(done @ state.limits_s.mean(axis=0) / done.sum()), 1e-9)
        spread = 1.0 / (abs(1.0 - rho) / (2.0 * v) + 1.5 / tau)
        lasts = spread**2 / (4.0 * v)
        # Seconds of the prefill pool's Q per decode worker.
        spread *= self._servers * float(weights @ second.stalls_s / done.sum()) / self._decoders
        lives = second.classes.outputs * step_s / (1.0 - work.busy / self._decoders)
        seen = 1.0 - (1.0 - np.exp(-lives / lasts)) * lasts / lives
        own = work.square_s2 / work.mean_s
        used = self._used(state.rate_rps, weights, state.services_s - second.overheads_s)
        return replace(
            state,
            work=replace(work, cluster_s2=work.mean_s * spread * seen),
            busy=erlang_c(self._decoders, used),
            delay_s=0.5 * (own / self._decoders + spread) / (1.0 - used),
        )

    def _used(self, rate_rps: float, weights: np.ndarray, services_s: np.ndarray) -> float:
        return min(rate_rps / self._decoders * float(weights @ services_s), _MAX_BUSY)

    def _work(self, rate_rps: float, local: np.ndarray) -> PromptWork:
        weights = self._prefill.classes.shares * local
        total = float(weights.sum())
        if total <= 0.0:
            return PromptWork()
        taken = self._decode.stalls_s
        mean = float(weights @ taken) / total
        rate = min(rate_rps * total, _MAX_BUSY * self._decoders / mean)
        return PromptWork(rate, mean, float(weights @ taken**2) / total)

    def _limits(
        self, rate_rps: float, mean_s: float, streams: float, work: PromptWork, local: np.ndarray
    ) -> np.ndarray:
        first, second, shares = self._prefill, self._decode, self._prefill.classes.shares
        s, z = first.prompt_s, second.stalls_s
        x = first.overheads_s + second.joining_of(streams)
        busy = self._used(rate_rps, shares * local, second.mixed_service_s(streams))
        queued_s = erlang_c(self._decoders, busy) * 0.5 * work.square_s2
        queued_s /= max(work.mean_s, 1e-12) * self._decoders * (1.0 - busy)
        queue_s = (queued_s * _QUEUES)[:, None]
        local_ttft_s = queue_s + 1.5 * second.step_s(streams) + z
        spread = math.sqrt(streams / self._decoders + 1.0)
        given = streams + rate_rps * mean_s / self._decoders
        fewer = _FEWER if self._decoders > 1 else 0.0
        fewest = np.maximum(given - fewer + spread * _LEVELS, 0.0)[:, None]
        delays_s = work.rate_rps / self._decoders * z * (queue_s + 0.5 * z)
        delays_s = delays_s * (1.0 + (queue_s + z) / mean_s)
        here_s = local_ttft_s + local_ttft_s**2 / mean_s + fewest * z + delays_s
        # Without tolls, remote(Q) = local at T = m (sqrt(1 + 4 local / m) - 1) / 2.
        latest = 0.5 * mean_s * (np.sqrt(1.0 + 4.0 * here_s / mean_s) - 1.0) - s - x
        q = np.linspace(0.0, max(float(latest.max()), 1e-6), _POINTS)[:, None, None]
        arrivals = rate_rps / self._servers
        around = queue_s + ((1.0 + fewest) * z - x - s) @ shares[:, None]
        lost = np.minimum(
            arrivals * s * (q + 0.5 * s),
            np.maximum(around - np.maximum(q - 1.0 / arrivals, 0.0), 0.0),
        )
        total = q + s + x
        remote = total + total**2 / mean_s + lost * (1.0 + (q + s) / mean_s)
        above = (remote < here_s).sum(axis=0)
        at = np.clip(above, 1, _POINTS - 1)
        low, high = (np.take_along_axis(remote, i[None], axis=0)[0] for i in (at - 1, at))
        part = np.clip((here_s - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
        limits: np.ndarray = np.where(above > 0, (at - 1 + part) * q[1], _NEVER)
        return limits

    def _wait_distribution(
        self, rate_rps: float, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return points of Q, their cumulative probabilities, and partial means of Q."""
        first, servers = self._prefill, self._servers
        highest = max(float(limits.max()), 1e-6)
        points = np.linspace(0.0, highest, _POINTS)
        middles = 0.5 * (points[1:] + points[:-1])
        shares = first.classes.shares
        joining_share = (limits > middles[:, None, None]).mean(axis=1)
        weights = np.maximum(joining_share, 1e-9) * shares
        share = weights.sum(axis=1)
        mean = weights @ first.prompt_s / share
        scv = weights @ first.prompt_s**2 / share / mean**2 - 1.0
        arrival_scv = 1.0 + share * (first.arrival_scv - 1.0)
        v = mean * (arrival_scv + scv) / (2.0 * servers)
        rho = rate_rps * share * mean / servers
        fall = (1.0 - rho) / v
        width = points[1]
        logs = np.concatenate(([0.0], -np.cumsum(fall * width)))
        blocked = erlang_b(servers, rate_rps * float(weights[0] @ first.prompt_s))
        start = blocked / max(1.0 - blocked, 1e-12) / v[0]
        shift = max(float(logs.max()), 0.0)
        density = start * np.exp(logs - shift)
        safe = np.where(np.abs(fall * width) < 1e-6, 1.0, fall)
        masses = np.where(safe == fall, (density[:-1] - density[1:]) / safe, density[:-1] * width)
        above = density[-1] * v[-1]  # no prompts come: it falls by 1 a second
        sums = np.concatenate(([math.exp(-shift)], masses)).cumsum()
        total = sums[-1] + above
        until = np.concatenate(([0.0], (masses * middles).cumsum()))
        return points, sums / total, until / total

    # --- figures --------------------------------------------------------------------------------

    def ttft_share(self, state: SplitState, ttft_s: float) -> float:
        """Return the share of requests with TTFT within `ttft_s`."""
        first = self._prefill
        left = ttft_s - state.joining_s - first.overheads_s - first.prompt_s
        left = left - (1.0 - state.below[0]) * first.filling_s
        delays_s = -state.delay_s * np.log1p(-_THIRDS)
        delayed = sum(self._within(state, left - delay_s) for delay_s in delays_s) / len(delays_s)
        remote = (1.0 - state.busy) * self._within(state, left) + state.busy * delayed
        left = ttft_s - state.services_s
        waiting = state.busy * np.exp(-np.maximum(left, 0.0) / max(state.delay_s, 1e-9))
        local = state.local * np.where(left >= 0.0, 1.0 - waiting, 0.0)
        return float(first.classes.shares @ (remote + local))

    def _within(self, state: SplitState, left_s: np.ndarray) -> np.ndarray:
        begun = _at(np.minimum(left_s, state.limits_s), state.waits_s, state.below)
        return np.where(left_s >= 0.0, begun, 0.0)

    def itl_share(self, state: SplitState, itl_s: float) -> float:
        """Return the share of requests whose mean ITL is within `itl_s`."""
        return self._decode.itl_share(state.rate_rps, self._decoders, itl_s, state.work)

    def latencies(self, rate_rps: float, share: float) -> tuple[float, float, float]:
        """Return quantiles of TTFT and ITL, and mean end-to-end seconds."""
        state = self.state(rate_rps)
        if state is None:
            return math.inf, math.inf, math.inf
        first, second = self._prefill, self._decode
        ttft_s = quantile_s(lambda t: self.ttft_share(state, t), share)
        itl_s = second.itl_quantile_s(rate_rps, self._decoders, share, state.work)
        queue_s = _at(state.limits_s, state.waits_s, state.until_s)
        taken = first.prompt_s + first.overheads_s + state.joining_s
        taken = taken + (1.0 - state.below[0]) * first.filling_s
        mean = queue_s + (1.0 - state.local) * taken + state.local * state.services_s
        mean = mean + state.busy * state.delay_s
        e2e_s = float(first.classes.shares @ mean)
        e2e_s += (second.classes.osl - 1.0) * second.mean_itl_s(
            rate_rps, self._decoders, state.work
        )
        return ttft_s, itl_s, e2e_s

    @property
    def highest_rps(self) -> float:
        """An upper bound of the prompt rate of both pools."""
        shares = self._prefill.classes.shares
        highest = self._servers / float(shares @ self._prefill.prompt_s)
        stall_s = float(shares @ self._decode.stalls_s)
        return highest + _MAX_BUSY * self._decoders / stall_s if stall_s > 0.0 else math.inf

    def limit_rps(
        self, slo: Slo, share: float, near: float, high: float, floor: float = 0.0
    ) -> float:
        """Return the most requests a second with `share` inside, at most `high`, `near` first."""

        def inside(rate_rps: float) -> bool:
            state = self.state(rate_rps)
            return (
                state is not None
                and self.itl_share(state, slo.itl_s) >= share
                and self.ttft_share(state, slo.ttft_s) >= share
            )

        low, middle = 0.0, near or 0.5 * high
        if floor > near:
            if not inside(floor):
                return near
            low, middle = floor, 0.5 * (floor + high)
        for _ in range(_RATE_HALVINGS):
            low, high = (middle, high) if inside(middle) else (low, middle)
            middle = 0.5 * (low + high)
        return low


def _at(limits_s: np.ndarray, points_s: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values at each class's tau, 0 below 0; mean over the levels."""
    at = np.where(limits_s < 0.0, 0.0, np.interp(limits_s, points_s, values))
    mean: np.ndarray = at.mean(axis=0)
    return mean
