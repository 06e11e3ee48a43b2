"""What is cached under a tenure is not hit from its expiry on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Result
from pigou.kv.hashing import chain
from pigou.request import NEVER, Request

HASHES = chain(list(range(16)), 4, b"s")
EPOCH = 1_000


@dataclass
class Scene:
    core: EngineCore
    number: int = 0

    def computed(self, now: int, expiry: int) -> int:
        """Run one request at a time of the core's clock; return the tokens that it found."""
        self.number += 1
        self.core.add(Request(str(self.number), 14, 1, HASHES[:3], expiry=expiry))
        plan = self.core.schedule(now)
        self.core.apply(plan, Result())
        self.core.check_integrity()
        return plan.started[0].computed


@pytest.fixture
def scene() -> Scene:
    return Scene(EngineCore(EngineConfig(blocks=16, block_size=4, max_model_len=64), EPOCH))


def test_a_block_is_hit_before_its_expiry_and_not_after(scene: Scene) -> None:
    assert [scene.computed(now, EPOCH + 10) for now in (0, 9, 10, 11)] == [0, 12, 0, 0]


def test_what_never_expires_is_hit_at_any_time(scene: Scene) -> None:
    assert [scene.computed(now, NEVER) for now in (0, 2**60)] == [0, 12]


def test_a_request_that_waited_past_its_expiry_finds_nothing() -> None:
    scene = Scene(EngineCore(EngineConfig(blocks=16, block_size=4, max_model_len=64, max_seqs=1)))
    assert scene.computed(1, 10) == 0
    scene.core.add(Request("long", 4, 2, expiry=NEVER))
    first = scene.core.schedule(2)
    scene.core.add(Request("waits", 14, 1, HASHES[:3], expiry=10))
    scene.core.apply(first, Result())
    second = scene.core.schedule(9)
    assert not second.started
    scene.core.apply(second, Result())
    (started,) = scene.core.schedule(10).started
    assert (started.request, started.computed) == ("waits", 0)
