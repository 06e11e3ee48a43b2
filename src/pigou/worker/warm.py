"""The first request of a process allocates and compiles; better this one than a client's."""

from __future__ import annotations

import time

from pigou.engine.core import EngineCore
from pigou.request import Request, no_hashes
from pigou.sampling import SamplingParams
from pigou.worker.backend import Backend

_TOKENS = 40
_OUTPUT = 12
_ID = "warm"


def warm_backend(core: EngineCore, backend: Backend) -> None:
    """Compute a short request on the real core, which leaves nothing behind in its cache."""
    room = min(core.config.max_model_len, core.config.blocks * core.config.block_size)
    if room <= _OUTPUT + 1:
        return
    tokens = [0] * min(_TOKENS, room - _OUTPUT)
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True)
    backend.add(_ID, tokens, params, seed=b"", hashes=no_hashes())
    core.add(Request(_ID, len(tokens), _OUTPUT))
    _run(core, backend)


def _run(core: EngineCore, backend: Backend) -> None:
    while core.running or core.waiting:
        plan = core.schedule(time.monotonic_ns())
        for finished in core.apply(plan, backend.execute(plan)).finished:
            backend.drop(finished.request)
