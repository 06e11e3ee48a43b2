"""Where workers come from: ids that are never used again, devices that are free, pools."""

from __future__ import annotations

import pytest
from tests.lib.local_workers import local_workers

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.control.planner.actuation import add_workers, carry_out
from pigou.control.planner.config import PlannerConfig
from pigou.control.planner.messages import AddWorkers, FlipRole
from pigou.fleet.config import AttachedWorker, FleetError, LocalWorker, WatchConfig
from pigou.fleet.hang_detection import HangArbiter
from pigou.fleet.live_fleet import LiveFleet
from pigou.fleet.member import MemberSetup
from pigou.fleet.planner_driver import PlannerDriver
from pigou.fleet.sources.attached import AttachedProvider
from pigou.fleet.sources.local import (
    LocalProvider,
    WorkerTemplate,
    start_workers,
)
from pigou.fleet.supervisor import FleetSetup, Supervisor
from pigou.gateway.plan_status import PlanStatus
from pigou.gateway.plane_driver import PlaneDriver
from pigou.request import Role
from pigou.windows.planner_window import WorkerState

SLEEP = ("--executor", "sleep")


def setup() -> MemberSetup:
    driver = PlaneDriver(ControlPlane(ControlConfig()))
    return MemberSetup(driver, WatchConfig(), HangArbiter(0.0))


def provider(*devices: str, start: int = 0) -> LocalProvider:
    """Return a provider of decode workers that begins with `start` of them."""
    template = WorkerTemplate(arguments=SLEEP, devices=devices)
    made = LocalProvider(setup(), [template])
    for spec in local_workers(0, start, 0, SLEEP, devices):
        made.adopt(spec)
    return made


async def test_ids_are_never_used_again() -> None:
    made = provider("cpu", start=2)
    third = made.make("decode")
    assert (third.id, third.pool, third.role) == ("decode-2", "decode", Role.DECODE)
    made.discard(third)
    assert [made.make(pool).id for pool in ("decode", "prefill", "decode")] == [
        "decode-3", "prefill-0", "decode-4",
    ]  # fmt: skip


async def test_a_pool_is_there_once_a_worker_had_its_role() -> None:
    made = provider("cpu", start=1)
    assert [pool.name for pool in made.pools] == ["decode"]
    made.discard(made.make("prefill"))
    assert [pool.name for pool in made.pools] == ["prefill", "decode"]
    assert made.start_refusal("attic") == (
        "local workers have no pool 'attic'; they are prefill, decode or both"
    )


async def test_a_gpu_takes_as_many_workers_as_it_was_given_at_the_start() -> None:
    made = provider("cuda:0", "cuda:1", "cuda:2", start=2)
    third = made.make("decode")
    assert made.device(third) == "cuda:2"
    assert made.start_refusal("decode") == "no device is free of cuda:0, cuda:1, cuda:2"
    with pytest.raises(FleetError, match="no device is free"):
        made.make("decode")
    made.discard(third)
    assert made.device(made.make("prefill")) == "cuda:2"
    shared = provider("cuda:0", start=3)
    assert shared.start_refusal("decode")


async def test_the_seconds_of_a_start_are_those_seen() -> None:
    made = provider("cpu", start=3)
    assert made.pools[0].start_up_s is None
    members = [made.make("decode") for _ in range(3)]
    for member, seconds in zip(members, (3.0, 5.0, 40.0), strict=True):
        member.start_up_s = seconds
    assert made.pools[0].start_up_s == 5.0


async def test_without_a_template_none_is_started() -> None:
    made = LocalProvider(setup())
    made.adopt(LocalWorker(id="w", role=Role.BOTH))
    assert made.start_refusal("both") == "this fleet starts no workers"


async def test_a_server_is_attached_once() -> None:
    made = AttachedProvider(setup())
    made.adopt(AttachedWorker(id="attached-0", url="http://h:1", role=Role.DECODE))
    with pytest.raises(FleetError, match="http://h:1 is attached as attached-0"):
        made.attach("http://h:1/v1")
    with pytest.raises(ConfigError, match="role is 'x'"):
        made.attach("http://h:2,role=x")
    second = made.attach("http://h:2,role=prefill")
    assert (second.id, second.pool) == ("attached-1", "prefill.attached")
    assert [pool.name for pool in made.pools] == ["prefill.attached", "decode.attached"]
    made.discard(second)
    assert made.attach("http://h:2").id == "attached-2"
    with pytest.raises(FleetError, match="attached by their URL"):
        made.make("decode.attached")


async def test_a_live_fleet_refuses_in_the_words_of_the_simulator() -> None:
    driver = PlaneDriver(ControlPlane(ControlConfig()))
    workers = [*local_workers(1, 1, 0, SLEEP, ["cpu"]), AttachedWorker.parse("http://h:1", 0)]
    supervisor = Supervisor(
        driver, FleetSetup(workers=workers, templates=[WorkerTemplate(arguments=SLEEP)])
    )
    fleet = LiveFleet(supervisor)
    assert (fleet.size, fleet.pools) == (3, ("prefill", "decode", "both.attached"))
    managed = fleet.worker("decode-0")
    assert managed is not None
    assert managed.state is WorkerState.STARTING
    assert add_workers(fleet, "both", 1, 0) == "there is no pool 'both'"
    assert add_workers(fleet, "decode", 2, 0, max_workers=4) == (
        "decode: 1 workers more than max_workers allows"
    )
    assert fleet.worker("decode-1") is not None
    assert "attached by their URL" in carry_out(AddWorkers("both.attached", 1), fleet, 0)
    flip = FlipRole("decode-0", Role.PREFILL, "prefill")
    assert carry_out(flip, fleet, 0) == "decode-0 is not ready"
    assert fleet.flip_refusal("decode-0", "decode") == "decode-0 cannot serve in pool 'decode'"
    assert fleet.flip_refusal("decode-0", "prefill.attached")
    assert fleet.flip_refusal("decode-0", "prefill") == ""


@pytest.mark.parametrize(
    ("template", "start", "room"),
    [
        (WorkerTemplate(arguments=("--threads", "2")), 1, 4),
        (WorkerTemplate(arguments=("--threads", "2")), 6, 6),
        (WorkerTemplate(arguments=SLEEP), 1, 32),
        (WorkerTemplate(devices=("cuda:0", "cuda:1", "cuda:2")), 1, 3),
    ],
    ids=["cores", "its start", "asleep", "gpus"],
)
async def test_a_planner_has_the_machines_room_by_default_and_what_is_said_otherwise(
    template: WorkerTemplate, start: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    driver = PlaneDriver(ControlPlane(ControlConfig()))
    workers = start_workers([template], {"": (0, start, 0)})
    attached = AttachedWorker.parse("http://h:1", 0)
    supervisor = Supervisor(driver, FleetSetup(workers=[*workers, attached], templates=[template]))
    fleet = LiveFleet(supervisor)
    limits = [
        PlannerDriver(
            PlannerConfig(planner={"planner": "price"}, slo="ttft=1", max_workers=given),
            fleet, driver, PlanStatus(driver.meter),
        ).max_workers
        for given in (None, 64, 0)
    ]  # fmt: skip
    assert limits == [room + 1, 64, 0]  # the attached server runs already


async def test_models_share_gpus_and_never_flip_into_one_another() -> None:
    drivers = {name: PlaneDriver(ControlPlane(ControlConfig()), model=name) for name in ("a", "b")}
    templates = [
        WorkerTemplate(arguments=SLEEP, devices=("cuda:0", "cuda:1"), model=name)
        for name in drivers
    ]
    workers = [
        templates[0].worker(Role.BOTH, 0, "cuda:0"),
        templates[1].worker(Role.BOTH, 1, "cuda:1"),
    ]
    supervisor = Supervisor(drivers["a"], FleetSetup(workers=workers, templates=templates), drivers)
    fleet = LiveFleet(supervisor)
    assert fleet.pools == ("both.a", "both.b")
    assert [pool.model for pool in fleet.provided.values()] == ["a", "b"]
    assert [member.plane_driver for member in fleet.members] == list(drivers.values())
    assert fleet.start_refusal("both.b") == "no device is free of cuda:0, cuda:1"
    assert "models are: a, b" in fleet.start_refusal("both.c")
    assert fleet.flip_refusal("both-0", "both.b") == "both-0 cannot serve in pool 'both.b'"
    assert fleet.flip_refusal("both-0", "decode.a") == ""
    # The GPU of a worker that leaves is free for the other model; ids are never used again.
    supervisor.remove(fleet.members[0])
    assert add_workers(fleet, "both.b", 1, 0, max_workers=2) == ""
    added = fleet.members[-1]
    assert (added.id, added.model, added.pool) == ("both-2", "b", "both.b")
    assert supervisor.local.device(added) == "cuda:0"
    assert added.plane_driver is drivers["b"]
    # The last worker that decodes is so for its model.
    for member in fleet.members:
        member.say("up", "")
    assert not fleet.is_last_decoder("both-1")
    supervisor.remove(added)
    assert fleet.is_last_decoder("both-1")
