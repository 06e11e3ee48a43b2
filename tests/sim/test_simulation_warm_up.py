"""No kernel is compiled, or loaded, while a simulation is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

#: A new process each: what one simulation loads would be there for the next.
PROGRAM = """
import json, sys
import msgspec
from numba.core.dispatcher import Dispatcher
from pigou.config import ControlConfig
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.simulation import warm_up
from pigou.sim.workload import RequestLengths, renewal

given = json.loads(sys.argv[1])
fleet = msgspec.convert(given["fleet"], FleetConfig)
setup = msgspec.convert(given["setup"], Setup)
limits = {"max_inflight": UNLIMITED, "max_inflight_tokens": UNLIMITED}
control = msgspec.convert(limits | given["control"], ControlConfig)
warm_up(fleet, setup, control)
made, compile = [], Dispatcher.compile

def count(kernel, signature):
    made.append(f"{kernel.py_func.__module__}.{kernel.py_func.__qualname__}{signature}")
    return compile(kernel, signature)

Dispatcher.compile = count
lengths = RequestLengths(input=(40, 3000), output=(1, 200), templates=30)
load = renewal(lengths, 12.0, 1.5, 400, 0.0, seed=1)
result = Simulation(load, fleet, setup, control, ClientConfig()).run()
assert len(result.runs) == 400
print(json.dumps(made))
"""
H200 = {"model": "llama-3.1-8b", "gpu": "h200"}
TIER = [{"name": "host", "gib": 1}]
CASES: dict[str, dict[str, Any]] = {
    "toll": {"setup": H200, "control": {"policy": "toll"}},
    "dynamo": {"setup": H200 | {"max_batched_tokens": 8192}, "control": {"policy": "dynamo"}},
    "pressure": {
        "setup": H200 | {"blocks": 400, "engine": "pigou"},
        "control": {"policy": "toll", "temperature": 0.2, "max_inflight": 8},
        "fleet": {"workers": [{"role": "both", "count": 2, "block_size": 64}]},
    },
    "apart": {
        "setup": H200 | {"blocks": 900, "engine": "pigou", "tiers": TIER},
        "control": {"policy": "toll"},
        "fleet": {"workers": [{"role": "prefill", "count": 1}, {"role": "decode", "count": 2}]},
    },
}


@pytest.mark.parametrize(
    "case", ["toll", *(pytest.param(each, marks=pytest.mark.slow) for each in list(CASES)[1:])]
)
def test_all_kernels_are_there_before_the_time_is_taken(case: str) -> None:
    given = {"fleet": {"workers": [{"role": "both", "count": 3}]}} | CASES[case]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(given)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
