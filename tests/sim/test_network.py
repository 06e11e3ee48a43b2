"""Links: shared evenly or in turn, at both ends or at the receiver's."""

from __future__ import annotations

import pytest

from pigou.kv.resharding import split_of
from pigou.sim.network import LinkConfig, Network
from pigou.sim.virtual_clock import EPOCH, Clock, Phase


def transfers(
    sharing: str, sends: list[tuple[int, int, int, int]], shared: str = "both"
) -> list[float]:
    """Send (at ns, source, target, bytes) over links of a byte a nanosecond; return the ends."""
    clock = Clock()
    config = LinkConfig(gbps=8.0, latency_us=0.0, sharing=sharing, ends=shared)  # type: ignore[arg-type]
    network, ends = Network(config, clock), [0.0] * len(sends)
    for place, (at, source, target, size) in enumerate(sends):

        def end(now: int, place: int = place) -> None:
            ends[place] = now - EPOCH

        def send(now: int, what: tuple[int, int, int] = (source, target, size), e=end) -> None:  # type: ignore[no-untyped-def]
            network.send(*what, now, e)

        clock.at(EPOCH + at, Phase.SEND, place, send)
    while clock.step():
        pass
    return ends


def test_fair_links_share_evenly_and_fifo_links_take_turns() -> None:
    two = [(0, 0, 2, 1000), (500, 1, 2, 1000)]
    assert transfers("fair", two) == pytest.approx([1500, 2000], abs=4)
    assert transfers("fifo", two) == pytest.approx([1000, 2000], abs=4)


def test_links_work_both_ways_and_pairs_do_not_disturb_one_another() -> None:
    assert transfers("fair", [(0, 0, 1, 1000), (0, 1, 0, 1000), (0, 2, 3, 1000)]) == pytest.approx(
        [1000] * 3, abs=4
    )


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_a_sender_is_shared_only_where_both_ends_are(sharing: str) -> None:
    apart = [(0, 0, 1, 1000), (0, 0, 2, 1000)]
    assert transfers(sharing, apart, "receiver") == pytest.approx([1000, 1000], abs=4)
    assert max(transfers(sharing, apart, "both")) == pytest.approx(2000, abs=4)
    together = [(0, 0, 2, 1000), (0, 1, 2, 1000)]
    assert transfers(sharing, together, "receiver") == transfers(sharing, together, "both")


def test_the_rank_with_the_largest_part_decides_and_each_further_message_takes_its_time() -> None:
    clock, ends = Clock(), []
    config = LinkConfig(gbps=8.0, latency_us=0.0, per="gpu", message_us=1.0)
    splits = {(0, 2): split_of(8, 2, 8), (1, 2): split_of(8, 8, 8), (2, 0): split_of(8, 8, 2)}
    network = Network(config, clock, splits=lambda source, target: splits[source, target])
    for source, target in splits:
        network.send(source, target, 8000, EPOCH, lambda now: ends.append(now - EPOCH))
    while clock.step():
        pass
    # 8 ranks receive an eighth of two transfers; the first one's 2 source ranks send half each.
    assert sorted(ends) == pytest.approx([2000, 4000 + 3000, 4000 + 3000], abs=4)
