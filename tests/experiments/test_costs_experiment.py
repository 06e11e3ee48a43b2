"""The experiment about costs searches goodputs, and judges claims by them."""

from __future__ import annotations

import pytest

from pigou.sim.setup import Setup
from pigou.sim.workload import RequestLengths
from pigou_lab.experiments.costs import CostCase, goodput, verdict


@pytest.mark.slow
def test_goodput_is_lower_under_a_tighter_objective_and_costs_more() -> None:
    setup = Setup(model="llama-3.1-8b", gpu="H100", prices="default")
    lengths = RequestLengths(input=(200, 400), output=(20, 40))
    cases = [
        CostCase("1xboth", setup, lengths, f"ttft=0.5,itl={itl_s}", 20.0, 3.0)
        for itl_s in (0.008, 0.02)
    ]
    tight, loose = (goodput(case, 1) for case in cases)
    assert 0.0 < tight.rate_rps < loose.rate_rps
    assert tight.usd_per_million > loose.usd_per_million


@pytest.mark.slow
def test_an_objective_that_nobody_attains_has_no_goodput() -> None:
    setup = Setup(model="llama-3.1-8b", gpu="H100", prices="default")
    lengths = RequestLengths(input=(200, 400), output=(20, 40))
    found = goodput(CostCase("1xboth", setup, lengths, "ttft=0.5,itl=0.001", 20.0, 3.0), 1)
    assert found.rate_rps == 0.0
    assert found.usd_per_million == float("inf")


def test_the_verdict_has_the_best_split_and_the_largest_step() -> None:
    rows = [
        {"concurrency": 1, "contender": name, "itl_slo_s": 0.015, "goodput_ratio": ratio}
        for name, ratio in (("10xboth", 1.0), ("3p+7d", 1.1), ("4p+6d", 1.2))
    ]
    rows.append({"concurrency": 2, "contender": "m 1p+3d", "itl_slo_s": 0.02, "goodput_ratio": 2.7})
    rows.append({"concurrency": 3, "contender": "1xboth", "itl_slo_s": 0.03, "price_ratio": 0.5})
    found = verdict(rows)
    assert found["split_at_itl_0.015"] == {"best": "4p+6d", "ratio": 1.2, "30+70": 1.1}
    assert found["throughput_m"] == 2.7
    assert found["largest_step_of_20_ms"] == pytest.approx(2.0)
    assert found["utilisation_alone"] == pytest.approx(0.5556, abs=1e-4)
