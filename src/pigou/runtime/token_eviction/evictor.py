"""Evictor: tracks side data of rows, scores their entries, and compacts evicted ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.config import EvictionConfig
from pigou.engine.plan import Compaction, Load, Plan, Recomputation, Started
from pigou.request import Ints
from pigou.runtime.attention.batch import PromptChunk, StepBatch
from pigou.runtime.attention.kv_cache import KEYS, TARGET, VALUES, KVCache
from pigou.runtime.attention.paged_attention import PagedAttention, Past
from pigou.runtime.models.decoder import DecoderModel
from pigou.runtime.sequence import TokenSequence
from pigou.runtime.simd import LANES
from pigou.runtime.tensor_io import stored
from pigou.runtime.token_eviction.entry_stats import (
    AttentionMassTracker,
    CPUEntryStats,
    EntryStats,
    pair_holes,
)
from pigou.runtime.token_eviction.policy import (
    POSITION_LINE,
    CacheEntries,
    Floats,
    PredictedReturns,
    RowEntries,
    TokenPolicy,
)
from pigou.runtime.token_eviction.ranking import Ranking, rank

_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)
T = TypeVar("T")
#: Max entries scored per batch.
AT_ONCE = 8192


class RankRequest(NamedTuple):
    """A row to rank: entries from slot `first` on, at most `max_entries` of them."""

    row: int
    table: Ints
    first: int
    max_entries: int


class Evictor:
    """Executes a plan's compactions and scores cache entries, by row."""

    def __init__(
        self, policy: TokenPolicy, config: EvictionConfig, cache: KVCache, tables: Ints, group: int
    ) -> None:
        self.policy = policy
        self.config = config
        self.cache = cache
        self.tables = tables
        self.size = cache.layout.block_size
        device = cache.data.device
        kind = CPUEntryStats if device.type == "cpu" else EntryStats
        many = (cache.blocks, device, len(cache.host))
        self.stats = kind(cache.layout, len(policy.fields), *many)
        self.watch = AttentionMassTracker(self.stats, policy.folding, len(tables), group)
        self.entries: Ints = np.zeros(len(tables), dtype=np.int32)
        self.next: Ints = np.zeros(len(tables), dtype=np.int32)
        self.moved = 0
        self._rankings: dict[int, Ranking] = {}
        self._owners: dict[int, str] = {}
        self._loading: dict[str, int] = {}
        self._dropped: dict[str, Dropped] = {}
        unknown = {*policy.summary_fields, *policy.logit_fields}
        self._blank = np.array([np.nan if f in unknown else 0.0 for f in policy.fields], np.float32)
        self._stamped = [policy.fields.index(name) for name in policy.stamped]
        self._dead = np.zeros(tables.shape[1] * self.size, dtype=np.uint8)

    @property
    def watches(self) -> bool:
        """True if attention mass is tracked."""
        return "mass" in self.policy.fields

    # --- a plan -----------------------------------------------------------------------------

    def begin_plan(self, plan: Plan, owners: Mapping[int, TokenSequence]) -> None:
        """Start a plan's rows and run its compactions; `owners` has the rows that start."""
        for started in plan.started:
            self._start(started, owners[started.row], plan)
        for load in plan.loads:
            self._load(load)
        self._summarize_before([task for task in plan.compactions if not len(task.copies)])
        for compaction in plan.compactions:
            self._compact(compaction)
        self.stats.move(plan.swap_out, plan.copies, plan.swap_in)

    def begin_step(self, batch: StepBatch) -> None:
        """Initialize the entries of a step's tokens, before attention."""
        self.watch.begin(batch, self.tables)
        self._blank[self._stamped] = self.watch.clock
        self.stats.enter(batch.locations, self.tables, self._blank)

    def end_step(self, locations: Ints, logits: Tensor) -> None:
        """Store the policy's logit fields of tokens; `locations` as in `StepBatch`."""
        line = 1 + self.policy.fields.index(self.policy.logit_fields[0])
        self.stats.put(locations, self.tables, line, self.policy.from_logits(logits))

    def end_plan(
        self, plan: Plan, steps: int
    ) -> tuple[dict[int, NDArray[np.float64]], dict[int, NDArray[np.float64]]]:
        """Update entry counts, and return lost and regained returns by row (see `Result`)."""
        done = plan.counts + (steps - 1)
        self.entries[plan.rows] = plan.kv_lens + done
        self.next[plan.rows] = plan.starts + done
        lost_returns, regained_returns = {}, {}
        requests = [
            RankRequest(row, self.tables[row], first, max_blocks * self.size)
            for row, first, max_blocks in plan.to_score.tolist()
        ]
        for (row, *_), ranking in zip(requests, self._rank(requests), strict=True):
            self._rankings[row] = ranking
            lost_returns[row] = ranking.lost_returns
            dropped = self._dropped.get(self._owners[row])
            if dropped is not None and len(dropped.positions) >= self.size:
                regained_returns[row] = dropped.regained_returns(self.size, self.policy.penalty)
        return lost_returns, regained_returns

    def forget(self, request: str) -> None:
        """Drop a finished request."""
        self._loading.pop(request, None)
        self._dropped.pop(request, None)

    def truncate(self, row: int, tokens: int) -> None:
        """Remove a row's last tokens; raises ValueError if a compaction moved their entries."""
        left = int(self.entries[row]) - tokens
        tail = self.positions(self.tables[row], left + tokens)[..., left:]
        expected = np.arange(self.next[row] - tokens, self.next[row], dtype=np.int32)
        if (tail != expected).any():
            raise ValueError(f"row {row}: its last {tokens} tokens are not its last entries")
        self.entries[row] = left
        self.next[row] -= tokens
        self._rankings.pop(row, None)
        dropped = self._dropped.get(self._owners[row])
        if dropped is not None:
            dropped.cut(int(self.next[row]))

    def add_recomputed(self, row: int, entries: int, count: int, table: Ints) -> Ints:
        """Append entries for `count` dropped tokens; raises ValueError if there are fewer."""
        positions, data = self._dropped_of(row).take(count)
        slots = np.arange(entries, entries + count, dtype=np.int32)
        locations = np.stack((positions, slots, np.zeros_like(slots)))
        self.stats.enter(locations, table[None], self._blank)
        if self.policy.logit_fields:
            line = 1 + self.policy.fields.index(self.policy.logit_fields[0])
            values = data[line : line + len(self.policy.logit_fields)].T
            numbers = torch.from_numpy(np.ascontiguousarray(values))
            device = self.stats.numbers.device
            self.stats.put(locations, table[None], line, numbers.to(device))
        self.entries[row] = entries + count
        self._rankings.pop(row, None)
        return positions

    def positions(self, table: Ints, entries: int) -> Ints:
        """Return the original positions of a row's entries, (layers, kv_heads, entries)."""
        return self.stats.collect(table, entries)[:, :, POSITION_LINE].view(np.int32)

    # --- rows -------------------------------------------------------------------------------

    def _start(self, started: Started, owner: TokenSequence, plan: Plan) -> None:
        row, swapped = started.row, plan.swap_in[:, TARGET]
        own = self._loading.pop(started.request, started.computed)
        back = np.isin(self.tables[row, : -(-started.computed // self.size)], swapped)
        if back.any():
            own = min(own, int(np.argmax(back)) * self.size)
        else:
            self._dropped.pop(started.request, None)
        self.watch.owns[row] = own
        self.watch.prompts[row] = owner.prompt
        self._owners[row] = started.request
        self._rankings.pop(row, None)

    def _load(self, load: Load) -> None:
        if load.row >= 0:
            self._loading[load.request] = load.first * self.size
        count = len(load.blocks) * self.size
        slots = np.arange(count, dtype=np.int32)
        locations = np.stack((slots + load.first * self.size, slots, np.zeros_like(slots)))
        self._blank[self._stamped] = self.watch.clock
        self.stats.enter(locations, load.blocks[None], self._blank)

    # --- scores and compaction --------------------------------------------------------------

    def _rank(self, requests: Sequence[RankRequest]) -> Iterator[Ranking]:
        for request, predicted in zip(requests, self._predict(requests), strict=True):
            following = int(self.next[request.row])
            _, _, first, max_entries = request
            yield rank(self.config, predicted, following, first, max_entries, self.size)

    def _predict(self, requests: Sequence[RankRequest]) -> Iterator[PredictedReturns]:
        if self._in_place:
            yield from (self.policy.predict(self._row(r.row, r.table)) for r in requests)
            return
        for some in _batches(requests, [int(self.entries[r.row]) for r in requests]):
            rows = self._cache_entries(some)
            for entries, scores in zip(rows, self.policy.scores(rows), strict=True):
                yield PredictedReturns(scores, entries.positions)

    @property
    def _in_place(self) -> bool:
        on_cpu = isinstance(self.stats, CPUEntryStats)
        return self.policy.compiled and on_cpu and self.size % LANES == 0

    def _row(self, row: int, table: Ints) -> RowEntries:
        assert isinstance(self.stats, CPUEntryStats)
        following = int(self.next[row])
        return RowEntries(
            kv=stored(self.cache.data), scales=stored(self.cache.scales(self.cache.data)),
            numbers=self.stats.array, table=table, entries=int(self.entries[row]),
            following=following, since=self.watch.since(row, following),
            stop=following - self.config.recent,
        )  # fmt: skip

    def _cache_entries(self, requests: Sequence[RankRequest]) -> list[CacheEntries]:
        collected = [self.stats.collect(r.table, int(self.entries[r.row])) for r in requests]
        if self.policy.summary_fields:
            self._summarize([(r.table, data) for r, data in zip(requests, collected, strict=True)])
        return [
            CacheEntries(
                data=data,
                names=self.policy.fields,
                next=int(self.next[request.row]),
                since=self.watch.since(request.row, int(self.next[request.row])),
                clock=self.watch.clock,
                request=self._owners[request.row],
            )
            for request, data in zip(requests, collected, strict=True)
        ]

    def _summarize_before(self, tasks: Sequence[Compaction]) -> None:
        """Summarize new entries of rows before compaction moves them."""
        if self._in_place:
            for task in tasks:
                row = self._row(task.row, task.blocks)
                self.policy.summarize(row._replace(stop=row.following))
        elif self.policy.summary_fields:
            self._summarize([(t.blocks, self.stats.collect(t.blocks, t.entries)) for t in tasks])

    def _summarize(self, rows: Sequence[tuple[Ints, Floats]]) -> None:
        line = 1 + self.policy.fields.index(self.policy.summary_fields[0])
        new = [np.flatnonzero(np.isnan(data[0, 0, line])).astype(np.int32) for _, data in rows]
        pending = [(*row, slots) for row, slots in zip(rows, new, strict=True) if len(slots)]
        for some in _batches(pending, [len(slots) for *_, slots in pending]):
            self._summarize_some(line, some)

    def _summarize_some(self, line: int, rows: Sequence[tuple[Ints, Floats, Ints]]) -> None:
        """Summarize slots of rows; each row is (table, side data, slots)."""
        table = np.concatenate([table[slots // self.size] for table, _, slots in rows])
        slots = np.concatenate([slots for *_, slots in rows])
        positions = np.concatenate(
            [data[0, 0, POSITION_LINE].view(np.int32)[s] for _, data, s in rows]
        )
        device = self.cache.data.device
        blocks = torch.from_numpy(table.astype(np.int64)).to(device)
        offsets = torch.from_numpy((slots % self.size).astype(np.int64)).to(device)
        kv, scales = self.cache.data, self.cache.scales(self.cache.data)
        codes = self.cache.split(kv)
        keys, values = codes[KEYS][blocks, :, :, :, offsets], codes[VALUES][blocks, :, :, offsets]
        units = [scales[blocks, :, k, :, offsets].unsqueeze(-1) if len(scales) else None
                 for k in (KEYS, VALUES)]  # fmt: skip
        keys, values = map(self.cache.decode, (keys, values), units)
        keys, values = (part.permute(1, 2, 0, 3).float() for part in (keys, values))
        content = self.policy.birth(keys, values, positions)
        lines = slice(line, line + len(self.policy.summary_fields))
        parts = torch.split(content, [len(slots) for *_, slots in rows], dim=2)
        for (table, data, slots), part in zip(rows, parts, strict=True):
            self.stats.put_heads(table, slots, line, part)
            data[:, :, lines, slots] = part.cpu().numpy().swapaxes(2, 3)

    def _compact(self, task: Compaction) -> None:
        row, table = task.row, task.blocks
        if task.entries != (has := self.entries[row]):
            raise ValueError(f"row {row} is said to have {task.entries} entries; it has {has}")
        self.cache.move(_NO_PAIRS, task.copies, _NO_PAIRS)
        self.stats.move(_NO_PAIRS, task.copies, _NO_PAIRS)
        ranking = self._rankings.pop(row, None)
        if len(task.copies):
            self._summarize_before([task])
        victims = None if ranking is None else ranking.victims(task.first, task.drop)
        if ranking is None or victims is None:
            (ranking,) = self._rank([RankRequest(row, table, task.first, task.drop)])
            victims = ranking.slots
        if (may := victims.shape[1]) < task.drop:
            raise ValueError(f"row {row} is to give up {task.drop} entries; only {may} may go")
        self._remember(row, table, ranking, victims)
        heads = self.stats.numbers.shape[1] * self.stats.numbers.shape[2]
        by_head = np.broadcast_to(victims, (heads, task.drop))
        moves = np.empty((heads, task.drop, 2), dtype=np.int32)
        counts = np.empty(heads, dtype=np.int32)
        pair_holes(np.ascontiguousarray(by_head), task.entries, moves, counts, self._dead)
        self.stats.fill(self.cache, table, moves, counts)
        self.moved += int(counts.sum())
        self.entries[row] -= task.drop
        self.watch.owns[row] = min(self.watch.owns[row], task.first)

    def _remember(self, row: int, table: Ints, ranking: Ranking, victims: Ints) -> None:
        if not self.policy.recomputes:
            return
        assert ranking.returns is not None, "only whole tokens can be computed again"
        slots = victims[0]
        data = self.stats.collect(table, int(self.entries[row]))[0, 0][:, slots]
        positions = data[POSITION_LINE].view(np.int32)
        self._dropped_of(row).add(positions, ranking.returns[slots], data)

    def _dropped_of(self, row: int) -> Dropped:
        return self._dropped.setdefault(self._owners[row], Dropped())


def _batches(rows: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    first = total = 0
    for end, size in enumerate(sizes):
        if total + size > AT_ONCE and end > first:
            yield rows[first:end]
            first, total = end, 0
        total += size
    if first < len(rows):
        yield rows[first:]


class _EarlierOnly(PagedAttention):
    """Attention masked by position, not slot: a token sees earlier tokens and itself."""

    def take(self, batch: StepBatch, tables: Ints, positions: list[Ints]) -> None:
        """Begin a step of recomputed tokens; `positions` has those of all entries, by chunk."""
        self.tables = tables
        self._entry_positions = iter(positions)
        self.begin(batch)

    def _chunk_past(self, chunk: PromptChunk) -> Past:
        positions = next(self._entry_positions)
        stop = chunk.first + chunk.count
        queries = self.batch.positions[chunk.first : stop, None]
        width = -(-len(positions) // self.block_size)
        mask = np.zeros((chunk.count, width * self.block_size), dtype=np.bool_)
        mask[:, : len(positions)] = positions <= queries
        seen = torch.from_numpy(mask).to(self.device)[None, None]
        return Past(self._index(self.tables[chunk.row, :width]), 1, seen)


class TokenRecomputation:
    """Recomputes dropped tokens at their original positions, from the present entries."""

    def __init__(
        self, model: DecoderModel, cache: KVCache, evictor: Evictor, turns: Tensor
    ) -> None:
        self._model = model
        self._evictor = evictor
        none = np.zeros((1, 1), dtype=np.int32)
        self._attention = _EarlierOnly(model.config, cache, none, 1)
        self._attention.turns = turns

    def __call__(self, recomputations: Sequence[Recomputation], tokens: Mapping[int, Ints]) -> None:
        """Recompute tokens of rows in one batch; raises ValueError if fewer were dropped."""
        evictor = self._evictor
        max_blocks = max(len(recomputation.blocks) for recomputation in recomputations)
        tables = np.zeros((len(recomputations), max_blocks), dtype=np.int32)
        chunks: list[PromptChunk] = []
        locations: list[Ints] = []
        entry_positions: list[Ints] = []
        ids: list[Ints] = []
        first = 0
        for row, task in enumerate(recomputations):
            tables[row, : len(task.blocks)] = task.blocks
            positions = evictor.add_recomputed(task.row, task.entries, task.count, task.blocks)
            entries = task.entries + task.count
            slots = np.arange(task.entries, entries, dtype=np.int32)
            locations.append(np.stack((positions, slots, np.full_like(slots, row))))
            entry_positions.append(evictor.positions(task.blocks, entries)[0, 0])
            ids.append(tokens[task.row][positions])
            chunks.append(PromptChunk(row, row, first, task.count, task.entries))
            first += task.count
        device = evictor.cache.data.device
        batch = StepBatch(
            tokens=torch.from_numpy(np.concatenate(ids)).to(device),
            locations=np.concatenate(locations, axis=1), singles=0, chunks=chunks,
            last=np.empty(0, dtype=np.int64), entries=np.empty(0, dtype=np.int64),
        )  # fmt: skip
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        with torch.inference_mode():
            self._attention.take(batch, tables, entry_positions)
            self._model.hidden(batch.tokens, self._attention, nobody)


@dataclass(slots=True)
class Dropped:
    """Whole tokens that a request dropped, by descending return."""

    positions: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # shape (n,)
    returns: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # when dropped, (n,)
    # side data of one head, shape (1 + fields, n).
    data: Floats = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))

    def add(self, positions: Ints, returns: NDArray[np.floating], data: Floats) -> None:
        """Record dropped tokens."""
        old = self.data if len(self.positions) else data[:, :0]
        everyone = np.concatenate((self.returns, returns.astype(np.float64)))
        order = np.argsort(-everyone, kind="stable")
        self.positions = np.concatenate((self.positions, positions))[order]
        self.returns = everyone[order]
        self.data = np.concatenate((old, data), axis=1)[:, order]

    def take(self, count: int) -> tuple[Ints, Floats]:
        """Remove the `count` tokens of highest return, by position; raises ValueError if fewer."""
        if count > len(self.positions):
            known = len(self.positions)
            raise ValueError(f"{count} tokens are to come back; {known} were given up")
        order = np.argsort(self.positions[:count])
        taken = self.positions[:count][order], self.data[:, :count][:, order]
        self.positions, self.returns = self.positions[count:], self.returns[count:]
        self.data = self.data[:, count:]
        return taken

    def regained_returns(self, size: int, penalty: float) -> NDArray[np.float64]:
        """Return the net return (less penalty) of each further block of tokens, (blocks,)."""
        blocks = len(self.returns) // size
        sums: NDArray[np.float64] = self.returns[: blocks * size].reshape(blocks, size).sum(1)
        return sums - penalty * size

    def cut(self, length: int) -> None:
        """Forget tokens at positions >= `length`."""
        retained = self.positions < length
        self.positions, self.returns = self.positions[retained], self.returns[retained]
        self.data = self.data[:, retained]
