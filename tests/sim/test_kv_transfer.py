"""Reading from another worker's cache under the virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
from setups import (
    FleetConfig,
    LinkConfig,
    Outage,
    WorkerGroup,
    differences,
    open_loop,
    run,
)

from pigou.config import ConfigError
from pigou.request import Role
from pigou.sim.result import SimulationResult
from pigou.sim.workload import RequestLengths, renewal

#: Six prompts of 400 to 1,000 tokens, asked again and again, of workers in turn.
LONG = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.0005"


def fleet(link: LinkConfig | None = None, count: int = 2, **more: Any) -> FleetConfig:
    members = (WorkerGroup(count=count, role=Role.BOTH, **more),)
    return FleetConfig(workers=members, link=link or LinkConfig())


def ran(config: FleetConfig | str, *, policy: str = "round-robin", stepwise: bool = False,
        rate: float = 4.0, **setup: Any) -> SimulationResult:  # fmt: skip
    given = {"timing": LONG, "engine": "pigou", "model": "llama-3.1-8b"} | setup
    return run(
        open_loop(rate, 80, 6), config, control={"policy": policy}, setup=given, stepwise=stepwise
    )


def test_what_another_worker_has_is_read_and_sooner_there_than_computed() -> None:
    without = ran(fleet(), peer_reads=False)
    with_ = ran(fleet(), peer_reads=True)
    assert without.document()["peer_reads"] == {"count": 0, "tokens": 0, "failed": 0}
    reads = with_.document()["peer_reads"]
    assert reads["count"] >= 5
    assert with_.transfers[0] >= reads["count"]
    assert with_.document()["ttft_s"]["mean"] < 0.9 * without.document()["ttft_s"]["mean"]
    for one, other in zip(with_.runs, without.runs, strict=True):
        assert (one.outcome, one.output_tokens) == (other.outcome, other.output_tokens)


def test_a_slow_link_is_tried_and_then_left_alone() -> None:
    slow = ran(fleet(LinkConfig(gbps=0.5)), rate=1.0).document()
    quick = ran(fleet(LinkConfig(gbps=400)), rate=1.0).document()
    assert 1 <= slow["peer_reads"]["count"] < quick["peer_reads"]["count"]


@pytest.mark.parametrize("engine", ["vllm", "pigou"])
def test_a_vllm_lends_nothing_unless_it_is_supposed(engine: str) -> None:
    count = ran(fleet(), engine=engine).document()["peer_reads"]["count"]
    assert (count > 0) == (engine == "pigou")
    assert ran(fleet(), engine=engine, peer_reads=True).document()["peer_reads"]["count"] > 0


@pytest.mark.parametrize("policy", ["round-robin", "toll"])
@pytest.mark.parametrize("config", [fleet(count=3), "2p+2d"])
def test_plans_of_many_steps_read_as_single_steps_do(policy: str, config: Any) -> None:
    one = ran(config, policy=policy, rate=12.0)
    other = ran(config, policy=policy, rate=12.0, stepwise=True)
    assert one.reads[0] > 0
    assert differences(one, other) == {}


@pytest.mark.parametrize("detect_ms", [0.0, 400.0])
def test_nothing_is_lost_when_workers_die_amid_reading(detect_ms: float) -> None:
    config = FleetConfig(
        workers=(
            WorkerGroup(count=1, fails=(Outage(start=2.0, end=3.0), Outage(start=5.0, end=5.5))),
            WorkerGroup(count=2, fails=(Outage(start=4.0, end=4.5),)),
        ),
        link=LinkConfig(gbps=5.0),
        detect_ms=detect_ms, leg_ms=2.0,
    )  # fmt: skip
    result = ran(config, rate=12.0)
    assert all(request.output_tokens == request.spec.output_tokens for request in result.runs)
    assert result.reads[0] > 0


def test_between_workers_of_different_tp_the_slowest_gpu_link_decides() -> None:
    """Of 8 KV heads, 2 prefill GPUs send 4 each, to 8 decode GPUs in 4 messages each."""

    def decoded_ns(tp: int, **link: Any) -> int:
        groups = (WorkerGroup(role=Role.PREFILL, tp=2), WorkerGroup(role=Role.DECODE, tp=tp))
        config = FleetConfig(workers=groups, link=LinkConfig(gbps=8.0, **link))
        lone = renewal(RequestLengths(input=(321, 321), output=(2, 2)), 1.0, 0.0, 1, 0.0, 0)
        (request,) = run(lone, config, setup={"timing": LONG, "model": "llama-3.1-8b"}).runs
        return request.ended_ns

    size_ns = 320 * 131_072  # a byte a nanosecond
    whole, halved, equal = (
        decoded_ns(8), decoded_ns(8, per="gpu", message_us=100.0), decoded_ns(2, per="gpu"),
    )  # fmt: skip
    assert whole - halved == pytest.approx(size_ns / 2 - 3 * 100_000, abs=10)
    assert whole - equal == pytest.approx(size_ns / 2, abs=10)


@pytest.mark.parametrize(
    ("model", "tp", "says"),
    [("", 2, "also give --model"), ("llama-3.1-8b", 3, "prefill: tp is 3; it must divide, or be")],
)
def test_links_of_gpus_need_kv_heads_that_can_be_divided(model: str, tp: int, says: str) -> None:
    groups = (WorkerGroup(role=Role.PREFILL, tp=tp), WorkerGroup(role=Role.DECODE))
    with pytest.raises(ConfigError, match=says):
        run(open_loop(), FleetConfig(workers=groups, link=LinkConfig(per="gpu")),
            setup={"model": model})  # fmt: skip
