"""The configurations that a plan compares, within the GPUs that there are."""

from __future__ import annotations

import operator
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pigou.capacity.plan.analysis import Analysis, Configuration, PlannedPool, WorkerKind
from pigou.models.architecture import Architecture
from pigou.models.gpus import gpu as gpu_named
from pigou.request import Role

#: Batches and steps of workers that do both, of decode workers, and of prefill workers.
_BATCHES = (32, 64, 128, 256, 512)
_BOTH_CHUNKS = (512, 1024, 2048, 4096, 8192)
_DECODE_CHUNK, _PREFILL_BATCH = 2048, 64
_PREFILL_CHUNKS = (2048, 8192, 16_384)
#: Fleets, best first, whose limits are replayed.
_ENOUGH = 40
#: Multiple of a known rate that is replayed: limits of replays are up to a tenth too high.
_MORE = 1.1
#: Multiple of the limit of a `both` pool that a replay does not exceed.
_HIGHER = 1.5
#: A configuration whose analysed limit is this much below a rate may hold it all the same.
NEAR = 0.9


def worker_kinds(
    model: Architecture, gpus: Mapping[str, int], role: Role, kv_dtypes: Sequence[str]
) -> list[WorkerKind]:
    """Return the kinds of workers of a role that the GPUs can be made into."""
    if role is Role.BOTH:
        limits = [(batch, chunk) for batch in _BATCHES for chunk in _BOTH_CHUNKS]
    elif role is Role.DECODE:
        limits = [(batch, _DECODE_CHUNK) for batch in _BATCHES]
    else:
        limits = [(_PREFILL_BATCH, chunk) for chunk in _PREFILL_CHUNKS]
    return [
        WorkerKind(gpu=name, tp=tp, kv_dtype=kv_dtype, max_seqs=batch, chunk=chunk, dp=dp, ep=ep)
        for name, count in gpus.items()
        for tp, dp, ep in _parallelisms(model, name, count)
        for kv_dtype in kv_dtypes
        for batch, chunk in limits
    ]


def _parallelisms(model: Architecture, name: str, count: int) -> Iterator[tuple[int, int, bool]]:
    """Yield tp, dp and ep: layers shared, or experts spread over ranks of one GPU."""
    tp = 1
    while tp <= min(count, gpu_named(name).link_gpus) and model.heads % tp == 0:
        yield tp, 1, False
        tp *= 2
    dp = 2
    while model.experts and dp <= count and model.experts % dp == 0:
        yield 1, dp, True
        dp *= 2


class Candidate(msgspec.Struct, frozen=True):
    """A configuration, and the most requests a second that the analysis expects it to hold."""

    configuration: Configuration
    limit_rps: float


def candidates(
    analysis: Analysis, model: Architecture, gpus: Mapping[str, int], kv_dtypes: Sequence[str],
    enough: int = _ENOUGH,
) -> list[Candidate]:  # fmt: skip
    """Return all configurations that the analysis looked at, with their limits.

    A known rate bounds pools to sizes near those that hold it; otherwise pools take all GPUs.
    At least `enough` fleets have the limits of a replay; 0 for none.
    """
    kinds = {role: worker_kinds(model, gpus, role, kv_dtypes) for role in Role}
    seen = list(_joint(analysis, gpus, kinds[Role.BOTH]))
    sizes = {
        (role, kind): list(_sizes(analysis, gpus[kind.gpu] // kind.gpus, role, kind))
        for role in (Role.PREFILL, Role.DECODE)
        for kind in kinds[role]
    }
    for first in kinds[Role.PREFILL]:
        for second in kinds[Role.DECODE]:
            if first.kv_dtype == second.kv_dtype:
                seen += _split(analysis, gpus, first, second, sizes)
    return _replayed(analysis, seen, enough) if enough else seen


def _replayed(analysis: Analysis, seen: Sequence[Candidate], enough: int) -> list[Candidate]:
    """Return candidates with the limits of replays, the best of workers that are alike first.

    A known rate is replayed once: fleets that do not hold it are put below it.
    """
    best: dict[tuple[object, ...], int] = {}
    for i, candidate in enumerate(seen):
        key = candidate.configuration.workers_key
        if key not in best or candidate.limit_rps > seen[best[key]].limit_rps:
            best[key] = i
    limits, rate = [candidate.limit_rps for candidate in seen], analysis.demand.rate_rps
    highest: dict[int, float] = {}
    for i in best.values():
        highest[i] = analysis.highest_rps(seen[i].configuration)
        if len(seen[i].configuration.pools) == 1:
            highest[i] = min(highest[i], _HIGHER * limits[i])
    ahead: list[float] = []
    for i in sorted(highest, key=lambda i: -highest[i]):
        made = seen[i].configuration
        if rate:
            if highest[i] < NEAR * rate:
                break
            if analysis.holds(made, _MORE * rate):
                limits[i] = max(limits[i], rate)
            else:  # the further below, the fewer are inside
                short = analysis.slo.share - analysis.attained(made, _MORE * rate)
                limits[i] = rate * (0.99 - max(short, 0.0))
            continue
        if len(ahead) >= enough and highest[i] < ahead[enough - 1]:
            break
        limits[i] = analysis.replayed_limit_rps(made, highest[i])
        insort(ahead, limits[i], key=operator.neg)
    return [
        Candidate(candidate.configuration, limit)
        for candidate, limit in zip(seen, limits, strict=True)
    ]


def _joint(
    analysis: Analysis, gpus: Mapping[str, int], kinds: Sequence[WorkerKind]
) -> Iterator[Candidate]:
    for kind in kinds:
        room = gpus[kind.gpu] // kind.gpus
        for workers in _sizes(analysis, room, Role.BOTH, kind):
            pool = PlannedPool(role=Role.BOTH, kind=kind, workers=workers)
            limit = analysis.limit_rps(Role.BOTH, kind, workers)
            yield Candidate(Configuration(pools=(pool,)), limit)


def _sizes(analysis: Analysis, room: int, role: Role, kind: WorkerKind) -> Iterator[int]:
    """Yield sizes of a pool: all of them, or those around the one that holds the rate."""
    if room < 1 or analysis.load(kind, role) is None:
        return
    rate = analysis.demand.rate_rps
    if not rate:
        yield from ((room,) if role is Role.BOTH else range(1, room + 1))
        return
    smallest = analysis.workers_for(role, kind, room)
    if smallest is None:
        yield room
        return
    yield from range(max(smallest - 1, 1), min(smallest + 2, room) + 1)


def _split(
    analysis: Analysis, gpus: Mapping[str, int], first: WorkerKind, second: WorkerKind,
    sizes: Mapping[tuple[Role, WorkerKind], Sequence[int]],
) -> Iterator[Candidate]:  # fmt: skip
    """Yield pairs of a prefill pool and each decode pool that fits it."""
    decode_sizes = sizes[(Role.DECODE, second)]
    for prefill in sizes[(Role.PREFILL, first)]:
        room = gpus[second.gpu]
        if second.gpu == first.gpu:
            room -= prefill * first.gpus
        fitting = [size for size in decode_sizes if size * second.gpus <= room]
        if not analysis.demand.rate_rps:
            fitting = fitting[-1:]
        for decode in fitting:
            pools = (
                PlannedPool(role=Role.PREFILL, kind=first, workers=prefill),
                PlannedPool(role=Role.DECODE, kind=second, workers=decode),
            )
            limit = analysis.split_limit_rps((first, prefill), (second, decode))
            yield Candidate(Configuration(pools=pools), limit)
