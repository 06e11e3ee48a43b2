"""Speeds learned while serving, and what observations say of a model, kept apart by cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from pigou.games import Floats
from pigou.games.latency import LatencyLaw
from pigou.objectives import ProvisioningTimes
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow

#: Samples after which a fit is taken instead of its prior.
MIN_SAMPLES = 5
#: Samples further from the fit than this share of it count for less (Huber 1964).
_HUBER = 0.25
#: Factors outside of these bounds are faults of the metrics, not of a model.
MIN_FACTOR, MAX_FACTOR = 0.25, 4.0
#: Utilisation from which on waits say nothing of a stationary queue.
_MAX_BUSY = 0.9
#: Services that a wait must be expected to take before its ratio to what is seen means anything:
#: below, what the model leaves out of TTFT would count as queueing.
_MIN_WAIT = 0.3
#: Services that a wait takes at most where what is left of TTFT is overhead.
_NO_WAIT = 0.1
#: Share of a window that a decode worker's own prompts may take where its ITL is that of streams.
_MAX_OWN_PROMPTS = 0.2
#: The same of one that does both: beyond, nearly every step has a chunk of a prompt.
_MAX_PROMPTS = 0.95
#: Waits are compared when the speed is known up to so much, as a logarithm.
_SPEED_KNOWN = 0.05


class WarmUp:
    """Finds the warm workers of one pool, window after window.

    A worker is warm when it was ready for `warm_up_s` before the window, and has worked in windows
    of so many seconds: one that nobody asked yet has its slow first passes before it, however old
    it is. Cold samples are left out of every fit: they made a planner ask for many more workers
    than it needed.

    Args:
        times: of the warm-up; at 0 every worker that was ready all the window is warm.
    """

    def __init__(self, times: ProvisioningTimes) -> None:
        self._warm_up_s = times.warm_up_s
        self._worked_s: dict[tuple[str, int], float] = {}

    def warm(self, window: PlannerWindow, pool: PoolWindow) -> list[WorkerWindow]:
        """Take in a window; return the workers of the pool that were warm in all of it."""
        ready = pool.in_state(WorkerState.READY)
        keys = [(worker.id, worker.since_ns) for worker in ready]
        before = {key: self._worked_s.get(key, 0.0) for key in keys}
        self._worked_s = {
            key: before[key] + window.seconds * _works(worker)
            for key, worker in zip(keys, ready, strict=True)
        }
        return [
            worker
            for key, worker in zip(keys, ready, strict=True)
            if before[key] >= self._warm_up_s and self._is_old(worker, window)
        ]

    def _is_old(self, worker: WorkerWindow, window: PlannerWindow) -> bool:
        age_s = (window.now_ns - worker.since_ns) / SECOND
        return age_s >= self._warm_up_s + window.seconds


def _works(worker: WorkerWindow) -> bool:
    """Whether a worker had something to do in a window; one without figures counts as so."""
    figures = (worker.computed_prompts, worker.running, worker.mean_running)
    return any(figures) or all(figure is None for figure in figures)


class AffineRegression:
    """y = x . theta with theta >= 0, by least squares of relative residuals that are forgotten.

    Args:
        prior: theta before anything was seen; it counts for a tenth of a sample, so that what the
            samples do not tell apart stays as it is.
        half_life_s: after which a sample counts for half.
    """

    def __init__(self, prior: Floats, half_life_s: float) -> None:
        self._prior = np.asarray(prior, dtype=np.float64)
        self._half_life_s = half_life_s
        self._moments = np.zeros((len(self._prior) + 1,) * 2)
        self._theta = self._prior
        self.samples = 0.0

    @property
    def theta(self) -> Floats:
        """The coefficients, shape of the prior."""
        return self._theta

    def forget(self, seconds: float) -> None:
        """Let so many seconds pass."""
        decay = 0.5 ** (seconds / self._half_life_s)
        self._moments *= decay
        self.samples *= decay

    def add(self, x: Floats, y: float) -> None:
        """Add a sample with y > 0; shape of x as of the prior."""
        weight = 1.0
        if self.samples >= MIN_SAMPLES:
            deviation = abs(float(x @ self._theta) / y - 1.0)
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
        self._theta = solution * scale


class SpeedLearner:
    """The performance model of one pool, learned from its windows.

    Prefill: seconds of a worker's prompts = base prompts + token tokens + pair pairs. Decode: ITL =
    b + a n + e h, with n the streams of a worker and h the tokens that they hold.

    Args:
        prior: the model before anything was seen; its limits stay.
        times: how long a new worker's samples are left out.
        half_life_s: after which a sample counts for half.
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
        """Add what one window showed of the pool; workers that are not warm are left out.

        Args:
            siblings: pools of the same model and GPUs, whose prompts teach a prefill pool to which
                none is sent.
        """
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
        if not prompts or tokens is None or not _positive(seconds) or not _positive(tokens):
            return
        pairs = worker.computed_pairs
        if pairs is None:  # equal prompts, nothing cached
            pairs = 0.5 * tokens * tokens / prompts
        assert seconds is not None
        if role.decodes:  # its steps decode too
            model = self.model
            seconds = max(seconds - _chunks(worker, model) * _step_s(worker, model), 0.2 * seconds)
        self._prefill.add(np.array([float(prompts), tokens, pairs]), seconds)

    def _add_decode(self, worker: WorkerWindow, role: Role, seconds: float) -> None:
        streams, held, itl_s = worker.mean_running, worker.mean_held_tokens, worker.itl_s
        if not _positive(streams) or held is None or not _positive(itl_s):
            return
        # Prompts that the gateway did not send are computed where their KV was lost on its way.
        limit = _MAX_PROMPTS if worker.computed_prompts else _MAX_OWN_PROMPTS
        if role.decodes and (worker.prefill_s or 0.0) > limit * seconds:
            self._overloads += 1.0
            return
        assert streams is not None
        assert itl_s is not None
        held = min(held, worker.kv_tokens or math.inf)
        itl_s *= 1.0 - prefill_share(worker, self.model, seconds)  # prompts take a part of the time
        self._decode.add(np.array([1.0, max(streams, 1.0), held]), itl_s)

    @property
    def prefill_samples(self) -> float:
        """Samples of prompts, those forgotten not counted."""
        return self._prefill.samples

    @property
    def decode_samples(self) -> float:
        """Samples of ITL, those forgotten not counted.

        Windows of an overload count, too: a pool that is overloaded from its start on has no
        others, and is planned for with the prior's ITL.
        """
        return self._decode.samples + self._overloads

    @property
    def model(self) -> PerformanceModel:
        """The model as learned; parts that were not seen often enough are the prior's."""
        prefill, decode = self._prior.prefill, self._prior.decode
        if self._prefill.samples >= MIN_SAMPLES:
            prefill = PrefillLine(*(float(value) for value in self._prefill.theta))
        if self._decode.samples >= MIN_SAMPLES:
            base, stream, held = (float(value) for value in self._decode.theta)
            decode = DecodeLaw(LatencyLaw(stream, base), held)
        prior = self._prior
        return PerformanceModel(
            prefill, decode, prior.kv_tokens, prior.max_seqs, prior.chunk_tokens,
            prior.overhead_s, prior.transfer_token_s, pooled=prior.pooled,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TtftCauses:
    """Observed over expected mean TTFT, as a product of three causes."""

    # seconds of prefill with the hits that there were, over those that were expected.
    hits: float = 1.0
    speed: float = 1.0  # observed over predicted seconds of the same tokens
    queueing: float = 1.0  # observed over predicted waits


class Corrections:
    """Observed over predicted speeds and waits of one pool, each apart.

    A correction factor that mixes the causes adds workers for a slow GPU and removes them for
    prefix hits, or the other way round. Each factor here moves by its own evidence:

    - hits are measured, and shorten the prompts that the model is asked about;
    - speed is the seconds of warm workers over what the model says of the same work;
    - queueing is the mean wait over that of the model, where the pool is settled;
    - overhead is what is left of TTFT where next to nobody waits: legs, transfer, first step.

    A factor closes a loop with the lag of a start-up: it moves by a gain of at most
    pi / 4 / (start-up time) a second, half of where an integrator with that lag would be unstable.
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
        """Observed over predicted seconds of prompts."""
        return math.exp(self._log_prefill)

    @property
    def decode_factor(self) -> float:
        """Observed over predicted seconds between tokens."""
        return math.exp(self._log_decode)

    @property
    def wait_factor(self) -> float:
        """Observed over predicted waits."""
        return math.exp(self._log_wait)

    def causes(self, model: PerformanceModel, mix: RequestMix, expected_hits: float) -> TtftCauses:
        """Return why TTFT is not as expected with a share of hits."""
        computed = model.prefill.seconds(mix.computed, mix.isl)
        expected = model.prefill.seconds(mix.isl * (1.0 - expected_hits), mix.isl)
        hits = computed / expected if expected > 0 else 1.0
        return TtftCauses(hits, self.prefill_factor, self.wait_factor)

    def observe(
        self, window: PlannerWindow, pool: PoolWindow, model: PerformanceModel, mix: RequestMix,
        rps: float | None, mean_ttft_s: float | None,
    ) -> None:  # fmt: skip
        """Compare one window with the model.

        Args:
            model: without corrections.
            mix: what the requests of the window were like, hits counted.
            rps: requests a second to the pool; None where not known.
            mean_ttft_s: mean TTFT of the window; None where not known.
        """
        step = 1.0 - math.exp(-self._gain_per_s * window.seconds)
        warm = self._warm_up.warm(window, pool)
        change = _log_change(self._log_prefill, _prefill_ratios(warm, model, pool.role))
        self._log_prefill += step * change
        ratios = _decode_ratios(warm, model, mix, pool.role, window.seconds)
        self._log_decode += step * _log_change(self._log_decode, ratios)
        is_settled = self._is_settled(window, pool, warm) and abs(change) <= _SPEED_KNOWN
        if not is_settled or rps is None or not _positive(mean_ttft_s):
            return
        assert mean_ttft_s is not None
        factors = (self.prefill_factor, self.decode_factor, 1.0)
        own = model.corrected(*factors, self.overhead_s)
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
        """Whether the pool has had the same warm workers for a start-up time."""
        workers = frozenset(worker.id for worker in warm)
        if workers != self._workers or len(workers) != len(pool.workers):
            self._workers, self._settled_ns = workers, window.now_ns
        settled_s = (window.now_ns - self._settled_ns) / SECOND
        return bool(workers) and settled_s >= min(self._times.start_up_s, 60.0)


def _prefill_ratios(
    workers: list[WorkerWindow], model: PerformanceModel, role: Role
) -> list[float]:
    """Return observed over predicted seconds of workers' prompts.

    On a worker that does both, the steps of a prompt's chunks decode too.
    """
    ratios = []
    for worker in workers:
        prompts, tokens, seconds = worker.computed_prompts, worker.computed_tokens, worker.prefill_s
        if not prompts or not _positive(tokens) or not _positive(seconds):
            continue
        assert tokens is not None
        assert seconds is not None
        expected = prompts * _prompt_s(worker, model)
        if role is Role.BOTH:
            expected += _chunks(worker, model) * _step_s(worker, model)
        ratios.append(seconds / expected)
    return ratios


def _decode_ratios(
    workers: list[WorkerWindow], model: PerformanceModel, mix: RequestMix, role: Role,
    seconds: float,
) -> list[float]:  # fmt: skip
    """Return observed over predicted ITL of workers.

    A stream holds at most a whole request: what is counted beyond waits, and is not read. On a
    worker that does both, prompts take a part of the window's time (`PerformanceModel`).
    """
    ratios = []
    for worker in workers:
        streams, held, itl_s = worker.mean_running, worker.mean_held_tokens, worker.itl_s
        if not _positive(streams) or not _positive(itl_s) or held is None:
            continue
        if _computes_prompts(worker, role, seconds):
            continue
        assert streams is not None
        assert itl_s is not None
        context = min(held / max(streams, 1.0), mix.isl + mix.osl)
        expected = model.decode.itl_s(max(streams, 1.0), context)
        if role is Role.BOTH:
            expected /= 1.0 - prefill_share(worker, model, seconds)
        ratios.append(itl_s / expected)
    return ratios


def _computes_prompts(worker: WorkerWindow, role: Role, seconds: float) -> bool:
    """Whether a worker computed so many prompts that its steps are no measure of its streams.

    A decode worker does where their KV was not held for as long as they waited; one that does
    both, where it is overloaded: then nearly every step has a chunk.
    """
    own_s, limit = worker.prefill_s, _MAX_OWN_PROMPTS if role is Role.DECODE else _MAX_PROMPTS
    return role.decodes and own_s is not None and own_s > limit * seconds


def prefill_share(worker: WorkerWindow, model: PerformanceModel, seconds: float) -> float:
    """Return the share of a window's time that a worker's prompts take by a model, up to 0.9."""
    if not worker.computed_prompts or not _positive(worker.computed_tokens):
        return 0.0
    return min(worker.computed_prompts * _prompt_s(worker, model) / seconds, 0.9)


def _prompt_s(worker: WorkerWindow, model: PerformanceModel) -> float:
    """Return the predicted seconds of a worker's mean prompt."""
    assert worker.computed_prompts
    assert worker.computed_tokens is not None
    mean = worker.computed_tokens / worker.computed_prompts
    prompt = mean
    if worker.computed_pairs:
        prompt = worker.computed_pairs / worker.computed_tokens + 0.5 * mean
    return model.prefill.seconds(mean, prompt)


def _chunks(worker: WorkerWindow, model: PerformanceModel) -> float:
    """Return the steps in which a worker computed prompts, each with the end of one at least."""
    assert worker.computed_prompts
    assert worker.computed_tokens is not None
    return max(worker.computed_tokens / model.chunk_tokens, float(worker.computed_prompts))


def _step_s(worker: WorkerWindow, model: PerformanceModel) -> float:
    """Return the predicted seconds of a step that decodes a worker's streams."""
    streams = worker.mean_running
    if not _positive(streams):
        return 0.0
    assert streams is not None
    held = worker.mean_held_tokens or 0.0
    return model.decode.itl_s(max(streams, 1.0), held / max(streams, 1.0))


def _log_change(log_factor: float, ratios: list[float]) -> float:
    """Return how far the median ratio lies from a factor, as a logarithm; 0 without ratios."""
    if not ratios:
        return 0.0
    ratio = min(max(float(np.median(ratios)), MIN_FACTOR), MAX_FACTOR)
    return math.log(ratio) - log_factor


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def prior_model(role: Role = Role.BOTH) -> PerformanceModel:
    """Return a model to learn from: the priors of the latency model, for any role."""
    line = PrefillLine(0.005, 1e-4)
    law = DecodeLaw(LatencyLaw(0.0005, 0.02))
    overhead = 0.0 if role is Role.BOTH else 0.005
    return PerformanceModel(line, law, overhead_s=overhead)
