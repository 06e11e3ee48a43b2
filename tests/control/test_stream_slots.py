"""Tokens of many requests told at once weigh as much as told one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ControlConfig
from pigou.control.journal import report_tokens
from pigou.control.messages import FirstToken, PrefillDone, WorkerDown, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, Request, Role, Worker

COUNTS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40)), max_size=12)


def plane(firsts: int, prefilled: int, down: bool, order: str) -> ControlPlane:
    """Two workers, one of which may have died, and six requests, some of them streaming."""
    made = ControlPlane(ControlConfig(policy="round-robin", admission={"order": order}))
    for name in ("a", "b"):
        made.observe(WorkerUp(Worker(name, "", Role.BOTH, 16, 1000, 32)), SECOND)
    for number in range(6):
        made.submit(Request(str(number), 100, 50, arrival=SECOND), SECOND)
    for number in range(max(firsts, prefilled)):
        if number < prefilled:
            made.observe(PrefillDone(str(number)), 2 * SECOND)
        if number < firsts:
            made.observe(FirstToken(str(number)), 2 * SECOND)
    if down:
        made.observe(WorkerDown("b"), 2 * SECOND)
    return made


def figures(made: ControlPlane) -> dict[str, Any]:
    """What tokens change."""
    return {
        "columns": made.state.columns.decode_tokens.tolist(),
        "loads": {name: load.tokens for name, load in made.state.requests.items()},
        "flow": made.tracker.latency_model.sampler.tokens.tolist(),
        "room": made.admission.capacity.tokens(made.state).tolist(),
    }


@given(
    COUNTS, st.integers(0, 6), st.integers(0, 6), st.booleans(), st.sampled_from(["fcfs", "fair"])
)
def test_tokens_told_at_once_weigh_as_much_as_one_by_one(
    counts: list[tuple[int, int]], firsts: int, prefilled: int, down: bool, order: str
) -> None:
    one, other = (plane(firsts, prefilled, down, order) for _ in range(2))
    told = [(str(number), count) for number, count in counts]
    for each in told:
        report_tokens(one, [each], 3 * SECOND)
    report_tokens(other, told, 3 * SECOND)
    assert figures(one) == figures(other)
