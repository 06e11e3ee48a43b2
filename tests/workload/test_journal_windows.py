"""Laws of a journal's windows: requests, waits, retries and tenants, and what is not judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import JournalRecorder, report_tokens
from pigou.control.messages import Ended, FirstToken, LoadReport, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.diagnosis.diagnose import diagnose
from pigou.gateway.journal import Journal
from pigou.request import SECOND, FinishReason, Request, Role, Worker
from pigou.windows import journal as journal_source
from pigou.windows.observations import FleetObservation
from pigou.workload.journal_file import entries


def journal_windows(
    path: Path, on_cut: Callable[[int], object] = lambda _: None
) -> tuple[FleetObservation, ...]:
    return journal_source.journal_windows(entries(path, on_cut), str(path))


def write(path: Path, seconds: int, *, rate: int = 1, done: int = 1) -> None:
    """Send `rate` requests a second to one worker of one stream, and serve `done` of them."""
    config = ControlConfig(policy="least-loaded", max_inflight=1, max_queued=10_000)
    journal = Journal(path, config)
    plane = JournalRecorder(ControlPlane(config), journal.write)
    plane.observe(WorkerUp(Worker("d", "", Role.BOTH, blocks=100)), SECOND)
    running: list[str] = []
    for second in range(1, seconds + 1):
        now = (second + 1) * SECOND
        for number in range(rate):
            id = f"{second}.{number}"
            decision = plane.submit(Request(id, 40, 10, arrival=now, tenant=f"t{number % 2}"), now)
            running += [id] if type(decision).__name__ == "Route" else []
        for _ in range(done):
            if running:
                id = running.pop()
                plane.observe(FirstToken(id), now + 1)
                report_tokens(plane, [(id, 5)], now + 2)
                made = plane.observe(Ended(id, FinishReason.LENGTH), now + 3)
                running += [one.request for one in made if type(one).__name__ == "Route"]
        plane.observe(LoadReport("d", len(running), 0, 0.5), now + 4)
    journal.close()


def test_windows_count_what_the_control_plane_saw(tmp_path: Path) -> None:
    write(tmp_path / "j", 40)
    windows = journal_windows(tmp_path / "j")
    assert [window.arrived for window in windows] == [9, 10, 10, 10]  # the last second is no window
    assert sum(window.completed for window in windows) == 39
    assert windows[1].workers[0].kv_tokens == 1600
    assert windows[1].workers[0].kv_usage == 0.5
    diagnosis = diagnose(windows)
    assert diagnosis.findings == ()
    assert "KV exhaustion" in diagnosis.not_judged


def test_a_queue_that_grows_is_a_finding(tmp_path: Path) -> None:
    write(tmp_path / "j", 60, rate=3)
    (finding,) = diagnose(journal_windows(tmp_path / "j")).findings
    assert finding.mode == "queue build-up"


def test_a_journal_of_a_moment_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "j", 2)
    with pytest.raises(ConfigError, match="nothing can be told"):
        journal_windows(tmp_path / "j")


def test_a_line_that_was_cut_off_is_told_and_a_decision_without_a_kind_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path / "j", 20)
    text = (tmp_path / "j").read_text()
    (tmp_path / "cut").write_text(text[:-20])
    cut: list[int] = []
    assert journal_windows(tmp_path / "cut", cut.append)
    assert cut == [text.count("\n")]
    (tmp_path / "odd").write_text(text.replace('"kind":"route"', '"kin":"route"', 1))
    with pytest.raises(ConfigError, match="has no kind"):
        journal_windows(tmp_path / "odd")
