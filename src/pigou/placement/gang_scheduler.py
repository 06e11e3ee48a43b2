"""The gang scheduler: which gangs run, which wait, and in what order they are placed.

All or nothing, first broken gangs (oldest first, with GPUs of the youngest broken one, so they
never deadlock), then fresh gangs (FCFS; none is passed over `max_passed` times), then further
replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pigou.config import ConfigError
from pigou.placement.gang import (
    Gang,
    GangEvicted,
    GangPlaced,
    GangPlacement,
    GangRefused,
    GangWaits,
    PlacementEffect,
    PlacementRefusal,
    Replica,
    count_roles,
    placement_of,
)
from pigou.placement.packing import MAX_STEPS, free_gpus, pack_gang
from pigou.placement.topology import DistanceCosts, Node
from pigou.request import Role

_PASSES = "others were before it"


class _GangEntry:
    """A known gang: `number` is its age, `passed` how often others went first."""

    def __init__(self, gang: Gang, number: int) -> None:
        self.gang, self.number, self.passed = gang, number, 0
        self.admitted = False  # it had its minimum once
        self.replicas: list[Replica] = []
        self.reason = ""

    @property
    def below_minimum(self) -> bool:
        counts = count_roles(self.replicas)
        return any(counts.get(role, 0) < n for role, n in self.gang.minimum.items())


class GangScheduler:
    """Places gangs on nodes; each event returns the effects to carry out."""

    def __init__(
        self,
        nodes: Iterable[Node] = (),
        costs: DistanceCosts | None = None,
        max_passed: int = 4,  # fresh gangs that may go before one that waits
        max_steps: int = MAX_STEPS,
    ) -> None:
        self.costs = costs or DistanceCosts()
        self._nodes = {node.host: node for node in nodes}
        self._entries: dict[str, _GangEntry] = {}
        self._max_passed, self._max_steps = max_passed, max_steps
        self._numbers = 0
        self._never_fits: dict[str, str | None] = {}

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Present nodes by host."""
        return self._nodes

    @property
    def free(self) -> dict[str, int]:
        """Free GPUs by host."""
        return free_gpus(
            list(self._nodes.values()), [r for e in self._entries.values() for r in e.replicas]
        )

    @property
    def waiting(self) -> dict[str, str]:
        """Reason of each waiting gang, in scheduling order."""
        return {entry.gang.name: entry.reason for entry in self._order()}

    def placement(self, name: str) -> GangPlacement | None:
        """Return a gang's placement; None if waiting or unknown."""
        entry = self._entries.get(name)
        if entry is None or not entry.replicas:
            return None
        return placement_of(entry.gang, entry.replicas, self._nodes, self.costs)

    # --- what happens -------------------------------------------------------------------------

    def submit(self, gang: Gang) -> Sequence[PlacementEffect]:
        """Place a gang, let it wait, or refuse it; raises ConfigError for a known name."""
        if gang.name in self._entries:
            raise ConfigError(f"gang {gang.name!r} is there already; give it another name")
        if (refusal := self._never(gang)) is not None:
            del self._never_fits[gang.name]
            return (GangRefused(gang.name, refusal),)
        self._numbers += 1
        self._entries[gang.name] = _GangEntry(gang, self._numbers)
        return self._schedule()

    def release(self, name: str) -> Sequence[PlacementEffect]:
        """End a gang and free its GPUs."""
        self._entries.pop(name, None)
        self._never_fits.pop(name, None)
        return self._schedule()

    def node_up(self, node: Node) -> Sequence[PlacementEffect]:
        """Add an empty node, or a returning one."""
        self._lose(node.host)
        self._nodes[node.host] = node
        return self._schedule()

    def node_down(self, host: str) -> Sequence[PlacementEffect]:
        """Remove a node with everything on it."""
        self._lose(host)
        self._nodes.pop(host, None)
        return self._schedule()

    def scale_out(self, name: str, role: Role) -> Replica | PlacementRefusal:
        """Add a replica within the gang's pack, no farther than its present pairs if possible."""
        addition = self.addition(name, role)
        if isinstance(addition, PlacementRefusal):
            return addition
        entry, replica = self._entries[name], addition.replicas[-1]
        entry.replicas.append(replica)
        self._resize(entry, role)
        return replica

    def addition(self, name: str, role: Role) -> GangPlacement | PlacementRefusal:
        """Return the placement with one more replica (its last), without changing anything."""
        entry = self._entries[name]
        counts, demand = count_roles(entry.replicas), entry.gang.demand(role)
        if demand is None or not entry.replicas:
            return PlacementRefusal(reason=f"gang {name} has no {role.value} replicas now")
        wanted = {d.role: counts.get(d.role, 0) for d in entry.gang.roles}
        wanted[role] += 1
        before = placement_of(entry.gang, entry.replicas, self._nodes, self.costs).distance
        packed = [self._pack(entry.gang, wanted, entry.replicas, host) for host in self._nodes]
        placements = [p for p in packed if isinstance(p, GangPlacement)]
        if not placements:
            return self._pack(entry.gang, wanted, entry.replicas)
        return min(placements, key=lambda placement: _rank(placement, before))

    def remove(self, name: str, replica: Replica) -> Sequence[PlacementEffect]:
        """Remove a replica for good."""
        entry = self._entries.get(name)
        if entry is not None and replica in entry.replicas:
            entry.replicas.remove(replica)
            self._resize(entry, replica.role)
            if not entry.replicas:
                return self.release(name)
        return self._schedule()

    def flip(self, name: str, replica: Replica, role: Role) -> Replica:
        """Change a replica's role on the same GPUs."""
        entry = self._entries[name]
        flipped = Replica(role, replica.host, replica.gpus)
        entry.replicas[entry.replicas.index(replica)] = flipped
        self._resize(entry, replica.role)
        self._resize(entry, role)
        return flipped

    def _resize(self, entry: _GangEntry, role: Role) -> None:
        count = count_roles(entry.replicas).get(role, 0)
        roles = []
        for demand in entry.gang.roles:
            if demand.role is not role:
                roles.append(demand)
            elif count:
                minimum = min(demand.minimum, count)
                roles.append(msgspec.structs.replace(demand, replicas=count, min_available=minimum))
        if count and entry.gang.demand(role) is None:
            donor = entry.gang.roles[0]
            roles.append(
                msgspec.structs.replace(donor, role=role, replicas=count, min_available=None)
            )
        self._never_fits.pop(entry.gang.name, None)
        if roles:
            entry.gang = msgspec.structs.replace(entry.gang, roles=tuple(roles))

    def _lose(self, host: str) -> None:
        self._never_fits.clear()
        for entry in self._entries.values():
            entry.replicas = [r for r in entry.replicas if r.host != host]

    # --- order --------------------------------------------------------------------------------

    def _order(self) -> list[_GangEntry]:
        waiting = [entry for entry in self._entries.values() if entry.below_minimum]
        return sorted(waiting, key=lambda entry: (not entry.admitted, entry.number))

    def _schedule(self) -> Sequence[PlacementEffect]:
        effects: list[PlacementEffect] = []
        while self._repair(effects) or self._admit(effects) or self._grow(effects):
            pass
        for entry in self._order():
            packed = self._fits(entry)
            reason = packed.reason if isinstance(packed, PlacementRefusal) else _PASSES
            if not entry.reason:
                effects.append(GangWaits(entry.gang.name, reason))
            entry.reason = reason
        return effects

    def _repair(self, effects: list[PlacementEffect]) -> bool:
        broken = [entry for entry in self._order() if entry.admitted]
        for i, entry in enumerate(broken):
            if self._settle(entry, entry.replicas, effects):
                return True
            if entry.replicas and self._moves(entry, [], effects):
                return True
            donors = [e for e in reversed(broken[i + 1 :]) if e.replicas]
            for count in range(1, len(donors) + 1):
                if self._moves(entry, donors[:count], effects):
                    return True
        return False

    def _moves(
        self, entry: _GangEntry, donors: Sequence[_GangEntry], effects: list[PlacementEffect]
    ) -> bool:
        """Repair a broken gang with GPUs of other broken ones, if they suffice."""
        before = {id(e): e.replicas for e in (entry, *donors)}
        for donor in donors:
            donor.replicas = []
        for stays in [before[id(entry)], []] if donors else [[]]:
            entry.replicas = list(stays)
            packed = self._fits(entry)
            if not isinstance(packed, GangPlacement):
                continue
            for donor in donors:
                reason = f"gang {entry.gang.name} is older, and below its minimum too"
                effects.append(GangEvicted(donor.gang.name, tuple(before[id(donor)]), reason))
            if before[id(entry)] and not stays:
                reason = "it is whole again on other nodes only"
                effects.append(GangEvicted(entry.gang.name, tuple(before[id(entry)]), reason))
            self._take(entry, packed, stays, effects)
            return True
        for e in (entry, *donors):
            e.replicas = before[id(e)]
        return False

    def _admit(self, effects: list[PlacementEffect]) -> bool:
        order = self._order()
        if any(entry.admitted and self._never(entry.gang) is None for entry in order):
            return False
        ahead: list[_GangEntry] = []
        for entry in order:
            if entry.admitted:
                continue
            if self._settle(entry, (), effects):
                for other in ahead:
                    other.passed += 1
                return True
            if self._never(entry.gang) is None:
                if entry.passed >= self._max_passed:
                    return False
                ahead.append(entry)
        return False

    def _grow(self, effects: list[PlacementEffect]) -> bool:
        if self._order():
            return False
        for entry in sorted(self._entries.values(), key=lambda e: e.number):
            counts = count_roles(entry.replicas)
            lacking = [d for d in entry.gang.roles if counts.get(d.role, 0) < d.replicas]
            for demand in sorted(lacking, key=lambda d: counts.get(d.role, 0) / d.replicas):
                wanted = {**counts, demand.role: counts.get(demand.role, 0) + 1}
                packed = self._pack(entry.gang, wanted, entry.replicas)
                if isinstance(packed, GangPlacement):
                    self._take(entry, packed, entry.replicas, effects)
                    return True
        return False

    def _settle(
        self, entry: _GangEntry, placed: Sequence[Replica], effects: list[PlacementEffect]
    ) -> bool:
        """Place all that a gang lacks if it fits; return whether it did."""
        packed = self._fits(entry)
        if not isinstance(packed, GangPlacement):
            return False
        self._take(entry, packed, placed, effects)
        return True

    def _take(
        self,
        entry: _GangEntry,
        packed: GangPlacement,
        placed: Sequence[Replica],
        effects: list[PlacementEffect],
    ) -> None:
        added = packed.replicas[len(placed) :]
        entry.replicas, entry.passed, entry.reason = list(packed.replicas), 0, ""
        entry.admitted = True
        effects.append(GangPlaced(entry.gang.name, packed, added))

    # --- what fits ----------------------------------------------------------------------------

    def _fits(self, entry: _GangEntry) -> GangPlacement | PlacementRefusal:
        """Return a placement of all replicas, or else of the minimum."""
        counts = count_roles(entry.replicas)
        packed = self._pack(entry.gang, entry.gang.wanted, entry.replicas)
        if isinstance(packed, GangPlacement) or entry.gang.minimum == entry.gang.wanted:
            return packed
        minimum = {r: max(n, counts.get(r, 0)) for r, n in entry.gang.minimum.items()}
        return self._pack(entry.gang, minimum, entry.replicas)

    def _never(self, gang: Gang) -> str | None:
        """Return why a gang would not fit an empty fleet; None if it would."""
        if gang.name not in self._never_fits:
            nodes = list(self._nodes.values())
            free = {node.host: node.gpus for node in nodes}
            packed = pack_gang(
                gang, nodes, free, gang.minimum, self.costs, max_steps=self._max_steps
            )
            refusal = packed.reason if isinstance(packed, PlacementRefusal) else None
            self._never_fits[gang.name] = refusal
        return self._never_fits[gang.name]

    def _pack(
        self,
        gang: Gang,
        wanted: Mapping[Role, int],
        placed: Sequence[Replica],
        only: str | None = None,
    ) -> GangPlacement | PlacementRefusal:
        free = self.free
        if only is not None:
            free = {host: gpus if host == only else 0 for host, gpus in free.items()}
        nodes = list(self._nodes.values())
        return pack_gang(gang, nodes, free, wanted, self.costs, placed, self._max_steps)


def _rank(packed: GangPlacement, before: int) -> tuple[bool, float]:
    return packed.distance > before, packed.cost
