"""Rolling updates of a fleet with roles: both versions side by side, at a constant ratio.

Source: the DisaggregatedSet of LeaderWorkerSet (KEP-766). Workers of two versions exchange no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Replicas = Mapping[str, int]


class VersionReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one version, by role."""

    version: str  # hash of its spec
    replicas: dict[str, int]
    ready: dict[str, int]


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What an update sees."""

    target: dict[str, int]  # target replicas by role
    new: VersionReplicas  # workers of the new version
    old: tuple[VersionReplicas, ...] = ()
    # replicas of the old versions together when the update began, by role.
    initial: dict[str, int] = {}
    surge: int = 1  # workers of a role beyond its target, at most
    unavailable: int = 0  # workers of a role below its target that are not ready, at most
    gpus: dict[str, int] = {}
    free_gpus: int | None = None  # free GPUs; None if unknown
    # no node has room for workers of the new version that were asked for.
    unschedulable: bool = False

    def __post_init__(self) -> None:
        if min(self.surge, self.unavailable) < 0 or not self.surge + self.unavailable:
            raise ValueError(
                f"surge is {self.surge} and unavailable {self.unavailable}; one must be above 0"
            )


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True):
    """Next step of a rollout."""

    # `scale` sets the replicas; `wait` and `blocked` change nothing, and `blocked` needs an
    # operator; `done` means that only ready workers of the new version are left.
    state: Literal["scale", "wait", "blocked", "done"]
    new: dict[str, int]  # replicas of the new version, by role
    old: dict[str, dict[str, int]]  # replicas of the old versions, by version and role
    reason: str  # machine-readable reason, as in conditions
    message: str = ""  # human-readable message


def next_step(state: RolloutState) -> RolloutStep:
    """Return the next step of a rolling update: one side changes, once all new workers are ready.

    After step i of T the new version has ceil(i target / T) workers per role and the old ones
    initial - floor(i initial / T). A role out of step holds the others back.
    """
    return _Rollout(state).step()


class _Rollout:
    def __init__(self, state: RolloutState) -> None:
        self._state, self._target = state, state.target
        names = {*state.target, *state.new.replicas, *(r for v in state.old for r in v.replicas)}
        self._roles = sorted(names)
        self._new = _full(state.new.replicas, self._roles)
        self._old = {r: sum(v.replicas.get(r, 0) for v in state.old) for r in self._roles}
        self._initial = {
            r: max(state.initial.get(r, 0), self._old[r]) if state.initial else self._old[r]
            for r in self._roles
        }
        batch = state.surge or max(1, state.unavailable)
        widest = max(max(self._goal(r), self._initial[r]) for r in self._roles)
        self._steps = max(1, -(-widest // batch))
        self._free = state.free_gpus or 0

    def step(self) -> RolloutStep:
        if not any(self._old.values()):
            return self._without_old()
        if any(self._new[r] > self._goal(r) for r in self._roles):
            return self._scale_new({r: min(self._new[r], self._goal(r)) for r in self._roles})
        if unready := self._unready():
            return self._unblocked(unready) if self._state.unschedulable else self._pending(unready)
        done = self._step_of_new()
        if drained := self._drained(self._old_at(done)):
            return self._scale_old(drained, f"step {done} of {self._steps}")
        return self._grow(self._new_at(min(done + 1, self._steps)))

    # Sides
    def _grow(self, wanted: dict[str, int]) -> RolloutStep:
        if self._state.free_gpus is None:
            return self._short("")
        wanted = {r: max(self._new[r], wanted[r]) for r in self._roles}
        room = {r: self._goal(r) + self._state.surge - wanted[r] for r in self._roles}
        if any(self._old[r] > max(room[r], 0) for r in self._roles):
            drained = self._drained({r: min(self._old[r], max(room[r], 0)) for r in self._roles})
            if drained:
                return self._scale_old(drained, "room for the next step")
            fitting = {
                r: max(self._new[r], self._goal(r) + self._state.surge - self._old[r])
                for r in self._roles
            }
            wanted = {r: min(wanted[r], fitting[r]) for r in self._roles}
            if wanted == self._new:
                return self._stay("blocked", "NoRoom", "surge and unavailable leave no room")
        needed = self._gpus(wanted)
        if needed <= self._free:
            return self._scale_new(wanted)
        return self._without_gpus(wanted, needed)

    def _without_gpus(self, wanted: dict[str, int], needed: int) -> RolloutStep:
        """Free GPUs within `unavailable`, or add what fits."""
        missing = needed - self._free
        fewer = dict(self._old)
        for spared in (1, 0):  # the last worker of a role goes only where nothing else helps
            for role in self._roles:
                gpus = self._gpus_of(role)
                lowest = max(self._floor_old(role), spared)
                while missing > 0 and gpus and fewer[role] > lowest:
                    fewer[role] -= 1
                    missing -= gpus
        if drained := self._drained(fewer):
            return self._scale_old(drained, "GPUs for the next step")
        if part := self._part(wanted):
            return self._scale_new(part)
        message = (
            f"the next step needs {needed} free GPUs, {self._state.free_gpus} are there, and "
            f"unavailable {self._state.unavailable} lets none go; add GPUs or raise it"
        )
        return self._short(message)

    def _part(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return one more worker, of the role furthest behind, or {}."""
        for role in sorted(self._roles, key=lambda r: self._new[r] / max(1, self._goal(r))):
            one_more = {**self._new, role: self._new[role] + 1}
            fits = self._gpus(one_more) <= self._free
            if wanted[role] > self._new[role] and fits:
                return one_more
        return {}

    def _unblocked(self, unready: dict[str, int]) -> RolloutStep:
        """Release old workers to make room for pending new ones."""
        fewer = {r: max(self._floor_old(r), min(self._old[r], 1)) for r in self._roles}
        if fewer == self._old:
            fewer = {r: self._floor_old(r) for r in self._roles}
        if drained := self._drained(fewer):
            return self._scale_old(drained, "no node has room for the new version")
        message = f"no node has room for {_text(unready)}, and unavailable lets no worker go"
        return self._stay("blocked", "Unschedulable", message)

    def _drained(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return fewer old workers, at best as `wanted`; where one role goes to zero all do."""
        result = {r: max(min(self._old[r], wanted[r]), self._floor_old(r)) for r in self._roles}
        served = [r for r in self._roles if self._initial[r]]
        if any(result[r] == 0 for r in served):
            result = {r: min(result[r], self._floor_old(r)) for r in self._roles}
        return result if result != self._old else {}

    def _scale_old(self, wanted: dict[str, int], message: str) -> RolloutStep:
        """Take workers of the old versions: not ready ones first, then of the oldest version."""
        old = {v.version: dict(v.replicas) for v in self._state.old}
        for role in self._roles:
            excess = self._old[role] - wanted[role]
            for usable in (False, True):
                for version in self._state.old:
                    left = old[version.version].get(role, 0)
                    spared = 0 if usable else version.ready.get(role, 0)
                    gone = min(excess, max(0, left - spared))
                    if gone:
                        old[version.version][role] = left - gone
                        excess -= gone
        message = f"old version down to {_text(wanted)}: {message}"
        return RolloutStep(
            state="scale", new=self._new, old=old, reason="RollingOut", message=message
        )

    def _scale_new(self, wanted: dict[str, int]) -> RolloutStep:
        old = {v.version: dict(v.replicas) for v in self._state.old}
        message = f"new version to {_text(wanted)}"
        return RolloutStep(state="scale", new=wanted, old=old, reason="RollingOut", message=message)

    def _without_old(self) -> RolloutStep:
        goal = {r: self._goal(r) for r in self._roles}
        if self._new == goal:
            if unready := self._unready():
                return self._pending(unready)
            return self._stay("done", "Ready")
        needed, free = self._gpus({r: max(goal[r], self._new[r]) for r in self._roles}), self._free
        if not needed or needed <= free:
            return self._scale_new(goal)
        fewer = {r: min(goal[r], self._new[r]) for r in self._roles}
        if any(self._new.values()) and (part := fewer if fewer != self._new else self._part(goal)):
            return self._scale_new(part)
        return self._short(f"{needed} free GPUs are needed, {free} are there")

    def _pending(self, unready: dict[str, int]) -> RolloutStep:
        return self._stay("wait", "WaitingForReady", f"not ready yet: {_text(unready)}")

    def _short(self, message: str) -> RolloutStep:
        """Report missing GPUs; none are taken if unknown."""
        if self._state.free_gpus is None:
            message = "free GPUs cannot be counted; no worker is added until they can"
            return self._stay("blocked", "GpuCountUnknown", message)
        return self._stay("blocked", "InsufficientGpus", message)

    def _stay(
        self, state: Literal["wait", "blocked", "done"], reason: str, message: str = ""
    ) -> RolloutStep:
        old = {v.version: dict(v.replicas) for v in self._state.old}
        return RolloutStep(state=state, new=self._new, old=old, reason=reason, message=message)

    # Counts
    def _goal(self, role: str) -> int:
        return self._target.get(role, 0)

    def _new_at(self, step: int) -> dict[str, int]:
        return {r: -(-step * self._goal(r) // self._steps) for r in self._roles}

    def _old_at(self, step: int) -> dict[str, int]:
        return {r: self._initial[r] - step * self._initial[r] // self._steps for r in self._roles}

    def _step_of_new(self) -> int:
        reached = 0
        while reached < self._steps and all(
            self._new[r] >= count for r, count in self._new_at(reached + 1).items()
        ):
            reached += 1
        return reached

    def _floor_old(self, role: str) -> int:
        """Return the minimum of old workers of a role."""
        ready = min(self._state.new.ready.get(role, 0), self._new[role])
        needed = self._goal(role) - self._state.unavailable - ready
        usable = sum(min(v.ready.get(role, 0), v.replicas.get(role, 0)) for v in self._state.old)
        return min(usable, max(0, needed))

    def _unready(self) -> dict[str, int]:
        ready = self._state.new.ready
        return {r: n - ready.get(r, 0) for r, n in self._new.items() if n > ready.get(r, 0)}

    def _gpus_of(self, role: str) -> int:
        return self._state.gpus.get(role, 0)

    def _gpus(self, wanted: Replicas) -> int:
        return sum((wanted[r] - self._new[r]) * self._gpus_of(r) for r in self._roles)


def resolved(limit: int | str, target: int, *, up: bool) -> int:
    """Return a limit in workers, percents rounded up or down; ValueError if it is neither."""
    if isinstance(limit, int):
        return limit
    text = limit.removesuffix("%")
    if not limit.endswith("%") or not text.isdecimal():
        raise ValueError(f"limit is {limit!r}; it must be a count or like 25%")
    product = int(text) * target
    return -(-product // 100) if up else product // 100


def _full(replicas: Replicas, roles: Sequence[str]) -> dict[str, int]:
    return {role: replicas.get(role, 0) for role in roles}


def _text(replicas: Replicas) -> str:
    return ", ".join(f"{count} {role}" for role, count in replicas.items())
