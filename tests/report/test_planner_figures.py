"""The figures of a planner say what the JSON says."""

from __future__ import annotations

from typing import Any

from runs import made

from pigou.report.run_figures import decisions, objectives, replicas, totals
from pigou.report.run_page import page

COUNTS = ("starting", "active", "draining")
PLANNER: dict[str, Any] = {
    "name": "price", "gpu_hours": 1.5, "moves": 2, "reversals": 0, "settle_s": 90.0,
    "peak_workers": 3,
    "gpu_hours_by_role": {"both": {"starting": 0.25, "active": 1.25, "draining": 0.0}},
    "decisions": [
        {"at_s": 5.0, "reasons": ["TTFT rises"],
         "actions": [{"kind": "add_workers", "pool": "both", "count": 2}]},
        {"at_s": 9.0, "reasons": [], "actions": [{"kind": "drain_worker", "worker": "both-0"}],
         "refused": ["both-0 is the last worker that decodes"]},
    ],
    "replicas": [
        {"at_s": 0.0, "pools": {"both": dict(zip(COUNTS, (0, 1, 0), strict=True))}},
        {"at_s": 5.0, "pools": {"both": dict(zip(COUNTS, (2, 1, 0), strict=True))}},
    ],
}  # fmt: skip
TERMS = {"ttft_s": 0.5, "itl_s": None, "percentile": 95.0, "attained": 0.875}


def test_replicas_are_those_that_serve_and_all() -> None:
    active, total = replicas(PLANNER, 20.0).lines
    assert (list(active.x), list(active.y)) == ([0.0, 5.0, 20.0], [1, 1, 1])
    assert list(total.y) == [1, 3, 3]
    assert active.step


def test_decisions_have_their_actions_reasons_and_refusals() -> None:
    rows = [[cell.text for cell in row] for row in decisions(PLANNER).rows]
    assert rows[0][1:] == ["add workers both 2", "TTFT rises"]
    assert rows[1][1:] == ["drain worker both-0", "refused: both-0 is the last worker that decodes"]
    many = PLANNER | {"decisions": PLANNER["decisions"] * 150}
    assert len(decisions(many).rows) == 200
    assert decisions(many).note == "The first 200 of 300."


def test_totals_and_objectives_are_those_of_the_figures() -> None:
    cells = {row[0].text: row[1].value for row in totals(PLANNER).rows}
    assert cells["GPU-hours"] == 1.5
    assert cells["GPU-hours, both, starting"] == 0.25
    slo = TERMS | {"classes": {"chat": TERMS | {"offered": 3, "attained": 1.0}}}
    rows = objectives({"offered": 8, "slo": slo}).rows
    assert [[cell.value for cell in row] for row in rows] == [
        ["all requests", 8, 0.5, None, 0.95, 0.875], ["chat", 3, 0.5, None, 0.95, 1.0],
    ]  # fmt: skip


def test_the_page_of_a_run_has_a_planner_where_there_was_one() -> None:
    run = made()
    before = {section.id for section in page(run).sections}
    run.figures.update(planner=PLANNER, slo=TERMS)
    after = {section.id for section in page(run).sections}
    assert after - before == {"planner-section"}
