"""No kernel is compiled while requests wait."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from pigou.config import EngineConfig
from pigou.engine import kernels as engine_kernels
from pigou.engine import step_kernels
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.engine.warm import warm_up
from pigou.kv import kernels as block_kernels
from pigou.kv.hashing import chain
from pigou.request import Request

#: Only other kernels call these.
INNER = [
    "unlink", "link_after", "home", "probe", "find", "touch", "renew", "adopt", "disown",
    "uncache", "peek", "decodes", "entries", "append_blocks", "foresee", "advance", "lay",
    "give_back",
]  # fmt: skip

PROGRAM = f"""
from pigou.engine import kernels as one
from pigou.engine import step_kernels as two
from pigou.kv import kernels as other
from pigou.engine import eviction_kernels as third
from pigou.engine.warm import warm_up
warm_up()
print([name for module in (one, two, other, third) for name, each in vars(module).items()
       if hasattr(each, "signatures") and not each.signatures and name not in {INNER}])
"""


def test_warming_up_compiles_every_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_kernel_is_compiled_for_other_types() -> None:
    """Read-only, sliced or reversed hashes, and numpy integers, need no second compilation."""
    warm_up()
    hashes = chain([1] * 32, 4, b"s")
    frozen = hashes.copy()
    frozen.flags.writeable = False
    core = EngineCore(EngineConfig(blocks=32, block_size=4, max_model_len=64, max_repeat=4))
    for i, each in enumerate((hashes, frozen, hashes[::2], np.asfortranarray(hashes))):
        core.add(Request(str(i), 32, 8, each, remote=int(np.int64(9))))
        while str(i) in core:
            plan = core.schedule(0)
            for load in plan.loads:
                if len(load.blocks):
                    core.loaded(load.request, np.int32(4))  # type: ignore[arg-type]
            core.apply(plan, Result(steps=plan.repeat))
    for module in (engine_kernels, step_kernels, block_kernels):
        for name, each in vars(module).items():
            assert name in INNER or len(getattr(each, "signatures", ())) <= 1, name
