"""What an ended tenure left in the cache is reused before anything else."""

from __future__ import annotations

import pytest

from pigou.config import EngineConfig, KVQuota
from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Plan, Result
from pigou.kv.hashing import chain
from pigou.request import SECOND, BlockHashes, BlockRemoved, Request

SIZE, LENGTH = 4, 14
ENDS = {name: SECOND if name == "d" else 99 * SECOND for name in "abcdef"}
SALTS = {name: f"tenure1:{name * 64}:{end}" for name, end in ENDS.items()}


class Scene:
    """A core of 13 blocks, which four prompts of three full blocks each nearly fill."""

    def __init__(self, quotas: bool = False) -> None:
        self.core = EngineCore(EngineConfig(blocks=13, block_size=SIZE, max_model_len=64))
        if quotas:
            self.core.set_quotas({"t": KVQuota(floor=0.5)})
        self.now, self.removed = 0, set[tuple[int, int]]()

    def begin(self, name: str) -> Plan:
        salt, expiry = SALTS[name], ENDS[name]
        self.core.add(Request(name, LENGTH, 2, keys(name), expiry=expiry, salt=salt, tenant="t"))
        return self.core.schedule(self.now)

    def apply(self, plan: Plan) -> None:
        self.observe(self.core.apply(plan, Result()))

    def observe(self, effects: Effects) -> None:
        for event in effects.events:
            if isinstance(event, BlockRemoved):
                self.removed |= {tuple(key) for key in event.hashes.tolist()}
        self.core.check_integrity()

    def run(self, name: str) -> int:
        """Compute one request; return the tokens that it found."""
        plan = self.begin(name)
        self.apply(plan)
        if name in self.core:
            self.apply(self.core.schedule(self.now))
        assert name not in self.core
        return plan.started[0].computed

    def lost(self) -> set[str]:
        """Return the tenures of which a block was removed."""
        return {name for name in SALTS if self.removed & {tuple(k) for k in keys(name).tolist()}}


def keys(name: str) -> BlockHashes:
    return chain(list(range(LENGTH)), SIZE, name.encode())


@pytest.mark.parametrize("quotas", [False, True])
@pytest.mark.parametrize("at_its_ttl", [False, True])
def test_what_it_left_goes_first_and_no_other_hit_changes(quotas: bool, at_its_ttl: bool) -> None:
    scene = Scene(quotas)
    for name in "abcd":  # the last is the most recent
        assert scene.run(name) == 0
    if at_its_ttl:
        scene.now = SECOND
    else:
        scene.observe(scene.core.clear_cache([SALTS["d"], SALTS["f"]]))
    assert scene.run("e") == 0
    assert scene.lost() == {"d"}
    assert [scene.run(name) for name in "abc"] == [12, 12, 12]


def test_what_runs_or_comes_late_is_freed_once_it_ends() -> None:
    scene = Scene()
    plan = scene.begin("a")
    scene.observe(scene.core.clear_cache([SALTS["a"]]))
    scene.apply(plan)
    assert "a" in scene.core
    scene.apply(scene.core.schedule(0))
    assert (scene.core.cached_blocks, scene.core.free_blocks) == (0, 13)
    assert [scene.run("a") for _ in range(2)] == [0, 0]
    assert scene.core.cached_blocks == 0
