"""Messages, objectives and budgets of the planner: what they read, refuse and carry."""

from __future__ import annotations

import msgspec
import pytest

from pigou.config import ConfigError
from pigou.control.planner.config import RequestClassConfig
from pigou.control.planner.messages import AddWorkers, DrainWorker, PlannerDecision
from pigou.control.planner.planner import PlannerSetup
from pigou.objectives import Budget, ProvisioningTimes, Slo, WorkloadClass
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)


def test_an_objective_is_read_as_the_command_line_gives_it() -> None:
    assert Slo.parse("ttft=0.5,itl=0.03") == Slo(ttft_s=0.5, itl_s=0.03, percentile=95.0)
    assert Slo.parse("itl=0.03, percentile=99%").share == 0.99
    assert Slo.parse("ttft=500ms,tpot=40 ms") == Slo(ttft_s=0.5, itl_s=0.04)
    assert Slo.parse("ttft=200s") == Slo(ttft_s=200.0)
    assert Slo.parse("ttft=1e-2").ttft_s == 0.01


@pytest.mark.parametrize("text", ["ttft=500", "itl=40", "tpot=40.0", "ttft=1,itl=30"])
def test_seconds_that_look_like_milliseconds_are_asked_back(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write .*ms, or .*s if seconds are meant"):
        Slo.parse(text)


def test_a_class_reads_latencies_as_the_fleets_objective_does() -> None:
    config = RequestClassConfig(name="chat", ttft="500ms", tpot=0.04)
    assert config.workload_class.slo == Slo(ttft_s=0.5, itl_s=0.04)
    with pytest.raises(ConfigError, match="ttft is 500"):
        RequestClassConfig(name="chat", ttft=500)
    with pytest.raises(ConfigError, match="give one"):
        RequestClassConfig(name="chat", itl=0.04, tpot=0.04)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=0", "ttft=nan", "ttft=-1", "speed=3", "ttft=1,ttft=2", "ttft=fast",
     "ttft=5min", "ttft=0ms", "itl=1,tpot=1",
     "ttft=1,percentile=100"],
)  # fmt: skip
def test_another_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Slo.parse(text)


def test_a_request_without_a_first_token_is_outside_and_one_token_has_no_gap() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.05)
    assert slo.attained(1.0, 0.05)
    assert slo.attained(0.5, None)
    assert not slo.attained(None, 0.01)
    assert not slo.attained(float("nan"), 0.01)
    assert not slo.attained(0.5, 0.051)


def test_a_request_belongs_to_a_class_that_it_fits_in_all() -> None:
    chat = WorkloadClass(name="chat", header="x-class=chat", max_prompt_tokens=100)
    assert chat.matches({"x-class": "chat"}, "", "any", 100)
    assert not chat.matches({"x-class": "chat"}, "", "any", 101)
    assert not chat.matches({}, "", "any", 10)
    assert not WorkloadClass(key="a").matches({}, "b", "", 1)
    setup = PlannerSetup(slo=Slo(ttft_s=2), classes=(chat,))
    assert setup.class_of("chat") is chat
    assert setup.class_of("other").slo.ttft_s == 2


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Budget, {"max_gpus": -1}), (Budget, {"pool_gpus": {"p": -1}}),
        (ProvisioningTimes, {"start_up_s": float("nan")}), (ProvisioningTimes, {"flip_s": -1}),
        (WorkloadClass, {"weight": 0}), (WorkloadClass, {"header": "x"}),
        (WorkloadClass, {"min_prompt_tokens": 9, "max_prompt_tokens": 8}),
    ],
)  # fmt: skip
def test_limits_that_mean_nothing_are_refused(
    kind: type[msgspec.Struct], values: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"must be|give"):
        kind(**values)


def test_a_worker_that_starts_counts_as_supply_for_three_start_ups() -> None:
    assert ProvisioningTimes(start_up_s=100).patience_s == 300
    assert ProvisioningTimes(start_up_s=1).patience_s == 30
    assert ProvisioningTimes(give_up_s=5).patience_s == 5


def test_a_pool_counts_its_workers_by_state_and_all_of_their_gpus() -> None:
    workers = (
        WorkerWindow(id="a"),
        WorkerWindow(id="b", state=WorkerState.STARTING, since_ns=5 * SECOND, unplaceable=True),
        WorkerWindow(id="c", state=WorkerState.STARTING, since_ns=7 * SECOND),
        WorkerWindow(id="d", state=WorkerState.DRAINING),
    )
    pool = PoolWindow(name="p", role=Role.PREFILL, gpus=2, workers=workers)
    assert (pool.ready, pool.starting, pool.draining) == (1, 2, 1)
    assert pool.used_gpus == 8


def test_windows_and_decisions_survive_a_journal() -> None:
    pool = PoolWindow(name="d", role=Role.DECODE, workers=(WorkerWindow(id="w", running=3),))
    window = PlannerWindow(now_ns=5, seconds=1.0, loads=(LoadWindow(arrivals=2),), pools=(pool,))
    decision = PlannerDecision(
        now_ns=5, planner="price", actions=(AddWorkers("d", 2), DrainWorker("w"))
    )
    for message in (window, decision):
        line = msgspec.json.encode(message)
        assert msgspec.json.decode(line, type=PlannerWindow | PlannerDecision) == message
    assert window.models == ("",)
