"""Drafts by price: how many draft tokens each row verifies in the next step.

A row that verifies k drafts, each accepted with probability a after the one before, yields
    E(a, k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a) tokens.
Chosen are the drafts of the whole batch that maximise its tokens per second,
    sum of E(a_r, k_r) / (S(n + sum of k_r) + D max k_r),
    n rows; S(t) seconds of a step of t tokens; D seconds of a step of the draft model.
At the maximum draft j of a row stays where its gain a^j exceeds its toll: the seconds that it adds
to everybody's step, at the batch's tokens per second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.engine.plan import Plan, Result
from pigou.engine.state import EngineState
from pigou.request import SECOND, Ints

Floats = NDArray[np.float64]
#: Acceptance before anything is known, and its weight in verified drafts.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 4.0
#: Factors of a row's counts in a step that verifies its drafts, and in one that does not.
_KEEP, _KEEP_UNTRIED = 0.95, 0.99
#: Most tokens of a step whose seconds are learned; larger steps verify no drafts.
MAX_TOKENS = 512
#: Weight of the newest step in the seconds of all steps; at least, in those of as many tokens; and
#: in those of larger ones, which become cheap enough to be tried again.
_NEW, _NEW_SHAPE, _FADE = 0.2, 0.05, 0.001
#: Share of the tokens per second that drafts have to add: what is learned is not exact.
_MIN_GAIN = 0.03
#: A step of more than this many times the expected seconds was disturbed.
_OUTLIER = 3.0


def choose_drafts(
    acceptance: Floats, offers: Ints, step_seconds: Floats, draft_seconds: float = 0.0,
    min_gain: float = 0.0,
) -> Ints:  # fmt: skip
    """Return how many drafts each row verifies, (rows,); see the module.

    `step_seconds[m]` are those of a step with m drafts in all; `offers` (rows,) are limits. Drafts
    that add less than the share `min_gain` to the tokens per second are none.
    """
    depth = int(offers.max(initial=0))
    depths = np.arange(1, depth + 1)
    rows, at = np.nonzero(depths <= offers[:, None])
    returns = acceptance[rows] ** depths[at]
    order = np.argsort(-returns, kind="stable")[: len(step_seconds) - 1]
    tokens = len(acceptance) + np.concatenate(([0.0], np.cumsum(returns[order])))
    deepest = np.concatenate(([0], np.maximum.accumulate(depths[at[order]])))
    rate = tokens / (step_seconds[: len(tokens)] + draft_seconds * deepest)
    best = int(rate.argmax()) if rate.max() > (1.0 + min_gain) * rate[0] else 0
    return np.bincount(rows[order[:best]], minlength=len(offers)).astype(np.int32)


class StepLaw:
    """Seconds of a decode step by its tokens, learned from the steps themselves."""

    def __init__(self) -> None:
        self._scale = 1.0  # moves with the machine's speed and the contexts
        self._shape: Floats = np.zeros(MAX_TOKENS + 1)  # seconds at scale 1, by tokens; 0: unknown
        self._steps: Ints = np.zeros(MAX_TOKENS + 1, dtype=np.int32)
        self._known: Ints = np.empty(0, dtype=np.int32)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if not 0 < tokens <= MAX_TOKENS or seconds <= 0:
            return
        self._steps[tokens] += 1
        expected = self._shape.item(tokens) * self._scale
        if expected == 0.0 or (self._steps[tokens] == 2 and seconds < expected):
            self._shape[tokens] = seconds / self._scale  # the first step of a kind may compile
            self._known = np.flatnonzero(self._shape).astype(np.int32)
            return
        error = min(seconds / expected, _OUTLIER) - 1.0
        self._scale *= 1.0 + _NEW * error
        self._shape[tokens] *= 1.0 + max(1.0 / self._steps.item(tokens), _NEW_SHAPE) * error
        larger = self._known[self._known > tokens]
        self._shape[larger] += _FADE * (self._shape[tokens] - self._shape[larger])

    def lacks(self, tokens: int) -> bool:
        """True if steps were seen, but none of `tokens`."""
        return len(self._known) > 0 and self._shape.item(tokens) == 0.0

    def seconds(self, tokens: int, more: int) -> Floats:
        """Return the seconds of steps of `tokens` to `tokens + more`, never falling.

        Beyond what was seen they go on as between the last two; one alone is flat, so it is tried.
        """
        known = self._known
        wanted = np.arange(tokens, tokens + more + 1)
        if not len(known):
            return np.ones(more + 1)
        values = self._shape[known] * self._scale
        estimate = np.interp(wanted, known, values)
        if len(known) > 1:
            slope = max((values[-1] - values[-2]) / (known[-1] - known[-2]), 0.0)
            estimate += slope * np.maximum(wanted - known[-1], 0)
        rising: Floats = np.maximum.accumulate(estimate)
        return rising


class DraftPricer:
    """Learns acceptance by row and the seconds of steps; chooses the drafts of each step."""

    def __init__(self, max_seqs: int, max_drafts: int) -> None:
        self.law = StepLaw()
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_at = np.zeros(max_drafts, dtype=np.int64)  # accepted drafts by position
        #: Recent drafts of each row, and in the last place of a mean row: tested, and accepted.
        self._counts = np.zeros((2, max_seqs + 1))
        self._draft_s = 0.0  # seconds of a step of the draft model

    def begin(self, row: int) -> None:
        """Forget a row, which another sequence takes."""
        self._counts[:, row] = 0.0

    def choose(self, rows: Ints, offers: Ints) -> Ints:
        """Return how many drafts each decoding row verifies, (rows,); `offers` are limits.

        A batch of a new size decodes once without drafts, to see what they add.
        """
        offers = np.minimum(offers, len(self.accepted_at))
        more = min(int(offers.sum()), MAX_TOKENS - len(rows))
        if more <= 0 or self.law.lacks(len(rows)):
            return np.zeros(len(rows), dtype=np.int32)
        seconds = self.law.seconds(len(rows), more)
        return choose_drafts(self._acceptance(rows), offers, seconds, self._draft_s, _MIN_GAIN)

    def pays(self, rows: Ints) -> bool:
        """True if the likeliest drafts would be verified if they were offered."""
        offers = np.zeros(len(rows), dtype=np.int32)
        offers[self._acceptance(rows).argmax()] = len(self.accepted_at)
        return bool(self.choose(rows, offers).any())

    def _acceptance(self, rows: Ints) -> Floats:
        """Return the estimate for each row; rows that were not tried have that of all."""
        (tested, accepted), (all_tested, all_accepted) = self._counts[:, rows], self._counts[:, -1]
        common = PRIOR_ACCEPTANCE * PRIOR_WEIGHT + all_accepted
        common *= PRIOR_WEIGHT / (PRIOR_WEIGHT + all_tested)
        estimate: Floats = (accepted + common) / (tested + PRIOR_WEIGHT)
        return np.minimum(estimate, 0.99)

    def observe(self, plan: Plan, result: Result) -> None:
        """Learn from a plan's result."""
        if plan.chunk_tokens:
            return
        if len(result.durations):
            verifying = (np.median(result.durations) - result.drafting) / SECOND
            self.law.observe(plan.tokens, float(verifying))
        if not len(plan.drafts):
            self._counts[:, [*plan.rows, -1]] *= _KEEP_UNTRIED**result.steps
            return
        drafts, accepted, tried = plan.drafts, result.accepted, plan.drafts > 0
        if result.drafting:
            spent = result.drafting / SECOND / (int(drafts.max()) + 1)
            self._draft_s += (spent - self._draft_s) * (_NEW if self._draft_s else 1.0)
        # Drafts after the first rejection tell nothing.
        new = np.stack((np.minimum(accepted + 1, drafts), accepted))
        counts = self._counts[:, plan.rows] * np.where(tried, _KEEP, _KEEP_UNTRIED)
        self._counts[:, plan.rows] = counts + new
        self._counts[:, -1] = self._counts[:, -1] * _KEEP + new[:, tried].mean(1)
        self.drafts += int(tried.sum())
        self.draft_tokens += int(drafts.sum())
        self.accepted_tokens += int(accepted.sum())
        self.accepted_at += (accepted[:, None] > np.arange(len(self.accepted_at))).sum(0)


def add_drafts(state: EngineState, pricer: DraftPricer, plan: Plan, offers: Ints | None) -> bool:
    """Let rows of a plan that only decodes verify drafts, as far as blocks go; True if any do."""
    for started in plan.started:
        pricer.begin(started.row)
    if not len(plan.rows) or plan.preempted or plan.counts.max() > 1 or not plan.samples.all():
        return False
    rows, table = plan.rows, state.rows
    drafts: Ints = np.zeros(len(rows), dtype=np.int32)
    if offers is not None and offers.any():
        room = np.minimum(table.limit[rows] - table.length[rows] - 1, offers[rows])
        if plan.started:
            room[np.isin(rows, [started.row for started in plan.started])] = 0
        budget = state.config.max_batched_tokens - len(rows)
        drafts = pricer.choose(rows, np.minimum(room, budget))
        drafts = np.diff(np.minimum(np.cumsum(drafts), budget), prepend=0).astype(np.int32)
    if not drafts.any():
        plan.drafts_pay = plan.repeat > 1 and pricer.pays(rows)
        return False
    _allocate(state, rows, drafts)
    if not drafts.any():
        return False
    plan.counts += drafts
    plan.drafts, plan.repeat = drafts, 1
    return True


def _allocate(state: EngineState, rows: Ints, drafts: Ints) -> None:
    """Append the blocks that drafts need; where none is free, take drafts away."""
    table, size = state.rows, state.config.block_size
    free = state.pool.free if state.offload is None else state.offload.deferred.spare
    free = max(min(free, state.pool.free), 0)
    room = table.blocks[rows] * size - table.computed[rows] - 1
    for i in np.flatnonzero(drafts > room).tolist():
        row, start = rows.item(i), table.blocks.item(rows.item(i))
        own = table.account.item(row)
        new = min(-(-(drafts.item(i) - room.item(i)) // size), free, state.pool.available(own))
        drafts[i] = min(drafts.item(i), room.item(i) + new * size)
        state.note_removed(state.pool.allocate(table.tables[row, start : start + new], own))
        table.blocks[row] += new
        free -= new
