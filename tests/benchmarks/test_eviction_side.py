"""Pigou's side of benchmarks/token_eviction/quality.py: what it shows is what the executor did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.peers import PeerMissing
from benchmarks.token_eviction.budget import budget
from benchmarks.token_eviction.kvpress_peer import KvpressPeer
from benchmarks.token_eviction.metrics import kept_mass, present
from benchmarks.token_eviction.pigou_side import WITHIN, PigouSide
from benchmarks.token_eviction.reference import prepare
from benchmarks.token_eviction.task import Prepared, Task
from pigou.models import bundled_path
from tools.make_random_checkpoint import Shape, write_checkpoint

LENGTH, SINKS, RECENT = 256, 4, 16
SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=640)
ENTRY = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """A stream, and a prompt that is cut, of a random model."""
    folder = tmp_path_factory.mktemp("eviction")
    write_checkpoint(folder / "model", SHAPE, dtype="float32")
    tokens = np.random.default_rng(0).integers(600, size=(2, LENGTH))
    model = str(folder / "model")
    return {
        "streamed": prepare(
            Task("streamed", model, LENGTH, 0, 16, 192, 8), tokens, folder / "streamed"
        ),
        "cut": prepare(Task("cut", model, LENGTH, 224, 16, 224, 8), tokens, folder / "cut"),
    }


@pytest.fixture(scope="module")
def side() -> PigouSide:
    return PigouSide(sinks=SINKS, recent=RECENT, rows=2)


@pytest.mark.parametrize("name", ["streamed", "cut"])
def test_the_full_cache_gives_what_transformers_gives(
    tasks: dict[str, Prepared], side: PigouSide, name: str
) -> None:
    found = side.run(tasks[name], "full", budget(tasks[name].task, 0.5))
    assert found.kl.max() < 1e-6
    np.testing.assert_allclose(found.mass, 1.0, atol=1e-5)
    assert found.peak_bytes == LENGTH * ENTRY


@pytest.mark.slow
def test_a_streamed_row_never_holds_more_than_its_budget_and_always_as_much(
    tasks: dict[str, Prepared], side: PigouSide
) -> None:
    most = budget(tasks["streamed"].task, 0.5)
    found = side.run(tasks["streamed"], "random", most)
    assert found.peak_bytes == found.mean_bytes == most.most * ENTRY == LENGTH // 2 * ENTRY
    within = side.run(tasks["streamed"], "random" + WITHIN, most)
    assert within.peak_bytes + within.side_bytes <= most.most * ENTRY


def test_streaming_keeps_sinks_and_a_window(tasks: dict[str, Prepared], side: PigouSide) -> None:
    prepared = tasks["cut"]
    most = budget(prepared.task, 0.25)
    found = side.run(prepared, "streaming", most)
    window = range(224 - (most.most - SINKS), 224)
    for index, at in enumerate(prepared.task.asked):
        kept = np.array([*range(SINKS), *window, *range(224, at + 1)])
        flags = present(np.broadcast_to(kept, (2, 2, 2, len(kept))), LENGTH)
        expected = kept_mass(prepared.attention[:, index], flags)
        np.testing.assert_allclose(found.mass[:, index], expected, atol=1e-6)


@pytest.mark.slow
def test_who_knows_the_future_keeps_more_of_it(tasks: dict[str, Prepared], side: PigouSide) -> None:
    most = budget(tasks["cut"].task, 0.25)
    oracle, chance = (side.run(tasks["cut"], name, most).mass for name in ("oracle", "random"))
    assert oracle.mean() > chance.mean()


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvpressPeer]:
    """The real kvpress; skips with the reason when there is none."""
    folder = tmp_path_factory.mktemp("kvpress")
    try:
        started = KvpressPeer(folder, sinks=SINKS, recent=RECENT, rows=2)
    except PeerMissing as missing:
        pytest.skip(str(missing))
    yield started
    started.close()


@pytest.mark.parametrize("task", ["streamed", "cut"])
@pytest.mark.parametrize(
    ("press", "policy"),
    [("full", "full"), ("oracle +window", "oracle"), ("streaming", "streaming")],
)
def test_both_sides_find_the_same_where_both_keep_the_same(
    tasks: dict[str, Prepared], side: PigouSide, peer: KvpressPeer,
    task: str, press: str, policy: str,
) -> None:  # fmt: skip
    if (task, press) == ("streamed", "streaming"):
        press = "streaming +window"  # as shipped it forgets the order of entries
    most = budget(tasks[task].task, 0.5)
    theirs, ours = peer.run(tasks[task], press, most.most), side.run(tasks[task], policy, most)
    np.testing.assert_allclose(ours.nll, theirs.nll, atol=1e-4)
    np.testing.assert_allclose(ours.mass, theirs.mass, atol=1e-5)
    assert ours.peak_bytes == theirs.peak_bytes


def test_a_policy_that_hears_logits_reads_on_the_bundled_model(
    tmp_path: Path, side: PigouSide
) -> None:
    task = Task("streamed", str(bundled_path()), 128, 0, 16, 96, 8)
    tokens = np.random.default_rng(0).integers(2, 2000, size=(1, 128))
    prepared = prepare(task, tokens, tmp_path / "task")
    found = side.run(prepared, "paper-lossy", budget(task, 0.5))
    assert np.isfinite(found.kl).all()
    assert 0 < found.mass.mean() < 1
