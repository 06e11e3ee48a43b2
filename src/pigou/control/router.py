"""Router: candidates, their costs under the policy, the choice, and its explanation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.config import ControlConfig, check_bounds
from pigou.control.messages import Choice
from pigou.control.routing.policy import (
    CostParts,
    CostTable,
    RoutingPolicy,
    costs_of,
    override,
    params_of,
)
from pigou.control.routing.remote_kv_fetch import fetch_of, price_fetches
from pigou.control.routing.selection import Pick, select
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.toll.terms import PARTS
from pigou.control.routing.view import Candidates, FleetView, RemoteFetches
from pigou.control.state import both
from pigou.request import Counts, Flags, Request

Costs = NDArray[np.float64]
TEMPERATURE = "temperature"
#: Dynamo 1.x made its overlap weight an alias of the scale of prefill load.
OTHER_NAMES = {"overlap_weight": "prefill_load_scale"}
#: Prefill workers that are considered with each decode worker.
PREFILL_CHOICES = 4
#: Racks of which the idlest one is considered too, where racks are known.
RACK_CHOICES = 8
#: Sets of pairs that are remembered; more are forgotten all at once.
_SETS = 256
Rows = NDArray[np.integer]
_NOBODY: Rows = np.zeros(0, dtype=np.int64)


class Explanation(msgspec.Struct, eq=False):  # each decision makes one; most are never read
    """A routing decision: every candidate with its cost, and the choice."""

    request: str  # request id
    at: int  # nanoseconds
    policy: str
    temperature: float
    regime: str
    prompt: int  # tokens of the prompt
    chosen: int  # index of the chosen candidate
    workers: tuple[str, ...]  # ids, indexed by the candidates
    candidates: Candidates  # pairs of workers
    held: NDArray[np.int64]  # cached prompt tokens per worker, (workers,)
    costs: Costs  # in the policy's own unit, (candidates,)
    split: CostParts | None  # costs by part; None if the policy has none
    # parts of what each candidate costs its request and all others, in seconds
    # (`pigou.control.routing.toll.policy`).
    prices: CostTable
    choice: Choice
    reads: RemoteFetches | None = None  # remote KV fetches by worker; None if none
    tenant: str = ""  # empty without keys

    @property
    def cached(self) -> NDArray[np.int64]:
        """Prompt tokens cached on the computing worker, (candidates,)."""
        cached: NDArray[np.int64] = self.held[self.candidates.computes]
        return cached

    @property
    def read(self) -> NDArray[np.int64]:
        """Tokens that a remote KV fetch would save, (candidates,)."""
        if self.reads is None:
            return np.zeros(len(self.candidates), dtype=np.int64)
        read = np.where(self.reads.source < 0, 0, self.reads.ready)
        tokens: NDArray[np.int64] = read[self.candidates.computes]
        return tokens

    @property
    def parts(self) -> CostParts:
        """Costs by part, (candidates,) each; empty if the policy has none."""
        return {} if self.split is None else self.split

    @property
    def price(self) -> Costs:
        """Seconds each candidate costs its request and all others, (candidates,)."""
        return self.prices.total

    @property
    def toll(self) -> Costs:
        """Seconds each candidate costs others, (candidates,)."""
        tolls = (part for name, part in self.prices.items() if name.startswith("toll_"))
        return sum(tolls, np.zeros(len(self.candidates)))

    @property
    def prefill(self) -> tuple[str, ...]:
        """Id of each candidate's prefill worker, "" for local prefill."""
        rows = self.candidates.prefill.tolist()
        return tuple("" if row < 0 else self.workers[row] for row in rows)

    @property
    def decode(self) -> tuple[str, ...]:
        """Id of each candidate's decode worker."""
        return tuple(self.workers[row] for row in self.candidates.decode.tolist())

    @property
    def regret(self) -> float:
        """Seconds that the choice costs all, above the best candidate."""
        price = self.price
        return float(price[self.chosen] - price.min())


class DecisionLedger:
    """The last `max_decisions` decisions, by request."""

    def __init__(self, max_decisions: int) -> None:
        self.max_decisions = max_decisions
        self._decisions: OrderedDict[str, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, explanation: Explanation) -> None:
        """Add a decision, dropping the oldest beyond the limit."""
        decisions = self._decisions
        if explanation.request in decisions:
            del decisions[explanation.request]  # to come last
        decisions[explanation.request] = explanation
        if len(decisions) > self.max_decisions:
            decisions.popitem(last=False)

    def get(self, request: str) -> Explanation | None:
        """Return the decision on a request; None if unknown or dropped."""
        return self._decisions.get(request)

    def latest(self) -> Iterator[Explanation]:
        """Iterate over decisions, latest first."""
        return iter(list(reversed(self._decisions.values())))


#: Rows of a `CostTable`: the parts of a cost but the wait at prefill workers, and the sum.
_PREFILL, _TRANSFER, _DECODE, _TOLL_STREAM, _TOLL_MEMORY = (
    PARTS.index(name) for name in ("prefill", "transfer", "decode", "toll_stream", "toll_memory")
)
_TOTAL = -1


@bare_kernel
def _wanted_by(
    rows: Costs, prefill: NDArray[np.int32], decode: NDArray[np.int32], index: int, rise: float
) -> int:
    """Return the row of the worker that would compute the chosen prompt without prefill queues.

    `rows` are the parts of `terms.PARTS` and their sum.
    """
    if prefill[index] >= 0:
        return int(prefill[index])
    min_s, worker = rows[_TOTAL, index], decode[index]
    for i in range(prefill.shape[0]):
        ttft_s = rows[_PREFILL, i] + rows[_TRANSFER, i]
        cost_s = ttft_s + 0.5 * rise * ttft_s * ttft_s + rows[_DECODE, i]
        cost_s = cost_s + rows[_TOLL_STREAM, i] + rows[_TOLL_MEMORY, i]
        if prefill[i] >= 0 and cost_s < min_s:
            min_s, worker = cost_s, prefill[i]
    return int(worker)


class RouteMeter:
    """Prompt tokens that routes bring to each worker, for a planner's windows."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def add(
        self, prompt: int, fleet: FleetView, candidates: Candidates, index: int, prices: CostTable,
        rise: float,
    ) -> None:  # fmt: skip
        """Add a route's prompt where it would be cheapest if no prefill worker had a queue.

        So tokens say what routes want prefill workers for, however many there are.
        """
        computes = _wanted_by(prices.rows, candidates.prefill, candidates.decode, index, rise)
        worker, tokens = fleet.ids[computes], prompt - fleet.cached(prompt).item(computes)
        self._tokens[worker] = self._tokens.get(worker, 0.0) + tokens

    def take(self, worker: str) -> float:
        """Return a worker's tokens since the last call."""
        return self._tokens.pop(worker, 0.0)


class Router:
    """Chooses workers by a policy, at a temperature."""

    def __init__(self, policy: RoutingPolicy, config: ControlConfig) -> None:
        self.policy = policy
        self.name = config.policy
        self.temperature = config.temperature  # softmax temperature; 0 takes the cheapest
        self.regime = ""
        self.ledger = DecisionLedger(config.max_decisions)
        self.meter: RouteMeter | None = None  # None without a planner
        self._softmax = config.softmax
        self._price = Toll()
        self._candidates = CandidateCache()
        self._generator = np.random.default_rng(config.seed)

    def check(self, overrides: Mapping[str, float]) -> None:
        """Raise a ConfigError for invalid overrides."""
        self._with(overrides)

    def tune(self, temperature: float, parameters: Mapping[str, float]) -> None:
        """Set the temperature, and those parameters that the policy has."""
        known = params_of(self.policy)
        self.temperature = temperature
        values = {}
        for name, value in parameters.items():
            theirs = name if name in known else OTHER_NAMES.get(name, "")
            if theirs in known:
                values[theirs] = value
        self.policy = override(self.policy, values)

    def choose(
        self, request: Request, fleet: FleetView, open_: NDArray[np.bool_],
        room: NDArray[np.bool_], now: int, sources: NDArray[np.bool_] | None = None,
    ) -> Choice | None:  # fmt: skip
        """Choose workers for a request among `open_` ones with `room`; None if none can take it."""
        candidates = self._candidates.of(request, fleet, open_, room)
        if len(candidates) == 0:
            return None
        policy, temperature = self._with(request.overrides)
        if sources is not None:
            known = {**params_of(self._price), **params_of(policy)}
            restore = known["host_restore"], known["storage_restore"]
            fleet.fetches = price_fetches(fleet, request.prompt, sources, restore)
        costs, split = costs_of(policy, request, fleet, candidates)
        pick = select(costs, self._generator, temperature, self._softmax)
        if pick is None:
            return None
        note = getattr(policy, "note", None)
        if note is not None:
            note(request, fleet, candidates, pick.index, split)
        held = fleet.cached(request.prompt)
        choice = _choice(candidates, pick, fleet, held)
        if self.ledger.max_decisions or self.meter is not None:
            if type(split) is CostTable and getattr(policy, "full_price", False):
                prices = split
            else:
                prices = self._price.parts(request, fleet, candidates)
            self._price.note(request, fleet, candidates, pick.index, prices)
            if self.meter is not None:
                rise = self._price.rise
                self.meter.add(request.prompt, fleet, candidates, pick.index, prices, rise)
        if self.ledger.max_decisions:
            explanation = Explanation(
                request.id, now, self.name, temperature, self.regime, request.prompt, pick.index,
                fleet.ids, candidates, held, costs, split, prices, choice, fleet.fetches,
                request.tenant,
            )  # fmt: skip
            self.ledger.add(explanation)
        return choice

    def _with(self, overrides: Mapping[str, float]) -> tuple[RoutingPolicy, float]:
        if not overrides:
            return self.policy, self.temperature
        rest = dict(overrides)
        temperature = rest.pop(TEMPERATURE, self.temperature)
        check_bounds(TEMPERATURE, temperature, ge=0)
        return override(self.policy, rest), temperature


def _choice(candidates: Candidates, pick: Pick, fleet: FleetView, held: Counts) -> Choice:
    prefill, decode = candidates.prefill.item(pick.index), candidates.decode.item(pick.index)
    computes = decode if prefill < 0 else prefill
    remote = None if prefill < 0 else fleet.ids[prefill]
    read = None if fleet.fetches is None else fetch_of(fleet, computes)
    if read is None:
        return Choice(fleet.ids[decode], remote, pick.cost, held.item(computes))
    return Choice(fleet.ids[decode], remote, pick.cost, held.item(computes), read)


class CandidateCache:
    """Caches candidates by request constraints, roles and room, which rarely change."""

    def __init__(self) -> None:
        self._prefills: Flags | None = None
        self._decodes: Flags | None = None
        self._version: Rows = _NOBODY
        self._apart = False
        self._sets: dict[bytes | tuple[bytes, bytes], Candidates] = {}

    def of(self, request: Request, fleet: FleetView, open_: Flags, room: Flags) -> Candidates:
        """Return `candidates`, from the cache if possible."""
        same = fleet.prefills is self._prefills and fleet.decodes is self._decodes
        if not same or fleet.version is not self._version:
            self._version = fleet.version
            self._prefills, self._decodes = fleet.prefills, fleet.decodes
            self._apart = not np.array_equal(fleet.prefills, fleet.decodes)
            self._sets.clear()
        streams = both(room, open_)
        if streams is not fleet.decodes:
            streams = streams & fleet.decodes
        name: bytes | tuple[bytes, bytes] = streams.tobytes()
        prefill = _NOBODY
        if self._apart and (request.splits or not request.local):
            prefill = _prefillers(request, fleet, open_)
            name = (streams.tobytes(), prefill.tobytes() + b"-" * (not request.local))
        pairs = self._sets.get(name)
        if pairs is None:
            if len(self._sets) >= _SETS:
                self._sets.clear()
            rows = np.flatnonzero(streams)
            able = rows if request.local else rows[fleet.prefills[rows]]
            pairs = self._sets[name] = _pairs(fleet, rows, prefill, able)
        return pairs


def candidates(request: Request, fleet: FleetView, open_: Flags, room: Flags) -> Candidates:
    """Return the pairs that may serve a request; flags as in `Router.choose`.

    Each decode worker with room is paired with local prefill and with the least loaded prefill
    workers of the fleet and of its rack, of the same version. Prompts below one block stay local,
    and none where decode workers compute no prompts.
    """
    return CandidateCache().of(request, fleet, open_, room)


def _pairs(fleet: FleetView, decode: Rows, prefill: Rows, able: Rows) -> Candidates:
    local = np.full(len(able), -1)
    pure_prefill = fleet.prefills & ~fleet.decodes
    pure_decode = fleet.decodes & ~fleet.prefills
    first = np.repeat(prefill, len(decode))
    second = np.tile(decode, len(prefill))
    helps = (first != second) & (pure_prefill[first] | pure_decode[second])
    helps &= fleet.version[first] == fleet.version[second]
    return Candidates(
        np.concatenate([local, first[helps]]).astype(np.int32),
        np.concatenate([able, second[helps]]).astype(np.int32),
    )


def _prefillers(request: Request, fleet: FleetView, open_: Flags) -> Rows:
    pure = fleet.prefills & ~fleet.decodes
    able = open_ & fleet.prefills
    if request.local:
        able = able & (request.prompt >= fleet.block_size)
    chosen = np.flatnonzero(able & pure)
    if not len(chosen):
        chosen = np.flatnonzero(able)
    if len(chosen) <= PREFILL_CHOICES:
        return chosen
    tokens = fleet.prefill_tokens[chosen] - fleet.cached(request.prompt)[chosen]
    order = chosen[np.argsort(tokens, kind="stable")]
    versions = fleet.version[order]
    if not (versions != versions[0]).any():
        return _idlest(order, fleet)
    sets = [_idlest(order[versions == version], fleet) for version in np.unique(versions)]
    return np.concatenate(sets)


def _idlest(order: Rows, fleet: FleetView) -> Rows:
    """Return the first few of some workers, and the first of each rack, (chosen,)."""
    links = fleet.estimates.links
    if links is None or len(links.factors) == 1:
        return order[:PREFILL_CHOICES]
    _, firsts = np.unique(links.racks[order], return_index=True)
    chosen = np.union1d(np.arange(min(PREFILL_CHOICES, len(order))), np.sort(firsts)[:RACK_CHOICES])
    return order[chosen]
