"""Questions that are put to a ControlPlane are not journalled: they change no later decision."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.messages import Ended, FirstToken, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import SECOND, FinishReason, Request, Role, Worker

MS = SECOND // 1000


def serve(steps: list[tuple[int, int, int]], asking: bool) -> list[Any]:
    """Route requests under `toll`; return all decisions.

    Each step lasts so many milliseconds, brings a prompt of so many tokens, and sees questions in
    its midst when `asking`.
    """
    plane = ControlPlane(ControlConfig(policy="toll"))
    for name in ("a", "b", "c"):
        plane.observe(WorkerUp(Worker(name, "", Role.BOTH, 16, 1000, 8, False, layout="l")), 0)
    now, decided, under_way = SECOND, [], []
    for number, (wait_ms, prompt, first_ms) in enumerate(steps):
        now += wait_ms * MS
        if asking:
            for part in (3, 2):
                plane.may_add(1, prompt, 10, now - wait_ms * MS // part)
                plane.status(now - wait_ms * MS // part)
                plane.computes(str(number))
                plane.decision(str(number))
        decided.append(plane.submit(Request(str(number), prompt, 20), now))
        if isinstance(decided[-1], Route):
            under_way.append(str(number))
        if under_way and number % 2:
            now += first_ms * MS
            decided += plane.observe(FirstToken(under_way[0]), now)
            decided += plane.observe(Ended(under_way.pop(0), FinishReason.STOP), now + MS)
            decided += plane.tick(now + 2 * MS)
    return decided


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 4000), st.integers(1, 300)),
        min_size=6,
        max_size=30,
    )
)
def test_asking_changes_no_later_decision(steps: list[tuple[int, int, int]]) -> None:
    assert serve(steps, asking=True) == serve(steps, asking=False)
