"""No kernel is compiled while requests wait."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from pigou.config import EngineConfig
from pigou.engine import (
    block_table,
    output_processing,
    scheduler,
    sequence,
    token_eviction,
)
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.engine.startup_profiling import warm_up
from pigou.kv import block_pool
from pigou.kv.hashing import chain
from pigou.request import Request

#: Modules with kernels.
MODULES = [
    block_table, output_processing, scheduler, sequence, token_eviction,
    block_pool,
]  # fmt: skip
#: Only other kernels call these.
INNER = [
    "unlink", "link_after", "home", "probe", "find", "prefetch", "rebuild", "adopt", "disown",
    "uncache", "is_cached", "peek", "find_decodes", "write_starts", "append_blocks", "look_ahead",
    "advance", "lay_out", "return_blocks", "charge", "discharge", "is_alone", "tick", "surrender",
    "rest", "heir_of", "victim_queue",
]  # fmt: skip

PROGRAM = f"""
from importlib import import_module
from pigou.engine.startup_profiling import warm_up
warm_up()
modules = [import_module(name) for name in {[module.__name__ for module in MODULES]}]
print([name for module in modules for name, each in vars(module).items()
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
    for module in MODULES:
        for name, each in vars(module).items():
            assert name in INNER or len(getattr(each, "signatures", ())) <= 1, name
