"""The laws of a rolling update, and each bug that other systems' had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.fleet.kubernetes.rollout import (
    RolloutState,
    RolloutStep,
    VersionReplicas,
    next_step,
    resolved,
)

Counts = dict[str, int]


class Cluster:
    """Workers by version, all ready at once unless a test says otherwise."""

    def __init__(self, target: Counts, old: Counts, **options: int) -> None:
        self.target, self.wanted = target, "b"
        self.replicas: dict[str, Counts] = {"a": dict(old), "b": dict.fromkeys(target, 0)}
        self.unready: dict[str, Counts] = {}
        self.surge, self.unavailable = options.pop("surge", 1), options.pop("unavailable", 0)
        self.gpus = options.pop("gpus", 1_000)
        self.unschedulable = bool(options.pop("unschedulable", False))
        self.initial = dict(old)
        assert not options

    def state(self) -> RolloutState:
        versions = [
            VersionReplicas(version=name, replicas=dict(counts), ready={
                r: max(0, n - self.unready.get(name, {}).get(r, 0)) for r, n in counts.items()})
            for name, counts in self.replicas.items()
        ]  # fmt: skip
        used = sum(sum(counts.values()) for counts in self.replicas.values())
        return RolloutState(
            target=self.target, new=next(v for v in versions if v.version == self.wanted),
            old=tuple(v for v in versions if v.version != self.wanted), initial=self.initial,
            surge=self.surge, unavailable=self.unavailable, gpus=dict.fromkeys(self.target, 1),
            free_gpus=self.gpus - used, unschedulable=self.unschedulable,
        )  # fmt: skip

    def step(self) -> RolloutStep:
        step = next_step(self.state())
        if step.state == "scale":
            self.replicas.update({self.wanted: dict(step.new), **step.old})
        return step

    def run(self) -> list[dict[str, Counts]]:
        history = [{name: dict(counts) for name, counts in self.replicas.items()}]
        for _ in range(500):
            if self.step().state != "scale":
                return history
            history.append({name: dict(counts) for name, counts in self.replicas.items()})
        raise AssertionError("the update does not end")

    def ready(self, role: str) -> int:
        state = self.state()
        return sum(v.ready.get(role, 0) for v in (state.new, *state.old))

    def total(self, role: str) -> int:
        return sum(counts.get(role, 0) for counts in self.replicas.values())


def test_the_vector_of_the_disaggregated_set() -> None:
    cluster = Cluster({"p": 5, "d": 2}, {"p": 5, "d": 2}, surge=2, unavailable=1)
    steps = [(s["b"]["p"], s["b"]["d"], s["a"]["p"], s["a"]["d"]) for s in cluster.run()]
    assert steps == [
        (0, 0, 5, 2), (2, 1, 5, 2), (2, 1, 4, 2), (2, 1, 3, 2), (4, 2, 3, 2), (4, 2, 2, 1),
        (5, 2, 2, 1), (5, 2, 0, 0),
    ]  # fmt: skip
    assert cluster.step().state == "done"


FLEETS = st.fixed_dictionaries({"p": st.integers(1, 9), "d": st.integers(1, 9)})
LIMITS = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)


@given(FLEETS, FLEETS, LIMITS)
def test_an_update_ends_within_its_limits_and_keeps_the_ratio(
    target: Counts, old: Counts, limits: tuple[int, int]
) -> None:
    surge, unavailable = limits
    cluster = Cluster(target, old, surge=surge, unavailable=unavailable)
    widest = max(*target.values(), *old.values())
    steps = -(-widest // (surge or max(1, unavailable)))
    for _ in range(500):
        ready = {r: cluster.ready(r) for r in target}
        totals = {r: cluster.total(r) for r in target}
        step = cluster.step()
        if step.state == "done":
            break
        assert step.state == "scale", step
        new = cluster.replicas["b"]
        for role, goal in target.items():
            assert cluster.ready(role) >= min(goal - unavailable, ready[role])
            assert cluster.total(role) <= max(goal + surge, totals[role])
        reached = min(n * steps // target[r] for r, n in new.items())
        for role, count in new.items():
            assert count <= -(-(reached + 1) * target[role] // steps)
    assert cluster.replicas == {"a": {"p": 0, "d": 0}, "b": target}


@given(FLEETS, LIMITS, st.integers(0, 12))
def test_a_revert_in_mid_roll_takes_nothing_of_the_version_that_serves(
    target: Counts, limits: tuple[int, int], at: int
) -> None:
    cluster = Cluster(target, target, surge=limits[0], unavailable=limits[1])
    for _ in range(at):
        cluster.step()
    if not any(cluster.replicas["a"].values()):
        return
    cluster.wanted, cluster.initial = "a", dict(cluster.replicas["b"])
    serving = dict(cluster.replicas["a"])
    for counts in cluster.run():
        for role, count in counts["a"].items():
            assert count >= serving[role]
            assert counts["a"][role] + counts["b"][role] >= target[role] - limits[1]
        serving = counts["a"]
    assert cluster.replicas == {"a": target, "b": {"p": 0, "d": 0}}


@given(FLEETS, LIMITS, st.integers(0, 20))
def test_few_gpus_end_an_update_or_say_why_it_stands(
    target: Counts, limits: tuple[int, int], spare: int
) -> None:
    total = sum(target.values())
    cluster = Cluster(target, target, surge=limits[0], unavailable=limits[1], gpus=total + spare)
    for counts in cluster.run():
        assert sum(sum(c.values()) for c in counts.values()) <= total + spare
        for role, goal in target.items():
            assert counts["a"][role] + counts["b"][role] >= goal - limits[1]
    last = cluster.step()
    if limits[1] or spare >= 2:
        assert last.state == "done"
    else:
        assert last.state == "done" or last.reason == "InsufficientGpus"


def test_surge_without_gpus_is_reported_and_changes_nothing() -> None:
    cluster = Cluster({"p": 2, "d": 2}, {"p": 2, "d": 2}, surge=1, unavailable=0, gpus=4)
    step = cluster.step()
    assert (step.state, step.reason) == ("blocked", "InsufficientGpus")
    assert "unavailable 0 lets none go" in step.message


def test_uncountable_gpus_stop_an_update() -> None:
    state = Cluster({"p": 2, "d": 2}, {"p": 2, "d": 2}).state()
    unknown = RolloutState(target=state.target, new=state.new, old=state.old, free_gpus=None)
    assert (next_step(unknown).state, next_step(unknown).reason) == ("blocked", "GpuCountUnknown")


def test_old_ready_workers_are_no_success_of_the_new_version() -> None:
    cluster = Cluster({"p": 2, "d": 1}, {"p": 2, "d": 1}, surge=1)
    cluster.unready["b"] = {"p": 1}
    cluster.step()
    assert cluster.ready("p") >= 2
    for _ in range(5):
        assert cluster.step().state == "wait"
    cluster.unready.clear()
    cluster.run()
    cluster.unready["b"] = {"d": 1}
    assert cluster.step().state == "wait"


def test_a_version_that_never_starts_costs_no_old_worker_and_can_be_replaced() -> None:
    cluster = Cluster({"p": 3, "d": 2}, {"p": 3, "d": 2}, surge=1)
    cluster.unready["b"] = {"p": 9, "d": 9}
    cluster.step()
    assert cluster.step().state == "wait"
    assert cluster.replicas["a"] == {"p": 3, "d": 2}
    cluster.wanted, cluster.replicas["c"] = "c", {"p": 0, "d": 0}
    cluster.initial = {"p": 4, "d": 3}
    for counts in cluster.run():
        good = {r: counts["a"][r] + counts["c"][r] for r in ("p", "d")}
        assert good["p"] >= 3
        assert good["d"] >= 2
    assert cluster.replicas["c"] == {"p": 3, "d": 2}
    assert not any(any(cluster.replicas[name].values()) for name in "ab")


def test_workers_that_no_node_takes_make_room_within_the_limit() -> None:
    cluster = Cluster(
        {"p": 3, "d": 3}, {"p": 3, "d": 3}, surge=1, unavailable=1, unschedulable=True
    )
    cluster.unready["b"] = {"p": 1, "d": 1}
    cluster.step()
    step = cluster.step()
    assert step.state == "scale"
    assert cluster.replicas["a"] == {"p": 2, "d": 2}
    assert cluster.step().reason == "Unschedulable"


def test_roles_of_an_old_version_end_together() -> None:
    history = Cluster({"p": 6, "d": 1}, {"p": 6, "d": 1}, surge=1, unavailable=1).run()
    for counts in history:
        assert bool(counts["a"]["p"]) == bool(counts["a"]["d"])


def test_the_first_workers_come_all_or_none() -> None:
    cluster = Cluster({"p": 2, "d": 2}, {}, gpus=3)
    assert cluster.step().reason == "InsufficientGpus"
    assert cluster.total("p") == 0
    cluster.gpus = 4
    cluster.run()
    assert cluster.replicas["b"] == {"p": 2, "d": 2}


def test_limits_are_counts_or_percents() -> None:
    assert (resolved("25%", 5, up=True), resolved("25%", 5, up=False)) == (2, 1)
    with pytest.raises(ValueError, match="must be a count or like 25%"):
        resolved("some", 5, up=True)
    with pytest.raises(ValueError, match="one must be above 0"):
        RolloutState(
            target={}, new=VersionReplicas(version="", replicas={}, ready={}),
            surge=0, unavailable=0,
        )  # fmt: skip
