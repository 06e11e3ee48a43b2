"""Parts of the simulator: the clock's order, links, gaps, hashes, options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.experiments.fleets import fleet
from pigou.request import SECOND, Role
from pigou.sim.fleet_config import read_fleet
from pigou.sim.network import LinkConfig, Network
from pigou.sim.streams import ITLHistogram
from pigou.sim.timing import StepShape
from pigou.sim.timing_law import PRESETS, Law, LawTiming
from pigou.sim.timing_models import build_timing, capacity
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.sim.workload import RequestSpec, block_hashes


def test_events_run_by_time_then_phase_then_key() -> None:
    clock, seen = Clock(), []
    for time, phase, key in [(5, 4, 0), (5, 1, 7), (4, 9, 0), (5, 1, 2)]:
        place = (EPOCH + time, phase, key)
        clock.at(*place, lambda _, place=place: seen.append(place))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == sorted(seen)
    with pytest.raises(ValueError, match="already"):
        clock.at(EPOCH, Phase.SEND, 0, lambda _: None)


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


def test_gaps_are_known_to_a_thousandth_and_their_mean_exactly() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(17.0, 1.0, 10_000).astype(np.int64)
    gaps = ITLHistogram()
    gaps.add(values)
    assert gaps.mean() == int(values.sum()) / len(values) / SECOND
    shares = np.array([50.0, 95.0, 99.0])
    exact = np.sort(values)[np.ceil(shares / 100 * len(values)).astype(int) - 1] / SECOND
    assert gaps.percentiles(shares) == pytest.approx(exact, rel=1e-3)


def test_prompts_share_blocks_as_far_as_their_ids_are_equal() -> None:
    def hashes(ids: tuple[int, ...], tokens: int, number: int = 0, scope: int = 0) -> np.ndarray:
        return block_hashes(RequestSpec(tokens, 1, ids, scope, 512.0), number, 16)

    one, two = hashes((1, 2, 3), 1300), hashes((1, 2, 9), 1400)
    same = (one[: len(two)] == two[: len(one)]).all(axis=1)
    assert same.sum() == 64
    assert same[:64].all()
    # The same id behind other ids, or in another scope, is another block.
    assert not (hashes((7, 2), 1024)[32:] == one[32:64]).any()
    assert not (hashes((1,), 512, scope=1) == one[:32]).any()
    alone = block_hashes(RequestSpec(100, 1), 1, 16)
    assert alone.shape == (6, 2)
    assert not (alone == block_hashes(RequestSpec(100, 1), 2, 16)).any()
    assert len(np.unique(np.concatenate([one, two[64:], alone])[:, 1])) == 81 + 23 + 6


def test_a_law_adds_decodes_and_prompts() -> None:
    timing = LawTiming(Law(itl_a=0.01, itl_b=0.001, prefill=0.05, prefill_token=0.0001, mixed=0.02))

    def steps(counts: list[int], kv: list[int], repeat: int) -> list[int]:
        batch = StepShape(
            np.array(counts, np.int32), np.array(kv, np.int32), np.ones(len(counts), np.bool_)
        )
        return timing.durations(batch, repeat).tolist()

    def nanos(counts: list[int], kv: list[int]) -> int:
        return steps(counts, kv, 1)[0]

    assert nanos([1, 1], [9, 9]) == 12_000_000
    assert nanos([100], [0]) == 60_000_000
    assert nanos([100], [16]) == 10_000_000
    assert nanos([1, 100], [9, 0]) == 11_000_000 + 30_000_000
    each = [nanos([1, 100], [9 + step, 100 * step]) for step in range(3)]
    assert steps([1, 100], [9, 0], 3) == each


def test_a_small_batch_takes_its_own_time_where_it_has_one() -> None:
    law = Law(itl_a=0.02, itl_b=0.001, few=2, itl_few=0.019)
    assert [law.decode(n) for n in (1, 2, 3)] == pytest.approx([0.019, 0.019, 0.023])
    for values in ({"few": 2}, {"itl_few": 0.01}):
        with pytest.raises(ConfigError, match="few"):
            Law(itl_a=0.02, **values)


def test_presets_are_laws_and_can_be_changed() -> None:
    assert build_timing("law:340b", "", "", 1).overhead_s == PRESETS["340b"].overhead
    built = build_timing("law:70b,prefill=0.5", "", "", 1).timing
    assert isinstance(built, LawTiming)
    assert built.law.prefill == 0.5


@pytest.mark.parametrize("which", ["340b", "70b"])
def test_a_preset_has_the_blocks_of_its_fleets_workers(which: str) -> None:
    paper = fleet(f"{which}-1p2d")
    limits = {"block_size": 16, "max_batched_tokens": 2048, "max_seqs": 1024}
    given = build_timing("law:itl_a=1", "", "", 1)
    theirs = capacity(given, paper.model, "B200", paper.tp, **limits)
    preset = build_timing(f"law:{which},prefill=0.5", "", "", 1)
    assert capacity(preset, "", "", 1, **limits) == theirs
    assert capacity(preset, "llama-3.1-8b", "H100", 1, **limits) != theirs
    with pytest.raises(ConfigError, match="--blocks"):
        capacity(given, "", "", 1, **limits)


@pytest.mark.parametrize(
    ("text", "word"),
    [("law:9b", "340b"), ("law:itl_a=0", "itl_a"), ("law:340b,x=1", "x"), ("magic", "roofline"),
     ("roofline", "--model"), ("profile", "folder")],
)  # fmt: skip
def test_a_timing_that_cannot_be_had_is_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_timing(text, "", "", 1)


def test_fleets_are_read_in_short_and_from_files(tmp_path: Path) -> None:
    short = read_fleet("1p+2d")
    assert [(each.role, each.count) for each in short.workers] == [
        (Role.PREFILL, 1), (Role.DECODE, 2)
    ]  # fmt: skip
    assert read_fleet("4xboth").workers[0].count == 4
    file = tmp_path / "fleet.yaml"
    file.write_text("workers:\n  - {role: both, count: 3, slow: [{factor: 2, start: 5}]}\n")
    assert read_fleet(str(file)).workers[0].slow[0].factor == 2
    file.write_text("workers:\n  - {role: both, colour: red}\n")
    with pytest.raises(ConfigError, match="colour"):
        read_fleet(str(file))
    for text in ("4", "2q", "4xp", "0p+1d", "1p", ""):
        with pytest.raises(ConfigError, match="fleet"):
            read_fleet(text)
