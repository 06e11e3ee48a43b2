"""The estimator: learns each worker's speed from what the control plane observes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pigou.control.latency_model import harvest_kernel as kernels
from pigou.control.latency_model.affine_fit import AffineFit
from pigou.control.latency_model.arrivals import RATE_S, FleetRate, decayed
from pigou.control.latency_model.context import Context
from pigou.control.latency_model.estimates import (
    MIN_SLOPE,
    PRIOR_LAW,
    PRIOR_PREFILL,
    ROWS,
    Estimates,
    fill,
    pairs,
    prior_column,
)
from pigou.control.latency_model.flow import Flow, Sample
from pigou.control.latency_model.reading import Reading
from pigou.control.latency_model.reference import Reference, mixed, of
from pigou.control.latency_model.scales import Scales
from pigou.control.latency_model.sizes import Sizes
from pigou.control.latency_model.spread import Spread
from pigou.control.latency_model.stall import Stall
from pigou.games.latency import LatencyLaw, OnlineFit
from pigou.request import SECOND, Rehearsed

_SPEEDS = ("prefill", "transfer", "itl")
_AT = {name: place for place, name in enumerate(ROWS)}
#: Streams on a worker that the law is expected to see at most; it goes on past them.
_MOST_STREAMS = 256.0
#: Tokens that may double a step by being held. Without grouped queries a model's cache has as many
#: bytes as its weights at 30,000; with them there are more.
_DOUBLING = 20_000.0
#: Rates of arrival are as of at most so many nanoseconds ago.
_FRESH = SECOND // 100
#: Outputs that the expected length of an output is a mean over.
_OUTPUTS = 64.0
_FIRST_OUTPUT = 128.0


class LatencyModel:
    """Speeds of the workers, as far as they were seen.

    Each speed is a law common to the fleet times a factor of the worker's own (`Scales`): what
    one worker shows at a load teaches what the others would do there.

    Prefill: workers compute prompts one after another (or batched, which makes no difference to
    sums), so a prompt that ends kept its worker busy since it came, or since the one before
    ended, whichever is later; these times are fitted by a line over uncached tokens and, where
    prompts are long enough for that to show, over pairs of tokens (attention). Transfer:
    from a remote prefill's end to the first token, by a line over tokens. ITL: `Flow`'s samples,
    by a `LatencyLaw` and by the tokens that the streams held, as each step reads the keys and
    values of all of them, less what prompts took that were computed beside them (`Stall`).
    Reading: what a prompt took beyond computing (`Reading`).

    Rows are those of `State`; `up` and `down` keep them in step.
    """

    def __init__(self) -> None:
        self._prefill = AffineFit()
        self._transfer = AffineFit()
        self._reading = Reading()
        self._itl = OnlineFit(_MOST_STREAMS, doubling=_DOUBLING)
        self._context = Context()
        self._stall = Stall()
        self._gaps = Spread()
        self._fleet = FleetRate()
        self._reference = Reference()
        self._sizes = Sizes()
        self._came = 0
        self._scales = {name: Scales() for name in _SPEEDS}
        self._rate = np.zeros(0)
        self._rated = np.zeros(0, dtype=np.int64)
        self._last_done = np.zeros(0, dtype=np.int64)
        self._output = _FIRST_OUTPUT
        self._outputs = 0
        self.flow = Flow()
        self._known: Estimates | None = None
        self._at = 0

    def up(self, rehearsed: Sequence[Rehearsed] = (), now: int = 0) -> None:
        """A worker joined; its row is the last. What it measured of itself is taken in."""
        for scales in self._scales.values():
            scales.up()
        self._rate = np.append(self._rate, 0.0)
        self._rated = np.append(self._rated, 0)
        self._last_done = np.append(self._last_done, 0)
        self.flow.up()
        self._known = None
        if rehearsed:
            self._rehearse(len(self._rate) - 1, rehearsed, now)

    def down(self, row: int) -> None:
        """A worker left."""
        for scales in self._scales.values():
            scales.down(row)
        self._rate = np.delete(self._rate, row)
        self._rated = np.delete(self._rated, row)
        self._last_done = np.delete(self._last_done, row)
        self.flow.down(row)
        self._known = None

    def sent(self, row: int, now: int) -> None:
        """A prompt was sent to worker `row` to be computed."""
        if self._came:
            gap = max(0, now - self._came) / SECOND
            self._gaps.observe(gap)
            self._fleet.observe(gap)
        self._came = now
        age = (now - self._rated.item(row)) / SECOND / RATE_S
        self._rate[row] = self._rate.item(row) * math.exp(-max(0.0, age)) + 1.0 / RATE_S
        self._rated[row] = now

    def prefilled(
        self, row: int, tokens: int, sent: int, now: int, prompt: int | None = None
    ) -> None:
        """A prompt with so many uncached tokens, sent at `sent`, was computed by worker `row`.

        The flow is advanced up to `now` before. `prompt` is its length, if more than those.
        """
        began = max(sent, self._last_done.item(row))
        self._last_done[row] = now
        both = float(pairs(tokens, tokens if prompt is None else prompt))
        self._computed(row, tokens, both, max(0, now - began) / SECOND)
        if now > began:
            self._learn("prefill", self._prefill, row, tokens, now - began, now, both)

    def read(
        self, row: int, tokens: int, came: int, sent: int, now: int, prompt: int, alone: bool
    ) -> None:
        """A prompt was computed of which `came` tokens were read from another worker's cache.

        What it took beyond computing is what reading took, where the worker had no other prompt
        meanwhile (`alone`); else it may have been waiting. The rest is as for `prefilled`.
        """
        began = max(sent, self._last_done.item(row))
        clean = alone and began == sent
        self._last_done[row] = now
        rows, work = np.array([row]), np.array([float(tokens)])
        service = self.now(now).service(rows, work, float(prompt)).item()
        took = max(0, now - began) / SECOND
        self._computed(row, tokens, float(pairs(tokens, prompt)), min(took, service))
        if clean:
            self._reading.observe(float(came), took - service, now)

    def _computed(self, row: int, tokens: int, both: float, seconds: float) -> None:
        """Count a prompt that was computed, and that its worker was busy with it so long."""
        size = tokens + self._prefill.ratio * both
        self.flow.prompt(row, size, seconds)
        self._sizes.observe(tokens, both)

    def transferred(self, row: int, tokens: int, nanos: int, now: int) -> None:
        """A remote prefill's tokens reached worker `row`, and its first token followed."""
        if nanos > 0:
            self._learn("transfer", self._transfer, row, tokens, nanos, now)

    def generated(self, tokens: int) -> None:
        """A request ended after so many tokens."""
        self._outputs += 1
        share = 1.0 / min(self._outputs, _OUTPUTS)
        self._output += share * (tokens - self._output)

    def output(self, most: int) -> float:
        """Return the tokens that a request with this limit is expected to generate."""
        return max(1.0, min(float(most), self._output))

    def harvest(self, now: int) -> None:
        """Take in what flowed since the last harvest; call it a few times a second."""
        self._reading.tick(now)
        samples = list(self.flow.harvest())
        if samples:
            self._take_in(samples, now)
        self._known = None

    def now(self, now: int) -> Estimates:
        """Return the estimates; rates of arrival decay up to `now`."""
        known = self._known
        if known is None:
            known = self._known = self._solve(now)
        elif 0 <= now - self._at < _FRESH:
            return known
        self._at = now
        self._arrive(known, now)
        return known

    def peek(self, now: int) -> Estimates:
        """Return a copy of the estimates; whether they are looked at changes no later ones."""
        found = self._solve(now) if self._known is None else self._known.copy()
        self._arrive(found, now)
        return found

    def _rehearse(self, row: int, rehearsed: Sequence[Rehearsed], now: int) -> None:
        """Learn from what worker `row` measured.

        Of its own it gets what sets it apart from those that measured before; the rest teaches
        the common laws, until requests were served: they know better. What prompts take from
        streams comes last, as it is what is left.
        """
        prompts, streams = of(rehearsed, streams=False), of(rehearsed, streams=True)
        ratios = {}
        for name, scenes in (("prefill", prompts), ("itl", streams)):
            ratio = ratios[name] = self._reference.ratio(scenes)
            for _ in scenes:
                self._scales[name].observe(row, ratio, now)
        if self._outputs:
            return
        for each in prompts:
            both = float(pairs(each.tokens, each.tokens))
            self._prefill.observe(float(each.tokens), each.seconds / ratios["prefill"], both)
        for each in streams:
            self._itl.observe(float(each.streams), each.seconds / each.steps / ratios["itl"])
        if not self._itl.weight:
            return
        for each in mixed(rehearsed):
            expected = each.steps * self._law()(float(each.streams)) * ratios["itl"]
            size = each.tokens + self._prefill.ratio * float(pairs(each.tokens, each.tokens))
            self._stall.observe(each.seconds / expected, 1.0 / expected, size / expected)

    def _take_in(self, samples: Sequence[Sample], now: int) -> None:
        """Learn from samples: the law of ITL, the factors of workers, and what prompts take."""
        scales, stall, alone = self._scales["itl"], self._stall, self._alone(now)
        own = scales.now(now)[1]
        rows = np.array([_row(each) for each in samples]).T.copy()
        bare = np.empty((3, len(samples)))
        taken = self._taken(alone, self._law())
        kernels.strip(rows, own, taken, stall.doubt(*alone), bare)
        streams, context = rows[kernels.STREAMS], rows[kernels.CONTEXT]
        self._context.observe(streams, context)
        self._itl.observe_all(streams, bare[kernels.ALIKE], bare[kernels.SURE], context)
        law = self._itl.law()
        kernels.compare(
            rows, bare, own, (law.a, law.b, law.d, law.n_sat, law.beta), law.floor, self._itl.each,
            now, scales.weight, scales.mean, scales.variance, scales.at,
            stall.gram, stall.moment, stall.keep,
        )  # fmt: skip

    def _arrive(self, known: Estimates, now: int) -> None:
        """Write the rates of arrival as of `now`."""
        known.fleet_arrivals[:] = self._fleet.per_second
        decayed(self._rate, self._rated, self._mean_service, now, known.arrivals, known.busy)

    def _learn(
        self, name: str, fit: AffineFit, row: int, size: int, nanos: int, now: int,
        both: float = 0.0,
    ) -> None:  # fmt: skip
        seconds, scales = nanos / SECOND, self._scales[name]
        own = scales.of(row, now)
        fit.observe(float(size), seconds / own, both)
        scales.observe(row, seconds / max(fit(float(size), both), 1e-9), now)

    def _alone(self, now: int) -> tuple[float, float]:
        """Return base and slope of what a prompt takes by itself, on a worker like most."""
        if not self._prefill.seen:
            return PRIOR_PREFILL
        common, (base, slope) = self._scales["prefill"].now(now)[0], self._prefill.law
        return base * common, slope * common

    def _law(self) -> LatencyLaw:
        """Return the law of ITL common to the fleet, of streams that hold nothing."""
        return self._itl.law() if self._itl.weight > 0 else PRIOR_LAW

    def _taken(self, alone: tuple[float, float], law: LatencyLaw) -> tuple[float, float]:
        """Return base and slope of what a prompt takes from streams."""
        return self._stall.law(*alone, max(law.toll(1.0), MIN_SLOPE * law(1.0)))

    def _solve(self, now: int) -> Estimates:
        law, alone = self._law(), self._alone(now)
        column, least = prior_column(law), MIN_SLOPE * law(1.0)
        for name, fit in (("prefill", self._prefill), ("transfer", self._transfer)):
            if fit.seen:
                column[_AT[f"{name}_base"]], column[_AT[f"{name}_token"]] = fit.law
        column[_AT["fetch_base"]], column[_AT["fetch_token"]] = self._reading.law
        column[_AT["prefill_pair"]] = self._prefill.pair
        column[_AT["prefill_per_token"]] = column[_AT["prefill_token"]]
        column[_AT["prefill_per_token"]] += self._prefill.pair * self._sizes.before
        column[_AT["interference_base"]], column[_AT["interference_token"]] = self._taken(
            alone, law
        )
        each, mean = self._itl.each, self._context.mean
        column[_AT["context_token"]], column[_AT["mean_context"]] = each, mean
        column[_AT["a"]] += each * mean
        column[_AT["arrival_cv2"]] = self._gaps.squared
        prompt = [column.item(_AT[f"prefill_{each}"]) for each in ("base", "token", "pair")]
        column[_AT["mean_prefill"]] = self._sizes.mean(*prompt)
        column[_AT["prefill_cv2"]] = self._sizes.squared(*prompt)
        prefill, transfer, itl = (self._scales[name].now(now) for name in _SPEEDS)
        found = Estimates(np.empty((len(ROWS), len(self._rate))))
        commons = (prefill[0], transfer[0], itl[0])
        fill(
            found.table, column, prefill[1], transfer[1], itl[1], commons, least
        )  # fmt: skip
        self._mean_service = found.mean_prefill
        return found


def _row(sample: Sample) -> tuple[float, ...]:
    """Return a column of `harvest_kernel.samples`."""
    return (
        sample.streams, sample.context, sample.itl, sample.steps, sample.prompts, sample.work,
        float(sample.row),
    )  # fmt: skip
