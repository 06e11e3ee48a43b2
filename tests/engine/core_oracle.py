"""An executor that stores in each slot whose KV would be there, and checks what is attended to.

The identity of a slot is the whole token history up to it, which no request owns: equal prompts
give equal KV. So a plan is right exactly when each of its rows attends to its own history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from pigou.engine.core import EngineCore
from pigou.engine.plan import Effects, Finish, Load, Plan, Result
from pigou.kv.hashing import chain
from pigou.request import NEVER, BlockHashes, FinishReason, Request, no_hashes

SEED = b"oracle"
#: Sampled, it ends the sequence.
END = 0
#: What a slot holds that was never written, or written to by nobody in particular.
POISON = ("poison",)
Slot = tuple[object, ...]


def step(core: EngineCore) -> Plan:
    """Plan a step without tokens, apply it, and check the core."""
    plan = core.schedule(0)
    if plan:
        core.apply(plan, Result())
    core.check_integrity()
    return plan


def sample(history: tuple[int, ...]) -> int:
    """Choose the next token, as a model would: a function of the history alone."""
    return random.Random(hash(history)).randrange(8)


@dataclass
class Stream:
    """A request's tokens, and how many hashes of its blocks the engine knows."""

    request: Request
    tokens: list[int]
    known: int
    generated: int = 0
    ended: bool = False


@dataclass
class Oracle:
    """Device and host memory of one engine, and the tokens of its requests.

    Attributes:
        core: the engine.
        ends: whether sampling `END` ends a sequence.
        overrun: steps done beyond the first end, as a careless executor would.
        hashed: whether generated blocks get hashes.
    """

    core: EngineCore
    ends: bool = True
    overrun: int = 0
    hashed: bool = True
    device: list[list[Slot]] = field(init=False)
    host: list[list[Slot]] = field(init=False)
    streams: dict[str, Stream] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    held: dict[str, np.ndarray] = field(default_factory=dict)
    content: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.core.config.block_size
        self.device = [[POISON] * size for _ in range(self.core.config.blocks)]
        self.host = [[POISON] * size for _ in range(self.core.config.host_blocks)]

    # --- requests ---------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int], max_tokens: int, **fields: object) -> Request:
        hashes = self.hashes(tokens, fields.get("expiry", NEVER))  # type: ignore[arg-type]
        return Request(name, len(tokens), max_tokens, hashes, **fields)  # type: ignore[arg-type]

    def hashes(self, tokens: list[int], expiry: int = NEVER) -> BlockHashes:
        """Hash blocks under a tenure, of which there is one for each expiry."""
        size = self.core.config.block_size
        seed = SEED if expiry == NEVER else b"%d" % expiry
        found = chain(tokens, size, seed) if len(tokens) >= size else no_hashes()
        for i, (high, low) in enumerate(found.tolist()):
            self.content[high, low] = tuple(tokens[: (i + 1) * size])
        return found

    def add(self, request: Request, tokens: list[int]) -> None:
        self.core.add(request)
        self.streams[request.id] = Stream(request, list(tokens), len(request.hashes))

    def keep(self, request: Request, tokens: list[int], held: np.ndarray) -> None:
        """Note blocks that are held without having been computed for anybody."""
        self.streams[request.id] = Stream(request, list(tokens), len(request.hashes))
        self.held[request.id] = held

    # --- memory -----------------------------------------------------------------------------

    def history(self, stream: Stream, stop: int) -> list[Slot]:
        return [tuple(stream.tokens[: i + 1]) for i in range(stop)]

    def read(self, blocks: np.ndarray, stop: int) -> list[Slot]:
        size = self.core.config.block_size
        return [self.device[blocks[i // size]][i % size] for i in range(stop)]

    def write(self, blocks: np.ndarray, start: int, slots: list[Slot]) -> None:
        size = self.core.config.block_size
        for i, slot in enumerate(slots, start):
            self.device[blocks[i // size]][i % size] = slot

    # --- executor ---------------------------------------------------------------------------

    def execute(self, plan: Plan, most: int = 1_000_000) -> Result:
        """Do the plan's moves, and at most `most` of its steps; loads begin to write before."""
        for load in plan.loads:
            for block in load.blocks:
                self.device[block] = [POISON] * self.core.config.block_size
        self._move(plan)
        for name in plan.preempted:
            self.rows = {row: other for row, other in self.rows.items() if other != name}
        for started in plan.started:
            self.rows[started.row] = started.request
            stream = self.streams[started.request]
            blocks = self.core.tables[started.row]
            self.begin(stream, blocks, started.computed)
        for load in plan.loads:
            if len(load.blocks):
                self.loads[load.request] = load
        result = Result(steps=0)
        extra = self.overrun
        while plan and result.steps < min(plan.repeat, most):
            self._step(plan, result)
            if result.finished:
                if not extra:
                    break
                extra -= 1
        self._seal(plan, result)
        return result

    def _move(self, plan: Plan) -> None:
        for device, host in plan.swap_out.tolist():
            self.host[host] = list(self.device[device])
        for source, target in plan.copies.tolist():
            self.device[target] = list(self.device[source])
        for host, device in plan.swap_in.tolist():
            self.device[device] = list(self.host[host])

    def _step(self, plan: Plan, result: Result) -> None:
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        for entry, row in enumerate(plan.rows.tolist()):
            stream = self.streams[self.rows[row]]
            start, count = int(plan.starts[entry]), int(plan.counts[entry])
            start += result.steps * count  # 1, or the length of a chunk
            blocks = self.core.tables[row]
            kv = int(plan.kv_lens[entry]) + result.steps * count
            self.attend(stream, blocks, start, kv)
            if len(plan.drafts):
                self._verify(plan, entry, stream, result)
                continue
            assert start + count <= len(stream.tokens)
            self.write(blocks, kv, self.history(stream, start + count)[start:])
            assert bool(plan.samples[entry]) == (start + count == len(stream.tokens))
            if plan.samples[entry]:
                self._append(entry, stream, result)
        result.steps += 1

    def _verify(self, plan: Plan, entry: int, stream: Stream, result: Result) -> None:
        """Accept some of an entry's drafts; the KV of the others is nobody's."""
        blocks, start = self.core.tables[plan.rows[entry]], int(plan.starts[entry])
        drafts = int(plan.drafts[entry])
        if not len(result.accepted):
            result.accepted = np.zeros(len(plan.rows), dtype=np.int32)
        wanted = random.Random(hash(tuple(stream.tokens)) + 1).randint(0, drafts)
        assert plan.samples[entry]
        assert start + 1 == len(stream.tokens)
        self._append(entry, stream, result)
        while result.accepted[entry] < wanted and not stream.ended:
            result.accepted[entry] += 1
            self._append(entry, stream, result)
        assert len(stream.tokens) <= stream.request.prompt + stream.request.max_tokens
        kv = self.history(stream, len(stream.tokens) - 1)[start:]
        self.write(blocks, start, kv + [POISON] * (1 + drafts - len(kv)))

    def begin(self, stream: Stream, blocks: np.ndarray, computed: int) -> None:
        """Check what a row begins with."""
        assert self.read(blocks, computed) == self.history(stream, computed)

    def attend(self, stream: Stream, blocks: np.ndarray, start: int, kv: int) -> None:
        """Check what a row attends to: its own history."""
        assert kv == start
        assert self.read(blocks, start) == self.history(stream, start), "foreign KV"

    def _append(self, entry: int, stream: Stream, result: Result) -> None:
        token = sample(tuple(stream.tokens))
        stream.tokens.append(token)
        if not stream.ended:
            stream.generated += 1
        if self.ends and token == END and not stream.ended:
            stream.ended = True
            result.finished.append(Finish(entry, FinishReason.STOP, result.steps + 1))

    def _seal(self, plan: Plan, result: Result) -> None:
        if not self.hashed:
            return
        size = self.core.config.block_size
        for entry, row in enumerate(plan.rows.tolist()):
            stream = self.streams[self.rows[row]]
            computed = int(plan.starts[entry]) + int(plan.counts[entry]) * result.steps
            if len(plan.drafts):
                computed = len(stream.tokens) - 1
            full = computed // size
            if full > stream.known and stream.known >= stream.request.prompt // size:
                hashes = self.hashes(stream.tokens, stream.request.expiry)[stream.known : full]
                result.full_block_hashes[row] = hashes
                stream.known = full

    # --- what the engine said ---------------------------------------------------------------

    def observe(self, effects: Effects) -> None:
        for finished in effects.finished:
            stream = self.streams[finished.request]
            if finished.reason is not FinishReason.ABORT:
                assert finished.generated == stream.generated
                assert finished.prompt + finished.generated == finished.prompt + stream.generated
            assert 0 <= finished.cached < finished.prompt or finished.cached == 0
            self.rows = {r: name for r, name in self.rows.items() if name != finished.request}
            if len(finished.held):
                self.held[finished.request] = finished.held

    def answer(self, name: str, tokens: int) -> Effects:
        """End a load with `tokens` of it in place, also if nobody wants it any more."""
        load = self.loads.pop(name)
        stream = self.streams[name]
        size = self.core.config.block_size
        first = load.first * size
        self.write(load.blocks, 0, [POISON] * (len(load.blocks) * size))
        self.write(load.blocks, 0, self.history(stream, first + tokens)[first:])
        return self.core.loaded(name, tokens)

    # --- laws -------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the engine's laws, and that cached and held blocks hold what they stand for."""
        self.core.check_integrity()
        size = self.core.config.block_size
        pool = self.core._state.pool
        for block in np.flatnonzero(pool.keys.any(axis=1)):
            high, low = pool.keys[block].tolist()
            history = self.content[high, low]
            expected = [history[: i + 1] for i in range(len(history) - size, len(history))]
            assert self.device[block] == expected, "a cached block holds something else"
        for name, blocks in self.held.items():
            stop = len(blocks) * size
            assert self.read(blocks, stop) == self.history(self.streams[name], stop)
