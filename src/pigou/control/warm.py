"""Compiles what the control plane needs before the first request does."""

from __future__ import annotations

import numpy as np

from pigou.config import ControlConfig
from pigou.control import index
from pigou.control.messages import Ended, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import FinishReason, Request, Role, Worker


def warm_up() -> None:
    """Run every kernel of the control plane once, on planes of its own.

    Takes some seconds the first time on a machine, and a fraction of one after that.
    """
    index.warm_up()
    plane = ControlPlane(ControlConfig(policy="toll"))
    for role in Role:
        plane.observe(WorkerUp(Worker(role.value, "", role)), 0)
    keys = {16: np.arange(1, 5, dtype=np.uint64)}
    plane.submit(Request("warm", 64, 1, keys=keys), 0)
    plane.observe(Ended("warm", FinishReason.STOP), 1)
    plane.tick(2)
