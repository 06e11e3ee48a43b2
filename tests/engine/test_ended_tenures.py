"""What an ended tenure left in the cache is reused before anything else."""

from __future__ import annotations

import pytest

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finish, Plan, Result
from pigou.kv.hashing import chain
from pigou.request import SECOND, BlockRemoved, FinishReason, KVQuota, Request

SIZE, LENGTH, UNTIL = 4, 14, 1_000 * SECOND
SALTS = {name: f"tenure1:{name * 64}:{UNTIL}" for name in "abcdef"}


class Scene:
    """A core of 16 blocks, in which each tenure's prompt has three that are cached."""

    def __init__(self, quotas: bool = False) -> None:
        self.core = EngineCore(EngineConfig(blocks=16, block_size=SIZE, max_model_len=64))
        if quotas:
            self.core.set_quotas({"t": KVQuota(floor=0.5)})
        self.now, self.removed = 0, set[tuple[int, int]]()

    def begin(self, name: str, id: str, salt: str | None = None) -> Plan:
        salt = SALTS[name] if salt is None else salt
        self.core.add(Request(id, LENGTH, 2, keys(name), expiry=UNTIL, salt=salt, tenant="t"))
        return self.core.schedule(self.now)

    def apply(self, plan: Plan, *ends: str) -> None:
        ended = [Finish(id, 1, FinishReason.STOP) for id in ends]
        self.observe(self.core.apply(plan, Result(finished=ended)))

    def observe(self, effects: object) -> None:
        for event in effects.events:
            if isinstance(event, BlockRemoved):
                self.removed |= {tuple(key) for key in event.hashes.tolist()}
        self.core.check_integrity()

    def run(self, name: str) -> int:
        """Compute one request; return the tokens that it found."""
        plan = self.begin(name, name)
        self.apply(plan)
        if name in self.core:
            self.apply(self.core.schedule(self.now))
        assert name not in self.core
        return plan.started[0].computed

    def lost(self) -> set[str]:
        """Return the tenures of which a block was removed."""
        return {name for name in SALTS if self.removed & {tuple(k) for k in keys(name).tolist()}}


def keys(name: str):  # type: ignore[no-untyped-def]
    return chain(list(range(LENGTH)), SIZE, name.encode())


@pytest.mark.parametrize("quotas", [False, True])
@pytest.mark.parametrize("at_its_ttl", [False, True])
def test_what_it_left_goes_first_and_no_other_hit_changes(quotas: bool, at_its_ttl: bool) -> None:
    scene = Scene(quotas)
    for name in "abcd":  # the last is the most recent
        assert scene.run(name) == 0
    if at_its_ttl:
        scene.core._state.tenures._tenures[SALTS["d"]].expiry = 1
        scene.core._state.tenures._due = scene.now = 1
    else:
        scene.observe(scene.core.clear_cache([SALTS["d"], SALTS["f"]]))
    assert scene.run("e") == 0
    assert scene.lost() == {"d"}
    assert [scene.run(name) for name in "abc"] == [12, 12, 12]


def test_what_runs_or_comes_late_is_freed_once_it_ends() -> None:
    scene = Scene()
    plan = scene.begin("a", "runs")
    scene.observe(scene.core.clear_cache([SALTS["a"]]))
    scene.apply(plan)
    assert "runs" in scene.core
    scene.apply(scene.core.schedule(0))
    assert (scene.core.cached_blocks, scene.core.free_blocks) == (0, 16)
    assert [scene.run("a") for _ in range(2)] == [0, 0]
    assert scene.core.cached_blocks == 0
