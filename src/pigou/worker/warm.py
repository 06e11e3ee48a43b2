"""The first requests of a process compile and allocate; better these than a client's."""

from __future__ import annotations

import time

import msgspec

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.kv.hashing import chain
from pigou.request import Request
from pigou.sampling import SamplingParams
from pigou.worker.backend import Backend
from pigou.worker.sleeping import SleepingBackend, TimingLaw

_TOKENS = 40
_OUTPUT = 12
_ID = "warm"


def warm_kernels(config: EngineConfig) -> None:
    """Run requests through a core of the same options and a few blocks, without a model.

    This compiles (or loads) the kernels of prefix hits, copies, preemption and repeats.
    """
    small = msgspec.structs.replace(
        config, blocks=8, block_size=16, max_seqs=2, max_model_len=128, max_repeat=4, host_blocks=0
    )
    core = EngineCore(small)
    backend = SleepingBackend(TimingLaw(0, 0, 1e12), 16, 100, frozenset())
    for rounds in range(2):
        for name in ("a", "b"):
            _add(core, backend, f"{name}{rounds}", list(range(_TOKENS)), hashed=True)
        _run(core, backend)


def warm_backend(core: EngineCore, backend: Backend) -> None:
    """Compute a short request on the real core, which leaves nothing behind in its cache."""
    room = min(core.config.max_model_len, core.config.blocks * core.config.block_size)
    if room <= _OUTPUT + 1:
        return
    _add(core, backend, _ID, [0] * min(_TOKENS, room - _OUTPUT), hashed=False)
    _run(core, backend)


def _add(core: EngineCore, backend: Backend, id: str, tokens: list[int], hashed: bool) -> None:
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True)
    seed = b"warm" if hashed else b""
    hashes = chain(tokens, core.config.block_size, b"warm") if hashed else None
    request = Request(id, len(tokens), _OUTPUT) if hashes is None else Request(
        id, len(tokens), _OUTPUT, hashes
    )  # fmt: skip
    backend.add(id, tokens, params, seed=seed, hashes=request.hashes)
    core.add(request)


def _run(core: EngineCore, backend: Backend) -> None:
    while core.running or core.waiting:
        plan = core.schedule(time.monotonic_ns())
        for finished in core.apply(plan, backend.execute(plan)).finished:
            backend.drop(finished.request)
