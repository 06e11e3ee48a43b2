"""PathTimes: the quickest backend of a host is taken, and little is spent on finding it."""

from __future__ import annotations

from random import Random

import pytest

from pigou.worker.kv_transfer.receiver import EXPLORED_SHARE, TRIES, PathTimes

MB = 1 << 20


def drive(
    times: PathTimes, laws: dict[str, tuple[float, float]], pulls: int, seed: int = 0,
    host: str = "h",
) -> tuple[dict[str, int], float, float]:  # fmt: skip
    """Pull by what is first each time; return uses, seconds, and those of the best each time."""
    rng, uses, total_s, best_s = Random(seed), dict.fromkeys(laws, 0), 0.0, 0.0
    for _ in range(pulls):
        size = rng.choice([1, 4, 16, 64]) * MB
        took = {name: base + size * per_byte for name, (base, per_byte) in laws.items()}
        name = times.order(host, list(laws), size)[0]
        times.add(host, name, size, took[name] * rng.uniform(0.9, 1.1))
        uses[name] += 1
        total_s, best_s = total_s + took[name], best_s + min(took.values())
    return uses, total_s, best_s


@pytest.mark.parametrize("quick", ["shm", "tcp", "nixl"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickest_is_used_and_the_others_cost_a_small_share(quick: str, seed: int) -> None:
    laws = {name: (0.002, 2e-9 if name == quick else 6e-9) for name in ("nixl", "shm", "tcp")}
    times = PathTimes()
    drive(times, laws, 3 * TRIES + 1, seed)
    uses, total_s, best_s = drive(times, laws, 1000, seed + 10)
    assert uses[quick] > 900
    assert total_s <= best_s * (1 + 2 * EXPLORED_SHARE)


def test_small_pulls_go_by_the_one_and_large_pulls_by_the_other() -> None:
    laws = {"nixl": (0.02, 1e-9), "tcp": (0.001, 4e-9)}
    times = PathTimes()
    drive(times, laws, 300)
    assert times.order("h", ["nixl", "tcp"], MB)[0] == "tcp"
    assert times.predict("h", "nixl", 64 * MB) == pytest.approx(0.087, rel=0.2)
    assert times.predict("h", "tcp", 64 * MB) == pytest.approx(0.27, rel=0.2)


def test_a_link_that_became_quicker_is_noticed() -> None:
    times = PathTimes()
    drive(times, {"nixl": (0.001, 3e-9), "tcp": (0.001, 2e-9)}, 200)
    uses, _, _ = drive(times, {"nixl": (0.001, 1e-9), "tcp": (0.001, 2e-9)}, 300, seed=1)
    assert uses["nixl"] > 150


def test_hosts_are_told_apart_and_only_so_many_are_remembered() -> None:
    times = PathTimes()
    for host, quick in (("near", "shm"), ("far", "tcp")):
        laws = {name: (0.0, 1e-9 if name == quick else 3e-9) for name in ("shm", "tcp")}
        drive(times, laws, 50, host=host)
        best_s = times.predict(host, quick, MB)
        assert best_s is not None
        assert best_s < 0.002
    for number in range(2000):
        times.order(f"forged-{number}", ["tcp"], MB)
    assert times.predict("near", "shm", MB) is None


def test_a_backend_that_fails_is_put_last_for_longer_each_time() -> None:
    times = PathTimes()
    pauses = []
    for _ in range(4):
        times.fail("h", "nixl")
        pulls = 0
        while times.order("h", ["nixl", "tcp"], MB)[0] != "nixl":
            times.add("h", "tcp", MB, 0.001)
            pulls += 1
        pauses.append(pulls)
    assert pauses == [8, 16, 32, 64]
    assert set(times.order("h", ["nixl", "tcp"], MB)) == {"nixl", "tcp"}
