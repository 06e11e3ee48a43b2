"""No kernel of the control plane is compiled or loaded once requests come."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs the same seconds of a fleet again, with other lengths, names and sizes.
PROGRAM = """
import sys
from pigou.config import ControlConfig
from pigou.control import warm

config = ControlConfig(policy=sys.argv[1])
warm.warm_up(config)
import numba.core.dispatcher as dispatcher
asked, compile_ = [], dispatcher.Dispatcher.compile
def compile(self, sig):
    asked.append(self.__name__)
    return compile_(self, sig)
dispatcher.Dispatcher.compile = compile
warm._PROMPT, warm._OUTPUT, warm._REQUESTS = 20 * warm._BLOCK, 40, 64
warm._drive(config)
print(asked)
"""


@pytest.mark.parametrize("policy", ["least-loaded", "toll", "dynamo", "llm-d"])
def test_after_warming_up_nothing_is_compiled(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
