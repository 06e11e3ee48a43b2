"""No kernel of the control plane is compiled or loaded once requests come."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs the same seconds of a fleet again, with other lengths, names and sizes.
PROGRAM = """
import sys
from pigou.config import ControlConfig
from pigou.control import warm_up

config = ControlConfig(policy=sys.argv[1])
warm_up.warm_up(config)
import gc
from numba.core.dispatcher import Dispatcher
kernels = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
assert len(kernels) > 20
before = {each: set(each.overloads) for each in kernels}
warm_up._PROMPT, warm_up._OUTPUT, warm_up._REQUESTS = 20 * warm_up._BLOCK, 40, 64
warm_up._drive(config)
plane = warm_up.ControlPlane(config)  # requests whose blocks are not known
for number, role in enumerate(warm_up.Role):
    plane.observe(warm_up.WorkerUp(warm_up._worker(role, number)), 0)
plane.submit(warm_up.Request("none", 100, 10, keys={}), 1)
plane.submit(warm_up.Request("other", 100, 10, keys={7: warm_up.np.ones(9, dtype="u8")}), 2)
print([(each.__name__, sig) for each in kernels for sig in set(each.overloads) - before[each]])
"""


@pytest.mark.parametrize(
    "policy",
    ["toll", *(pytest.param(each, marks=pytest.mark.slow) for each in
               ("least-loaded", "dynamo", "llm-d"))],
)  # fmt: skip
def test_after_warming_up_nothing_is_compiled(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
