"""Policies are found by name, and their order is what they say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from masked import bench, random_tokens

from pigou.config import ConfigError
from pigou.runtime.models.load import LoadedModel

Find = Callable[[str], LoadedModel]
NAMES = ["fifo", "h2o", "lru", "random", "snapkv", "streaming"]


@pytest.mark.parametrize("policy", NAMES)
def test_losses_ascend_and_the_same_course_gives_the_same_victims(
    policy: str, loaded: Find
) -> None:
    left = []
    for _ in range(2):
        b = bench(loaded("llama"), policy)
        b.start(0, random_tokens(120))
        b.run([(0, 90)])
        result = b.run([(0, 1)], to_score=np.array([[0, 16, 3]], dtype=np.int32))
        assert result.lost_returns[0].shape == (3,)
        assert (np.diff(result.lost_returns[0]) >= 0).all()
        b.run([(0, 1)], compactions=[b.compaction(0, 32, first=16)])
        left.append(b.kept(0))
        assert all(head >= set(range(16)) for layer in left[-1] for head in layer)
    assert left[0] == left[1]


@pytest.mark.parametrize("policy", ["fifo", "streaming"])
def test_the_oldest_tokens_go_whole(policy: str, loaded: Find) -> None:
    b = bench(loaded("llama"), policy)
    b.start(0, random_tokens(150))
    b.run([(0, 90)])
    for at, rest in ((91, 74), (92, 59)):
        b.run([(0, 1)], compactions=[b.compaction(0, 16)])
        kept = {0, 1, *range(at - rest + 1, at)}
        assert all(head == kept | {at - 1} for layer in b.kept(0) for head in layer)


def test_fifo_compares_requests_by_time_and_streaming_by_length(loaded: Find) -> None:
    found = {}
    for policy in ("fifo", "streaming"):
        b = bench(loaded("llama"), policy)
        b.start(0, random_tokens(60))
        b.run([(0, 58)])
        b.start(1, random_tokens(120))
        b.run([(1, 110)])
        ask = np.array([[0, 0, 1], [1, 0, 1]], dtype=np.int32)
        found[policy] = b.run([(0, 1), (1, 1)], to_score=ask).lost_returns
    assert found["fifo"][0] < found["fifo"][1]
    assert found["streaming"][0] > found["streaming"][1]


def test_the_oracle_knows_what_it_was_told(loaded: Find) -> None:
    b = bench(loaded("llama"), "oracle")
    b.start(0, random_tokens(60))
    b.run([(0, 50)])
    with pytest.raises(ConfigError, match="knows nothing"):
        b.run([], compactions=[b.compaction(0, 16)])
    b.entries[0] = 50
    b.evictor.policy.scorer = lambda entries: (entries.positions % 3 == 0) * 1.0  # type: ignore
    b.run([], compactions=[b.compaction(0, 16)])
    assert all(head >= set(range(0, 50, 3)) for layer in b.kept(0) for head in layer)


@pytest.mark.parametrize(
    ("policy", "params", "message"),
    [
        ("best", {}, "eviction.policy is 'best'; it must be one of: fifo, h2o"),
        ("h2o", {"k": 3}, "token eviction h2o: .*`k`"),
        ("snapkv", {"pool": 4}, "pool is 4; it must be odd"),
        ("lru", {"interval": 0}, "interval is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    policy: str, params: dict[str, float], message: str, loaded: Find
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(loaded("llama"), policy, params=params)
