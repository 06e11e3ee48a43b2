"""What a workload asks of a fleet."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.capacity.plan.demand import busiest, length_classes, read_demand
from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec


def test_a_mix_keeps_its_lengths_and_shares() -> None:
    demand = read_demand("mix=0.7:512/128,0.2:4096/256,0.1:16384/512,rate=5", 1)
    assert demand.rate_rps == pytest.approx(5.0, rel=0.05)
    assert demand.classes.prompts.tolist() == [512, 4096, 16_384]
    assert demand.classes.shares == pytest.approx([0.7, 0.2, 0.1], abs=0.02)
    assert demand.max_tokens == 16_896


def test_a_shared_prefix_is_cached_but_for_its_first_time() -> None:
    demand = read_demand("mix=1:1000/10,prefix=496", 0)
    assert demand.mix.hit_rate == pytest.approx(0.496, abs=0.001)
    assert demand.rate_rps == 0.0


def test_requests_are_stretched_to_another_rate() -> None:
    demand = read_demand("mix=1:100/10,rate=4,n=200", 0)
    loop = demand.at(8.0, 100)
    assert loop.request_count == 100
    own = demand.loop.sessions[99].start_ns
    assert loop.sessions[-1].start_ns == pytest.approx(own * demand.rate_rps / 8.0)


def test_the_busiest_requests_of_a_trace_are_planned_for() -> None:
    spec = RequestSpec(100, 10)
    times = [*range(0, 100, 10), *range(100, 110), *range(120, 200, 10)]
    loop = OpenLoop(tuple(RequestSession(at * SECOND, (spec,)) for at in times))
    taken = busiest(loop, 10)
    assert [session.start_ns // SECOND for session in taken.sessions] == list(range(10))


def test_classes_keep_the_means() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(6, 1, 500).round() + 1
    outputs = rng.lognormal(4, 1, 500).round() + 1
    classes = length_classes(prompts, outputs, 0.25 * prompts)
    assert len(classes.shares) <= 48
    assert classes.shares.sum() == pytest.approx(1.0)
    assert classes.shares @ classes.prompts == pytest.approx(prompts.mean())
    assert classes.osl == pytest.approx(outputs.mean())
    assert classes.computed == pytest.approx(0.75 * classes.prompts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("closed:C=4,in=10,out=10,n=10", "users wait for answers"),
        ("mix=0.7:512/128", "add up to 0.7"),
        ("mix=1:512", "write SHARE:PROMPT/OUTPUT"),
        ("mix=1:512/128,prefix=512", "prefix is 512"),
        ("mix=1:512/128,rate=5,speed=2", "speed is no key"),
        ("mix=1:512/128,prefix=x", "prefix is 'x'"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_demand(text, 0)
