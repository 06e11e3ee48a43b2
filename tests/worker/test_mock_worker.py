"""A sleeping worker takes the time that a simulated one takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sleeping_clock import Clock

from pigou.cli import main
from pigou.config import ControlConfig, EngineConfig
from pigou.engine.core import EngineCore
from pigou.request import SECOND, Request, SamplingParams
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import read_fleet
from pigou.sim.network import LinkConfig
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation
from pigou.sim.timing import StepShape
from pigou.sim.timing_models import build_timing
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec
from pigou.worker.engine_thread.mock_worker import CATCH_UP, MockBackend, SimulatedLink

LAW = "law:itl_a=0.004,itl_b=0.0003,prefill=0.002,prefill_token=0.00001"
LENGTHS = [(100, 9), (700, 3), (33, 20)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pigou.worker.engine_thread.mock_worker.time", clock)
    return clock


def run(clock: Clock, between: int = 0) -> int:
    """Serve all lengths on one core, with time lost between steps; when the last step ended."""
    core = EngineCore(EngineConfig(blocks=512, max_model_len=1024, max_repeat=8))
    backend = MockBackend(build_timing(LAW, "", "", 1).timing, 16, 1000, frozenset())
    for number, (prompt, output) in enumerate(LENGTHS):
        name = str(number)
        tokens = [number + 1] * prompt
        backend.add(name, tokens, SamplingParams(max_tokens=output), seed=name.encode())
        core.add(Request(name, prompt, output))
    end = clock.now
    while core.running or core.waiting:
        plan = core.schedule(clock.now)
        for finished in core.apply(plan, backend.execute(plan)).finished:
            backend.drop(finished.request)
        end = clock.now
        clock.now += between
    return end


def simulated() -> int:
    jobs = tuple(RequestSession(0, (RequestSpec(prompt, output),)) for prompt, output in LENGTHS)
    setup = Setup(timing=LAW, blocks=512, max_model_len=1024, engine="pigou")
    found = Simulation(OpenLoop(jobs), read_fleet("1xboth"), setup, ControlConfig(),
                       ClientConfig()).run()  # fmt: skip
    assert len(found.done) == len(LENGTHS)
    return found.end_ns - found.begin_ns


def test_a_sleeping_and_a_simulated_worker_end_at_the_same_nanosecond(clock: Clock) -> None:
    assert run(clock) - SECOND == simulated()


def test_bookkeeping_between_steps_is_part_of_the_next(clock: Clock) -> None:
    assert run(clock, between=1_000_000) - SECOND == simulated()


def test_a_machine_that_does_not_keep_up_is_late(clock: Clock) -> None:
    assert run(clock, between=CATCH_UP) - SECOND > simulated() + CATCH_UP


def test_a_rest_is_no_part_of_a_step(clock: Clock) -> None:
    core = EngineCore(EngineConfig(blocks=64))
    backend = MockBackend(build_timing(LAW, "", "", 1).timing, 16, 1000, frozenset())
    for name in ("a", "b"):
        backend.add(name, [1] * 32, SamplingParams(max_tokens=1), seed=b"")
        core.add(Request(name, 32, 1))
        clock.now += CATCH_UP // 2
        asked = clock.now
        plan = core.schedule(clock.now)
        result = backend.execute(plan)
        core.apply(plan, result)
        assert clock.now == asked + int(result.durations.sum())
        backend.rest()


def test_every_step_takes_what_the_timing_model_says(clock: Clock) -> None:
    core = EngineCore(EngineConfig(blocks=64, max_repeat=8))
    timing = build_timing(LAW, "", "", 1).timing
    backend = MockBackend(timing, 16, 1000, frozenset())
    backend.add("a", [1] * 20, SamplingParams(max_tokens=9), seed=b"")
    core.add(Request("a", 20, 9))
    core.apply(plan := core.schedule(clock.now), backend.execute(plan))
    plan = core.schedule(clock.now)
    result = backend.execute(plan)
    assert result.steps == plan.repeat == 8
    batch = StepShape(plan.counts, plan.kv_lens, plan.samples)
    assert np.array_equal(result.durations, timing.durations(batch, 8))


def test_a_link_carries_one_load_after_another() -> None:
    link = SimulatedLink(LinkConfig(gbps=8.0, latency_us=50.0, sharing="fifo"), block_bytes=1000)
    assert link.send(10, 0) == 10_000 + 50_000
    assert link.send(1, 4_000) == 11_000 + 50_000
    assert link.send(1, 90_000) == 91_000 + 50_000
    link.close()


def test_what_is_on_a_link_when_it_closes_still_arrives() -> None:
    link = SimulatedLink(LinkConfig(sharing="fifo"), block_bytes=0)
    first, second = threading.Event(), threading.Event()
    link.at(0, first.set)
    assert first.wait(20)
    link.at(2**62, second.set)
    link.close()
    assert second.wait(20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timing", "law:340b"], "give overhead=0"),
        (["--timing", "laws"], "it must be roofline"),
        (["--timing", "roofline", "--timing-gpu", "C64"], "C64"),
        (
            ["--timing", LAW, "--timing-link", "gbps"],
            "with a key of: gbps, latency_us",
        ),
        (["--timing", LAW, "--timing-link", "sharing=fair"], "unknown field"),
        (["--timing", LAW, "--sleep-base", "5"], "a worker sleeps by one law"),
        (["--timing-gpu", "H100"], "timing is not given"),
        (["--timing-tp", "2"], "--timing-tp is 2"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_timing_that_cannot_be_honoured_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["worker", *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_fleet_that_starts_no_worker_takes_no_timing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--attach", "http://127.0.0.1:9", "--timing", LAW])
    assert caught.value.code == 2
    assert "no worker is started here" in capsys.readouterr().err


def test_a_worker_sleeps_and_its_loads_take_the_links_time(
    start_worker: Callable[..., Any],
) -> None:
    options = ("--timing", "law:itl_a=0.002", "--blocks", "64")
    first = start_worker(*options)
    second = start_worker(*options, "--timing-link", "gbps=0,latency_us=300000")
    prompt = list(range(5, 45))
    leg = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1, "temperature": 0}
    ticket = first.complete(prompt, **leg)["kv_transfer_params"]
    reply = second.complete(prompt, kv_transfer_params=ticket, max_tokens=3, temperature=0)
    assert reply["usage"]["completion_tokens"] == 3
    assert second.metric("pigou_kv_blocks_received_total") == 2
    waited = second.metric("vllm:time_to_first_token_seconds_sum")
    assert waited >= 0.3
