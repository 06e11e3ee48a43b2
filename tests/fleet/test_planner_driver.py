"""The planner driver: it acts through the fleet, and its failures harm nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import JournalEntry, decode, encode, planner_entry
from pigou.control.plane import ControlPlane
from pigou.control.planner.config import PlannerConfig
from pigou.control.planner.messages import Action, AddWorkers, DrainWorker, PlannerDecision
from pigou.fleet.planner_driver import PlannerDriver, profile_of
from pigou.gateway.journal import Journal
from pigou.gateway.plan_status import PlanStatus, plan_families
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.request_meter import RequestMeter
from pigou.objectives import Objectives, Slo
from pigou.request import Rehearsed, Role, Worker
from pigou.windows.planner_window import PlannerWindow, PoolWindow, WorkerState, WorkerWindow
from pigou.workload.journal_file import lines
from pigou.workload.journal_replay import replay_journal


class FakeFleet:
    """A managed fleet of one pool, which notes what it is told."""

    def __init__(self, *ids: str) -> None:
        self.ids, self.told = list(ids), list[str]()
        self.pools, self.provided, self.members, self.room = ("both",), {}, (), 3

    @property
    def size(self) -> int:
        return len(self.ids)

    def worker(self, id: str) -> Any:
        return (
            SimpleNamespace(id=id, pool="both", state=WorkerState.READY) if id in self.ids else None
        )

    def is_last_decoder(self, id: str) -> bool:
        return self.ids == [id]

    def start_refusal(self, pool: str) -> str:
        return ""

    def add(self, pool: str, now: int) -> str:
        self.ids.append(f"both-{len(self.ids)}")
        self.told.append(f"add {pool}")
        return self.ids[-1]

    def drain(self, id: str, now: int) -> None:
        if id == "both-9":
            raise RuntimeError("no such process")
        self.told.append(f"drain {id}")


class ScriptedPlanner:
    """Returns these actions, one list a tick; an exception in their place is raised."""

    name: ClassVar[str] = "scripted"

    def __init__(self, *script: tuple[Action, ...] | Exception) -> None:
        self.script = list(script)

    def observe(self, window: PlannerWindow) -> None:
        self.window = window

    def tick(self, now_ns: int) -> PlannerDecision:
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return PlannerDecision(now_ns=now_ns, planner=self.name, actions=step, shadow_price=0.5)


def config(**values: Any) -> PlannerConfig:
    return msgspec.convert({"planner": {"planner": "static"}} | values, PlannerConfig)


def driver(
    fleet: FakeFleet, max_workers: int = 3, journal: Path | None = None
) -> tuple[PlannerDriver, PlanStatus, PlaneDriver]:
    control = ControlConfig()
    written = None if journal is None else Journal(journal, control)
    plane_driver = PlaneDriver(ControlPlane(control), journal=written)
    status = PlanStatus(plane_driver.meter)
    status.begin("scripted", max_workers)
    made = PlannerDriver(config(max_workers=max_workers), fleet, plane_driver, status)  # type: ignore[arg-type]
    return made, status, plane_driver


def window(*workers: WorkerWindow) -> PlannerWindow:
    pool = PoolWindow(name="both", role=Role.BOTH, model="m", workers=workers)
    return PlannerWindow(now_ns=time.monotonic_ns(), seconds=1.0, pools=(pool,))


async def test_a_flood_of_one_tenant_buys_no_more_than_its_share_of_max_workers() -> None:
    fleet = FakeFleet("both-0", "both-1")
    made, status, plane_driver = driver(fleet, max_workers=8)
    plane_driver.meter.work_by_tenant = lambda: {"flood": 990.0, "quiet": 10.0}  # type: ignore[method-assign]
    await made.plan(ScriptedPlanner((AddWorkers("both", 6),)), window())
    assert fleet.told == 3 * ["add both"]  # half of eight, and one for the other's part
    (refusal,) = status.view()["decisions"][0]["refused"]
    assert "shares of it allow 5, as 99% of the load is tenant 'flood'" in refusal
    plane_driver.meter.work_by_tenant = lambda: {"flood": 990.0}  # type: ignore[method-assign]
    await made.plan(ScriptedPlanner((AddWorkers("both", 3),)), window())
    assert len(fleet.ids) == 8  # alone, it has all


async def test_actions_are_carried_out_and_those_that_cannot_be_say_why() -> None:
    fleet = FakeFleet("both-0", "both-9")
    made, status, _ = driver(fleet)
    planner = ScriptedPlanner(
        (AddWorkers("both", 2), DrainWorker("both-0"), DrainWorker("both-9"), DrainWorker("x"))
    )
    await made.plan(planner, window())
    assert fleet.told == ["add both", "drain both-0"]
    view = status.view()
    assert view["decisions"][0]["refused"] == [
        "both: 1 workers more than max_workers allows",
        "DrainWorker failed: no such process",
        "x is not ready",
    ]
    assert view["moves"] == {"drain_worker": 1}
    assert {alert["kind"] for alert in view["alerts"]} == {"refused"}


async def test_a_planner_that_raises_changes_nothing_and_is_asked_again() -> None:
    fleet = FakeFleet("both-0")
    made, status, _ = driver(fleet)
    planner = ScriptedPlanner(ZeroDivisionError("a / 0"), (AddWorkers("both", 1),))
    await made.plan(planner, window())
    assert fleet.told == []
    assert status.failures == 1
    assert "ZeroDivisionError: a / 0" in status.view()["alerts"][0]["text"]
    await made.plan(planner, window())
    assert fleet.told == ["add both"]
    assert status.view()["error"] is None
    assert status.view()["failures"] == 1


async def test_the_journal_has_windows_and_decisions_and_replays_to_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    made, _, plane_driver = driver(FakeFleet("both-0"), journal=path)

    started = made.describe()
    planner = started.make()
    plane_driver.write(planner_entry(started, time.monotonic_ns()))
    for _ in range(5):
        await made.plan(planner, window(WorkerWindow(id="both-0")))
    await plane_driver.stop()
    replay = replay_journal(lines(str(path)))
    assert replay.difference is None
    assert replay.windows == 5
    text = path.read_text().replace('"planner":"static","actions":[]', '"planner":"static"', 1)
    path.write_text(text)
    assert replay_journal(lines(str(path))).difference is not None


async def test_metrics_show_replicas_moves_and_prices() -> None:
    made, status, _ = driver(FakeFleet("both-0"))
    await made.plan(
        ScriptedPlanner((AddWorkers("both", 2),)),
        window(WorkerWindow(id="both-0"), WorkerWindow(id="w", state=WorkerState.DRAINING)),
    )
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in plan_families(status)
        for sample in family.samples
    }
    assert values["pigou_planner_replicas", "both", "ready"] == 1
    assert values["pigou_planner_replicas", "both", "draining"] == 1
    assert values["pigou_planner_moves_total", "add_workers"] == 2
    assert values["pigou_planner_failures_total",] == 0
    assert values["pigou_planner_shadow_price",] == 0.5


async def test_a_pool_that_cannot_start_is_an_alert() -> None:
    made, status, _ = driver(FakeFleet("both-0"))
    stuck = WorkerWindow(id="both-1", state=WorkerState.STARTING, unplaceable=True)
    await made.plan(ScriptedPlanner(()), window(stuck))
    (alert,) = status.alerts()
    assert (alert["kind"], "both-1 of pool both" in alert["text"]) == ("start", True)


def test_attainment_below_its_percentile_with_all_workers_is_an_alert() -> None:
    meter = RequestMeter(Objectives(Slo(ttft_s=0.1)))
    status = PlanStatus(meter)
    status.begin("price", 1)
    decision = PlannerDecision(now_ns=1, planner="price", shadow_price=0.0)
    now = time.monotonic_ns()
    meter._recent.extend((now, "", n < 30) for n in range(40))
    status.record(window(WorkerWindow(id="both-0")), decision, ())
    (alert,) = status.alerts()
    assert alert["kind"] == "budget"
    assert "75.0%" in alert["text"]
    meter._recent.clear()
    meter._recent.extend((now, "", True) for _ in range(40))
    assert status.alerts() == []


def test_the_view_is_json_with_holes_as_null() -> None:
    status = PlanStatus(RequestMeter(Objectives()))
    assert status.view()["planner"] is None
    decision = PlannerDecision(now_ns=1, planner="price", shadow_price=float("inf"))
    status.begin("price", 0)
    status.record(window(), decision, ())
    assert json.loads(json.dumps(status.view(), allow_nan=False))["shadow_price"] is None


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        ({"planner": "nobody"}, "nobody"),
        ({"planner": "price", "gpu_price": 0}, "gpu_price"),
        ({"planner": "price", "speed": 1}, "speed is no parameter"),
    ],
)
async def test_an_unknown_planner_or_parameter_is_refused_before_anything_starts(
    planner: dict[str, Any], message: str
) -> None:
    plane_driver = PlaneDriver(ControlPlane(ControlConfig()))
    with pytest.raises(ConfigError, match=message):
        PlannerDriver(
            config(planner=planner),
            FakeFleet(),
            plane_driver,
            PlanStatus(plane_driver.meter),  # type: ignore[arg-type]
        )


async def test_a_planner_that_needs_speeds_is_refused_where_no_worker_measured_its_own() -> None:
    plane_driver = PlaneDriver(ControlPlane(ControlConfig()))
    status = PlanStatus(plane_driver.meter)
    made = PlannerDriver(
        config(planner={"planner": "dynamo-sla"}),
        FakeFleet(),
        plane_driver,
        status,  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match="--rehearse"):
        made.start(plane_driver.background)


def test_a_profile_is_of_prompts_alone_and_of_streams_alone() -> None:
    measured = (
        Rehearsed(128, 0, 1, 0.1), Rehearsed(512, 0, 1, 0.4), Rehearsed(0, 1, 8, 0.08),
        Rehearsed(0, 16, 8, 0.4), Rehearsed(512, 4, 2, 9.0),
    )  # fmt: skip
    profile = profile_of(Worker("w", "", Role.BOTH, 16, 100, 32, rehearsed=measured))
    assert profile is not None
    assert profile.prefill == ((128.0, 0.1), (512.0, 0.4))
    assert [(streams, s) for streams, _, s in profile.decode] == [(1.0, 0.01), (16.0, 0.05)]
    assert (profile.kv_tokens, profile.max_seqs) == (1600.0, 32)
    assert profile_of(Worker("w", "", Role.BOTH, rehearsed=measured[:2])) is None


TABLES = {
    "source": "simulator", "model": "m", "gpu": "", "tp": 1, "timing": "law", "kv_tokens": 64_000,
    "max_seqs": 64, "max_batched_tokens": 2048, "overhead_s": 0.01, "transfer_token_s": 1e-6,
    "prompts": [{"isl_tokens": n, "prefill_s": n / 4000, "ttft_s": n / 4000} for n in (128, 512)],
    "decode": [
        {"concurrency": n, "streams": n, "context_tokens": 300, "itl_mean_s": 0.01 + n / 1e3,
         "itl_p95_s": 0.02, "output_tok_s": 1.0}
        for n in (1, 16)
    ],
}  # fmt: skip


async def test_tables_of_a_sweep_are_given_to_the_planner_and_stand_in_the_journal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(TABLES))
    plane_driver = PlaneDriver(ControlPlane(ControlConfig()))
    values = config(planner={"planner": "dynamo-sla"}, performance=str(path))
    status = PlanStatus(plane_driver.meter)
    made = PlannerDriver(values, FakeFleet(), plane_driver, status)  # type: ignore[arg-type]
    started = made.describe()
    entry = decode(encode(planner_entry(started, 1)))
    assert isinstance(entry, JournalEntry)
    assert entry.message == started
    assert started.make().setup.performance.keys() == {"prefill", "decode", "both"}  # type: ignore[attr-defined]


async def test_a_file_of_speeds_that_is_none_is_refused(tmp_path: Path) -> None:
    plane_driver = PlaneDriver(ControlPlane(ControlConfig()))
    status = PlanStatus(plane_driver.meter)
    for path, message in ((tmp_path / "gone", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ConfigError, match=message):
            PlannerDriver(config(performance=str(path)), FakeFleet(), plane_driver, status)  # type: ignore[arg-type]
