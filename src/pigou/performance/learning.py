"""Speeds of a pool, learned online, and corrections of a measured model by cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from scipy.optimize import nnls

from pigou.games import Floats
from pigou.games.latency import LatencyLaw
from pigou.objectives import ProvisioningTimes
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

#: Factors outside these bounds are metric faults.
MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
#: Samples before a fit replaces its prior.
MIN_SAMPLES = 5
#: Relative residual beyond which a sample counts less (Huber 1964).
_HUBER = 0.25
#: Utilisation above which waits say nothing of a stationary queue.
_MAX_BUSY = 0.9
#: Expected wait, in services, above which wait ratios mean anything; below, unmodelled TTFT would
#: count as queueing.
_MIN_WAIT = 0.3
#: Expected wait, in services, up to which residual TTFT is overhead.
_NO_WAIT = 0.1
#: Largest share of a window that prompts may take on a decode worker whose ITL is compared.
_MAX_OWN_PROMPTS = 0.2
#: The same for a mixed worker: beyond, nearly every step has a prefill chunk.
_MAX_PROMPTS = 0.95
#: Log error of the speed below which waits are compared.
_SPEED_KNOWN = 0.05


class WarmUp:
    """Finds warm workers: ready for `warm_up_s`, and at work for as long; cold ones mislead."""

    def __init__(self, times: ProvisioningTimes) -> None:
        self._warm_up_s = times.warm_up_s
        self._worked_s: dict[tuple[str, int], float] = {}

    def warm(self, window: PlannerWindow, pool: PoolWindow) -> list[WorkerWindow]:
        """Take in a window; return the workers that were warm throughout."""
        ready = {
            (worker.id, worker.since_ns): worker for worker in pool.in_state(WorkerState.READY)
        }
        before = {key: self._worked_s.get(key, 0.0) for key in ready}
        self._worked_s = {
            key: before[key] + window.seconds * _works(worker) for key, worker in ready.items()
        }
        return [
            worker
            for key, worker in ready.items()
            if before[key] >= self._warm_up_s
            and (window.now_ns - worker.since_ns) / SECOND >= self._warm_up_s + window.seconds
        ]


def _works(worker: WorkerWindow) -> bool:
    figures = (worker.computed_prompts, worker.running, worker.mean_running)
    return any(figures) or all(figure is None for figure in figures)


class AffineRegression:
    """Non-negative relative least squares with forgetting; the prior is a tenth of a sample."""

    def __init__(self, prior: Floats, half_life_s: float) -> None:
        self._prior = np.asarray(prior, dtype=np.float64)
        self._half_life_s = half_life_s
        self._moments = np.zeros((len(self._prior) + 1,) * 2)
        self.theta = self._prior  # the coefficients, shape of the prior
        self.samples = 0.0

    def forget(self, seconds: float) -> None:
        """Age all samples by `seconds`."""
        decay = 0.5 ** (seconds / self._half_life_s)
        self._moments *= decay
        self.samples *= decay

    def add(self, x: Floats, y: float) -> None:
        """Add a sample with y > 0."""
        weight = 1.0
        if self.samples >= MIN_SAMPLES:
            deviation = abs(float(x @ self.theta) / y - 1.0)
            weight = min(1.0, _HUBER / max(deviation, 1e-12))
        row = np.append(x, y) / y
        self._moments += weight * np.outer(row, row)
        self.samples += 1.0

    def solve(self) -> None:
        """Fit the coefficients to the samples."""
        scale = np.where(self._prior > 0, self._prior, 1.0)
        size = len(self._prior)
        units = np.append(scale, 1.0)
        moments = self._moments * np.outer(units, units)
        anchor = np.column_stack((np.eye(size), self._prior / scale))
        moments = moments + 0.1 / size * anchor.T @ anchor * min(1.0, moments[-1, -1] + 1e-9)
        values, vectors = np.linalg.eigh(moments)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        solution, _ = nnls(root[:, :size], root[:, size])
        self.theta = solution * scale


class SpeedLearner:
    """Performance model of one pool, learned from its windows; limits are those of `prior`.

    Prefill seconds = base prompts + token tokens + pair pairs; ITL = b + a n + e h, with n streams
    of h tokens.
    """

    def __init__(
        self, prior: PerformanceModel, times: ProvisioningTimes, half_life_s: float = 600.0
    ) -> None:
        self._prior = prior
        self._times, self._warm_up = times, WarmUp(times)
        self._siblings: dict[str, WarmUp] = {}
        base = prior.prefill.seconds(0.0, 0.0)
        token = max((prior.prefill.seconds(1000.0, 1000.0) - base) / 1000.0, 1e-9)
        self._prefill = AffineRegression(np.array([base, token, 1e-12]), half_life_s)
        one, many = prior.decode.itl_s(1.0, 1000.0), prior.decode.itl_s(33.0, 1000.0)
        slope = max((many - one) / 32.0, 1e-9)
        held = max((prior.decode.itl_s(32.0, 2000.0) - prior.decode.itl_s(32.0, 1000.0)) / 32e3, 0)
        self._decode = AffineRegression(
            np.array([max(one - slope, 1e-6), max(slope - 1e3 * held, 1e-9), max(held, 1e-12)]),
            half_life_s,
        )
        self._half_life_s = half_life_s
        self._overloads = 0.0  # windows of workers whose steps are no samples

    def observe(
        self, window: PlannerWindow, pool: PoolWindow, siblings: Sequence[PoolWindow] = ()
    ) -> None:
        """Learn from warm workers; an idle prefill pool learns from its `siblings`' prompts."""
        self._prefill.forget(window.seconds)
        self._decode.forget(window.seconds)
        self._overloads *= 0.5 ** (window.seconds / self._half_life_s)
        for worker in self._warm_up.warm(window, pool):
            self._add_prefill(worker, pool.role)
            self._add_decode(worker, pool.role, window.seconds)
        if not any(worker.computed_prompts for worker in pool.workers):
            for other in siblings:
                warm_up = self._siblings.setdefault(other.name, WarmUp(self._times))
                for worker in warm_up.warm(window, other):
                    self._add_prefill(worker, other.role)
        self._prefill.solve()
        self._decode.solve()

    def _add_prefill(self, worker: WorkerWindow, role: Role) -> None:
        prompts, tokens, seconds = worker.computed_prompts, worker.computed_tokens, worker.prefill_s
        if not prompts or not _positive(seconds) or not _positive(tokens):
            return
        pairs = worker.computed_pairs
        if pairs is None:  # equal prompts, nothing cached
            pairs = 0.5 * tokens * tokens / prompts
        if role.decodes:  # the steps decode too
            model = self.model
            seconds = max(seconds - _chunks(worker, model) * _step_s(worker, model), 0.2 * seconds)
        self._prefill.add(np.array([float(prompts), tokens, pairs]), seconds)

    def _add_decode(self, worker: WorkerWindow, role: Role, seconds: float) -> None:
        streams, held, itl_s = worker.mean_running, worker.mean_held_tokens, worker.itl_s
        if not _positive(streams) or held is None or not _positive(itl_s):
            return
        # A decode worker computes prompts whose KV was lost in transfer.
        limit = _MAX_PROMPTS if worker.computed_prompts else _MAX_OWN_PROMPTS
        if role.decodes and (worker.prefill_s or 0.0) > limit * seconds:
            self._overloads += 1.0
            return
        held = min(held, worker.kv_tokens or math.inf)
        itl_s *= 1.0 - prefill_share(worker, self.model, seconds)  # prompts take a part of the time
        self._decode.add(np.array([1.0, max(streams, 1.0), held]), itl_s)

    def is_ready(self, role: Role) -> bool:
        """True if samples suffice to plan; overloaded windows count, for want of others."""
        decodes = self._decode.samples + self._overloads >= MIN_SAMPLES or not role.decodes
        return decodes and (self._prefill.samples >= MIN_SAMPLES or not role.prefills)

    @property
    def model(self) -> PerformanceModel:
        """The learned model; parts with too few samples are the prior's."""
        prior = self._prior
        prefill, decode = prior.prefill, prior.decode
        if self._prefill.samples >= MIN_SAMPLES:
            prefill = PrefillLine(*(float(value) for value in self._prefill.theta))
        if self._decode.samples >= MIN_SAMPLES:
            base, stream, held = (float(value) for value in self._decode.theta)
            decode = DecodeLaw(LatencyLaw(stream, base), held)
        return PerformanceModel(
            prefill, decode, prior.kv_tokens, prior.max_seqs, prior.chunk_tokens,
            prior.overhead_s, prior.transfer_token_s, pooled=prior.pooled,
        )  # fmt: skip


class Corrections:
    """Observed over predicted speeds and waits of one pool, one factor per cause.

    One mixed factor would add workers for a slow GPU and remove them for prefix hits. Overhead is
    residual TTFT where hardly anybody waits. The gain is at most pi / 4 / (start-up time) a second,
    half the stability limit of an integrator with that lag.
    """

    def __init__(self, times: ProvisioningTimes, gain_per_s: float = 0.005) -> None:
        self._times, self._warm_up = times, WarmUp(times)
        lag_s = max(times.start_up_s, 1.0)
        self._gain_per_s = min(gain_per_s, 0.25 * math.pi / lag_s)
        self._log_prefill = self._log_decode = self._log_wait = 0.0
        self.overhead_s = 0.0
        self._settled_ns = 0
        self._workers: frozenset[str] = frozenset()

    @property
    def prefill_factor(self) -> float:
        """Observed over predicted prefill seconds."""
        return math.exp(self._log_prefill)

    @property
    def decode_factor(self) -> float:
        """Observed over predicted ITL."""
        return math.exp(self._log_decode)

    @property
    def wait_factor(self) -> float:
        """Observed over predicted waits."""
        return math.exp(self._log_wait)

    def observe(
        self, window: PlannerWindow, pool: PoolWindow, model: PerformanceModel, mix: RequestMix,
        rps: float | None, mean_ttft_s: float | None,
    ) -> None:  # fmt: skip
        """Compare one window with the uncorrected model; None means unknown."""
        step = 1.0 - math.exp(-self._gain_per_s * window.seconds)
        warm = self._warm_up.warm(window, pool)
        change = _log_change(self._log_prefill, _prefill_ratios(warm, model, pool.role))
        self._log_prefill += step * change
        ratios = _decode_ratios(warm, model, mix, pool.role, window.seconds)
        self._log_decode += step * _log_change(self._log_decode, ratios)
        is_settled = self._is_settled(window, pool, warm) and abs(change) <= _SPEED_KNOWN
        if not is_settled or rps is None or not _positive(mean_ttft_s):
            return
        own = model.corrected(self.prefill_factor, self.decode_factor, 1.0, self.overhead_s)
        latency = own.latency(pool.role, rps, len(warm), mix, 0.5)
        if not (pool.role.prefills and latency.utilisation <= _MAX_BUSY):
            return
        without_wait = own.latency(pool.role, 0.0, len(warm), mix, 0.5).mean_ttft_s
        seen_s, expected_s = mean_ttft_s - without_wait, latency.mean_ttft_s - without_wait
        if expected_s >= _MIN_WAIT * own.service_s(mix):
            ratio = max(seen_s, 0.0) / expected_s
            self._log_wait += step * _log_change(self._log_wait, [max(ratio, MIN_FACTOR)])
        elif expected_s <= _NO_WAIT * own.service_s(mix):
            self.overhead_s = max(self.overhead_s + step * (seen_s - expected_s), 0.0)

    def _is_settled(
        self, window: PlannerWindow, pool: PoolWindow, warm: list[WorkerWindow]
    ) -> bool:
        workers = frozenset(worker.id for worker in warm)
        if workers != self._workers or len(workers) != len(pool.workers):
            self._workers, self._settled_ns = workers, window.now_ns
        settled_s = (window.now_ns - self._settled_ns) / SECOND
        return bool(workers) and settled_s >= min(self._times.start_up_s, 60.0)


class PoolSpeed:
    """Performance model of one pool: measured and corrected, or learned."""

    def __init__(
        self, measured: PerformanceModel | None, role: Role, times: ProvisioningTimes
    ) -> None:
        self._measured, self._role = measured, role
        self._corrections = Corrections(times)
        self._learner = SpeedLearner(prior_model(role), times) if measured is None else None
        self._kv_tokens = math.inf
        self._model: PerformanceModel | None = None

    @property
    def is_ready(self) -> bool:
        """True if enough is known to plan with it."""
        return self._learner is None or self._learner.is_ready(self._role)

    @property
    def model(self) -> PerformanceModel:
        """The current model."""
        if self._model is None:
            own = self._corrections
            # Learned speeds need no correction; waits and overhead do.
            factors = (own.prefill_factor, own.decode_factor) if self._measured else (1.0, 1.0)
            self._model = self._uncorrected().corrected(*factors, own.wait_factor, own.overhead_s)
        return self._model

    def _uncorrected(self) -> PerformanceModel:
        if self._measured is not None:
            return self._measured
        assert self._learner is not None
        return replace(self._learner.model, kv_tokens=self._kv_tokens)

    def observe(
        self, window: PlannerWindow, pool: PoolWindow, load: LoadWindow | None,
        mix: RequestMix | None, rps: float,
    ) -> None:  # fmt: skip
        """Learn from one window; `load` is None where TTFT does not show the pool's waits."""
        self._model = None
        sizes = [w.kv_tokens for w in pool.in_state(WorkerState.READY) if w.kv_tokens]
        if sizes:
            self._kv_tokens = float(min(sizes))
        if self._learner is not None:
            siblings = [
                other
                for other in window.pools
                if (other.model, other.gpus) == (pool.model, pool.gpus) and other.role.decodes
            ]
            self._learner.observe(window, pool, siblings if not pool.role.decodes else ())
        if self.is_ready and mix is not None:
            known_rps = rps if load is not None and load.arrivals is not None else None
            ttft_s = load.ttft.mean if load is not None else None
            self._corrections.observe(window, pool, self._uncorrected(), mix, known_rps, ttft_s)


def _prefill_ratios(
    workers: list[WorkerWindow], model: PerformanceModel, role: Role
) -> list[float]:
    ratios = []
    for worker in workers:
        prompts, seconds = worker.computed_prompts, worker.prefill_s
        if not prompts or not _positive(worker.computed_tokens) or not _positive(seconds):
            continue
        expected = prompts * _prompt_s(worker, model)
        if role is Role.BOTH:
            expected += _chunks(worker, model) * _step_s(worker, model)
        ratios.append(seconds / expected)
    return ratios


def _decode_ratios(
    workers: list[WorkerWindow], model: PerformanceModel, mix: RequestMix, role: Role,
    seconds: float,
) -> list[float]:  # fmt: skip
    """Return observed over predicted ITL per worker; overloaded workers are left out."""
    ratios = []
    limit = _MAX_OWN_PROMPTS if role is Role.DECODE else _MAX_PROMPTS
    for worker in workers:
        streams, held, itl_s = worker.mean_running, worker.mean_held_tokens, worker.itl_s
        if not _positive(streams) or not _positive(itl_s) or held is None:
            continue
        if role.decodes and worker.prefill_s is not None and worker.prefill_s > limit * seconds:
            continue
        context = min(held / max(streams, 1.0), mix.isl + mix.osl)
        expected = model.decode.itl_s(max(streams, 1.0), context)
        if role is Role.BOTH:
            expected /= 1.0 - prefill_share(worker, model, seconds)
        ratios.append(itl_s / expected)
    return ratios


def prefill_share(worker: WorkerWindow, model: PerformanceModel, seconds: float) -> float:
    """Return the predicted share of a window that a worker's prompts take, at most 0.9."""
    if not worker.computed_prompts or not _positive(worker.computed_tokens):
        return 0.0
    return min(worker.computed_prompts * _prompt_s(worker, model) / seconds, 0.9)


def _prompt_s(worker: WorkerWindow, model: PerformanceModel) -> float:
    assert worker.computed_prompts
    assert worker.computed_tokens is not None
    mean = worker.computed_tokens / worker.computed_prompts
    prompt = mean
    if worker.computed_pairs:
        prompt = worker.computed_pairs / worker.computed_tokens + 0.5 * mean
    return model.prefill.seconds(mean, prompt)


def _chunks(worker: WorkerWindow, model: PerformanceModel) -> float:
    assert worker.computed_prompts
    assert worker.computed_tokens is not None
    return max(worker.computed_tokens / model.chunk_tokens, float(worker.computed_prompts))


def _step_s(worker: WorkerWindow, model: PerformanceModel) -> float:
    streams = worker.mean_running
    if not _positive(streams):
        return 0.0
    held = worker.mean_held_tokens or 0.0
    return model.decode.itl_s(max(streams, 1.0), held / max(streams, 1.0))


def _log_change(log_factor: float, ratios: list[float]) -> float:
    if not ratios:
        return 0.0
    ratio = min(max(float(np.median(ratios)), MIN_FACTOR), MAX_FACTOR)
    return math.log(ratio) - log_factor


def _positive(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


def prior_model(role: Role = Role.BOTH) -> PerformanceModel:
    """Return the model to learn from: the latency model's priors, for any role."""
    line = PrefillLine(0.005, 1e-4)
    law = DecodeLaw(LatencyLaw(0.0005, 0.02))
    return PerformanceModel(line, law, overhead_s=0.0 if role is Role.BOTH else 0.005)
