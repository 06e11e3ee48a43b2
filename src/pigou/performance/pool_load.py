"""TTFT and ITL of a pool under a mix of request lengths, and the load it holds.

| symbol | meaning |
|---|---|
| c | workers |
| lambda | requests a second |
| s_i, w_i, o_i | prefill seconds of class i on one worker, its share, and its output tokens |
| n | streams of one worker |
| ITL(n) | seconds of a decode step of n streams |
| z | seconds a prompt takes from its worker's streams |
| N | mean prompts per worker in a time |
| ca2, cv2 | squared variation of interarrival times, and of prefill seconds |

One queue for c servers: with Erlang's C and W = (1 + cv2) / 2 x the wait of M/M/c (Lee and
Longton),

    P(TTFT <= t) = sum of w_i (1 - C e^(-(t - s_i) C / W)) over classes with s_i < t.

Streams hold lambda o ITL(n) / c of a worker (Little); a class holds context by its tokens. On a
mixed worker a prompt of k chunks takes z_i = s_i - k ITL(1) from the streams, and itself s_i + k
(ITL(n) - ITL(1)). With rho = lambda E[z] / c tokens take ITL(n) / (1 - rho). A request's mean gap
is inverse Gaussian: its life ends when work with drift 1 - rho reaches o_i ITL(n). Its variance is
that of prompts in its life (`PromptWork`) over (o_i (1 - rho))^2, plus that of the neighbours'
number, (1 + ca2) / 2 times that of Poisson arrivals. With probability C another prompt fills up the
last chunk. Streams beyond the batch wait for a slot and count as outside.

A worker's prefill seconds vary by N Var[z] + Var[N] E[z]^2, by random or by equal splits:

    Var[N] = min(N (1 + (ca2 - 1) / c), N ca2 / c + 1 / 6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr, ndtr

from pigou.games.queueing import erlang_c
from pigou.objectives import Slo
from pigou.performance.model import AVERAGING, FULL, PerformanceModel
from pigou.performance.speed import crossing, doubling, halved, interpolate
from pigou.request import Role

#: Steps before a prompt begins: half of the current one, and one planned ahead.
_ALIGNMENT = 1.5
#: Steps before a request has its token on a decode worker, as simulated: the current one, those
#: planned ahead, and its own.
_JOINING = 4.0
#: Bisections of a rate.
_RATE_HALVINGS = 14
#: Least tokens of a stream in the table of steps.
_MIN_CONTEXT = 64
#: Variance of one server's part when an exact number is split in turn.
_IN_TURN = 1.0 / 6.0


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompts computed beside a pool's streams."""

    rate_rps: float = 0.0  # a second
    mean_s: float = 0.0  # seconds one takes from its worker's streams
    square_s2: float = 0.0  # mean of their squares
    arrival_scv: float = 1.0  # variance of interarrival times over the squared mean

    @property
    def busy(self) -> float:
        """Workers' worth of prefill time."""
        return self.rate_rps * self.mean_s

    def variance_s2(self, seconds: np.ndarray, workers: int) -> np.ndarray:
        """Return the variance of one worker's prefill time in `seconds`."""
        count = self.rate_rps * seconds / workers
        free = 1.0 + (self.arrival_scv - 1.0) / workers
        counts = np.minimum(count * free, count * self.arrival_scv / workers + _IN_TURN)
        unlike = self.square_s2 - self.mean_s**2
        variance: np.ndarray = count * unlike + counts * self.mean_s**2
        return variance


class LengthClasses:
    """Requests by length class; arrays have shape (classes,)."""

    def __init__(
        self, prompts: np.ndarray, computed: np.ndarray, outputs: np.ndarray, shares: np.ndarray
    ) -> None:
        self.prompts, self.computed, self.outputs = prompts, computed, outputs  # tokens
        self.shares = shares  # shares of the requests; they add up to 1
        self.osl = float(shares @ outputs)  # mean output tokens
        held = outputs * (prompts + 0.5 * outputs)
        self.context = float(shares @ held) / self.osl  # mean tokens that a stream holds

    def mean_and_scv(self, values: np.ndarray) -> tuple[float, float]:
        """Return a value's mean over requests, and its variance over the squared mean."""
        mean = float(self.shares @ values)
        return mean, float(self.shares @ values**2) / mean**2 - 1.0


_NO_PROMPTS = PromptWork()


class PoolLoad:
    """A pool of equal workers of one role under a mix of lengths."""

    def __init__(
        self, performance: PerformanceModel, role: Role, classes: LengthClasses,
        arrival_scv: float = 1.0,
    ) -> None:  # fmt: skip
        self._performance, self._role, self.classes = performance, role, classes
        self.arrival_scv = arrival_scv  # variance of gaps over their squared mean
        # prefill of each class on one worker, (classes,)
        self.prompt_s = self.prefill_s(classes.computed, classes.prompts)
        self.overheads_s = self.transfers_s(classes.prompts)
        self.chunks = np.ceil(classes.computed / performance.chunk_tokens)
        self._mean_s = float(classes.shares @ self.prompt_s)
        self._filling_s = self._fillings_s()
        counts = doubling(1, performance.max_seqs)
        itl_s = performance.decode.itl_s
        self._steps = [(float(n), itl_s(float(n), classes.context)) for n in counts]
        # seconds each class's prompt takes from its worker's streams
        self.stalls_s = np.maximum(self.prompt_s - self.chunks * self.step_s(1.0), 0.0)
        self._stall = (
            float(classes.shares @ self.stalls_s), float(classes.shares @ self.stalls_s**2)
        )  # fmt: skip
        self._last_streams: tuple[tuple[float, int, float], float] = ((0.0, 0, 0.0), 0.0)
        room = performance.kv_tokens / classes.context
        self.max_streams = max(min(float(performance.max_seqs), room), 1.0)

    def _fillings_s(self) -> np.ndarray:
        chunk, computed = self._performance.chunk_tokens, self.classes.computed
        room = np.where(computed % chunk > 0, chunk - computed % chunk, 0.0)
        mean = float(self.classes.shares @ computed)
        return np.minimum(room, mean) * (self._mean_s / mean)

    @property
    def kv_tokens(self) -> float:
        """KV tokens of a worker."""
        return self._performance.kv_tokens

    @cached_property
    def step_table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Streams, tokens of each, and seconds of a step, (tokens, streams)."""
        streams = doubling(1, max(self._performance.max_seqs, 2))
        contexts = doubling(_MIN_CONTEXT, 2 * int(self.classes.prompts.max()) + _MIN_CONTEXT)
        itl_s = self._performance.decode.itl_s
        seconds = [[itl_s(float(n), float(context)) for n in streams] for context in contexts]
        return np.array(streams, float), np.array(contexts, float), np.array(seconds)

    def transfers_s(self, prompts: np.ndarray) -> np.ndarray:
        """Return TTFT of prompts besides queue and prefill."""
        model = self._performance
        overheads_s: np.ndarray = model.overhead_s + model.transfer_token_s * prompts
        return overheads_s

    def prefill_s(self, computed: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Return prefill seconds of prompts' uncached tokens on one worker."""
        speed = self._performance.prefill
        known: dict[tuple[float, float], float] = {}
        pairs = list(zip(computed.tolist(), prompts.tolist(), strict=True))
        for tokens, prompt in pairs:
            if (tokens, prompt) not in known:
                cached_s = speed.seconds(prompt - tokens, prompt)
                after_cached_s = speed.seconds(prompt, prompt) - cached_s
                known[tokens, prompt] = max(speed.seconds(tokens, prompt), after_cached_s)
        return np.array([known[pair] for pair in pairs])

    # --- decode ---------------------------------------------------------------------------------

    def step_s(self, streams: float) -> float:
        """Return the seconds of a decode step of `streams` streams."""
        return interpolate(self._steps, max(streams, 1.0))

    def streams(self, rate_rps: float, workers: int) -> float:
        """Return mean streams per worker; infinity in overload."""
        rho = self._prompts(rate_rps).busy / workers
        key = (rate_rps, workers, rho)
        if self._last_streams[0] != key:
            self._last_streams = (key, self._solve_streams(*key))
        return self._last_streams[1]

    def _solve_streams(self, rate_rps: float, workers: int, rho: float) -> float:
        if rho >= FULL:
            return math.inf
        demand = rate_rps * self.classes.osl / (workers * (1.0 - rho))
        if self.max_streams < demand * self.step_s(self.max_streams):
            return math.inf
        return crossing(lambda n: n - demand * self.step_s(n), self.max_streams)

    def joining_s(self, rate_rps: float, workers: int) -> float:
        """Return the seconds that a decode pool's load delays first tokens."""
        streams = self.streams(rate_rps, workers)
        if self._role is not Role.DECODE or math.isinf(streams):
            return 0.0
        return _JOINING * self.step_s(streams) - self.step_s(1.0)

    def _mixed_service_s(self, streams: float) -> np.ndarray:
        """Return prefill seconds of each class on a worker with `streams` streams."""
        step_s = self.step_s(streams)
        more_s = self.chunks * (step_s - self.step_s(1.0))
        return self.prompt_s + more_s + _ALIGNMENT * (1.0 - math.exp(-streams)) * step_s

    def _prompts(self, rate_rps: float) -> PromptWork:
        if self._role is Role.BOTH:
            return PromptWork(rate_rps, *self._stall, self.arrival_scv)
        return _NO_PROMPTS

    def _itl(self, rate_rps: float, workers: int) -> tuple[float, np.ndarray, float]:
        """Return mean ITL (infinity in overload), its deviation by class, share with a slot."""
        streams = self.streams(rate_rps, workers)
        if math.isinf(streams):
            return math.inf, np.zeros(len(self.classes.outputs)), 0.0
        work = self._prompts(rate_rps)
        slack = 1.0 - work.busy / workers
        step = self.step_s(streams)
        rise = (self.step_s(1.001 * streams) - self.step_s(0.999 * streams)) / (0.002 * step)
        left = max(1.0 - rise, 0.05)
        peak = 0.5 * (1.0 + self.arrival_scv)
        deviation = math.sqrt(max(streams, 1e-9) * peak / (workers * left))
        slots = float(ndtr((self.max_streams - streams) / deviation))
        neighbours = (self.step_s(streams + AVERAGING * deviation) - step) / slack
        mean = step / slack
        outputs = self.classes.outputs
        variances = work.variance_s2(outputs * mean, workers) / (outputs * slack) ** 2
        return mean, np.sqrt(neighbours**2 + variances), slots

    def itl_share(self, rate_rps: float, workers: int, itl_s: float) -> float:
        """Return the share of requests whose mean ITL is within `itl_s`."""
        if not self._role.decodes:
            return 1.0
        mean, deviations, slots = self._itl(rate_rps, workers)
        if math.isinf(mean):
            return 0.0
        inside = _inverse_gaussian(itl_s, mean, np.maximum(deviations, 1e-3 * mean))
        return slots * float(self.classes.shares @ inside)

    # --- prefill --------------------------------------------------------------------------------

    def _services(self, rate_rps: float, workers: int) -> np.ndarray:
        if self._role is Role.PREFILL:
            return self.prompt_s
        streams = self.streams(rate_rps, workers)
        if math.isinf(streams):
            return np.full(len(self.prompt_s), math.inf)
        return self._mixed_service_s(streams)

    def _wait(self, rate_rps: float, workers: int, services: np.ndarray) -> tuple[float, float]:
        """Return the probability of a wait, and its mean given one; infinity in overload."""
        mean, scv = self.classes.mean_and_scv(services)
        rho = rate_rps * mean / workers
        if not rho < FULL:
            return 1.0, math.inf
        variance = 0.5 * (self.arrival_scv + scv)
        return erlang_c(workers, rho), variance * mean / (workers * (1.0 - rho))

    def ttft_share(
        self, rate_rps: float, workers: int, ttft_s: float, more_s: float = 0.0
    ) -> float:
        """Return the share of prompts with TTFT within `ttft_s`, after `more_s` elsewhere."""
        if not self._role.prefills:
            return 1.0
        services = self._services(rate_rps, workers)
        probability, wait_s = self._wait(rate_rps, workers, services)
        if math.isinf(wait_s):
            return 0.0
        left = ttft_s - more_s - self.overheads_s - services - probability * self._filling_s
        inside = np.where(left > 0, 1.0 - probability * np.exp(-np.maximum(left, 0) / wait_s), 0.0)
        return float(self.classes.shares @ inside)

    def limit_rps(self, workers: int, slo: Slo, share: float, more_s: float = 0.0) -> float:
        """Return the most requests a second with `share` inside; `more_s` of TTFT is elsewhere."""

        def inside(rate_rps: float) -> bool:
            return (
                self.itl_share(rate_rps, workers, slo.itl_s) >= share
                and self.ttft_share(rate_rps, workers, slo.ttft_s, more_s) >= share
            )

        if workers < 1 or not inside(1e-9):
            return 0.0
        return halved(0.0, self.highest_rps(workers), inside, _RATE_HALVINGS)[0]

    def highest_rps(self, workers: int) -> float:
        """Return the prompts and the streams that the workers can take, whatever the wait."""
        rates = []
        if self._role.prefills:
            rates.append(workers / self._mean_s)
        if self._role.decodes:
            stream_rps = self.max_streams / (self.classes.osl * self.step_s(self.max_streams))
            rates.append(workers * stream_rps)
        return min(rates)


def _inverse_gaussian(x: float, mean: float, deviation: np.ndarray) -> np.ndarray:
    if x <= 0.0:
        return np.zeros(len(deviation))
    shape = mean**3 / deviation**2
    root = np.sqrt(shape / x)
    above = np.exp(2.0 * shape / mean + log_ndtr(-root * (x / mean + 1.0)))
    below: np.ndarray = ndtr(root * (x / mean - 1.0)) + above
    return below
