"""A prefill and a decode engine in one process, with real tensors, and the reference for both."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pigou.config import EngineConfig
from pigou.engine.core import EngineCore
from pigou.engine.plan import Finished, Load, Plan, Rates
from pigou.kv.hashing import chain
from pigou.kv.tiers import Tiers
from pigou.request import FinishReason, Ints, Request, SamplingParams
from pigou.runtime.local_engine import LocalEngine
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.step_output import StepOutput

SEED = b"tenure"
#: A divergence is excused where the reference's two best logits are closer than this.
TIE = 1e-5

SWAP = Rates(prefill=1.0, swap=1e12, block_bytes=1)
RECOMPUTE = Rates(prefill=1e12, swap=1.0, block_bytes=1)


@dataclass(slots=True)
class Stream:
    """One request as its client sees it."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    remote: bool
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    done: bool = False
    aborted: bool = False

    @property
    def id(self) -> str:
        return f"{self.number}.{self.attempt}"


class Side:
    """A core, an executor and a cache, stepped by hand."""

    def __init__(self, model: LoadedModel, config: EngineConfig, rates: Rates | None) -> None:
        self.config = config
        self.core = EngineCore(config, tiers=self.tiers(model))
        self.core.rates = rates
        self.cache = model.cache(config.blocks, config.block_size, config.host_blocks)
        self.executor = model.executor(self.cache, self.core.tables, config.max_model_len)
        self.owners: dict[int, str] = {}
        self.computed: dict[str, int] = {}
        self.clock = 0

    def tiers(self, model: LoadedModel) -> Tiers | None:
        """Make what is beyond the device: nothing."""
        return None

    def begin(self, plan: Plan) -> list[Load]:
        """Begin what a plan asks for besides its steps; returns the loads from elsewhere."""
        return plan.loads

    def settle(self) -> None:
        """Finish what goes on when nobody is served."""

    def add(self, request: str, tokens: tuple[int, ...], params: SamplingParams, resume: int = 0,
            *, remote: int = 0, hold: bool = False) -> None:  # fmt: skip
        hashes = chain(tokens, self.config.block_size, SEED)
        self.executor.add(request, tokens, params, SEED, resume, hashes=hashes)
        self.core.add(
            Request(request, len(tokens), params.max_tokens, hashes, remote=remote, hold=hold)
        )

    def step(self) -> tuple[dict[str, list[int]], list[Finished], list[Load]]:
        """One plan; new tokens by request, who finished, what is to be loaded."""
        self.clock += 1
        plan = self.core.schedule(self.clock)
        self.core.check_integrity()
        loads = self.begin(plan)
        for started in plan.started:
            self.owners[started.row] = started.request
        owners = [self.owners[row] for row in plan.rows.tolist()]
        new: dict[str, list[int]] = {}

        def note(step: StepOutput) -> bool:
            for owner, token in zip(owners, step.tokens.tolist(), strict=True):
                if token >= 0:
                    new.setdefault(owner, []).append(token)
            return True

        result = self.executor.execute(plan, note)
        for owner, count in zip(owners, plan.counts.tolist(), strict=True):
            self.computed[owner] = self.computed.get(owner, 0) + count * result.steps
        effects = self.core.apply(plan, result)
        self.core.check_integrity()
        for finished in effects.finished:
            self.executor.drop(finished.request)
        return new, effects.finished, loads

    def abort(self, request: str) -> None:
        self.core.abort(request)
        self.executor.drop(request)
        self.core.check_integrity()


class Pair:
    """Prefill side and decode side, blocks moved between them by copying their bytes."""

    def __init__(self, p: Side, d: Side) -> None:
        self.p = p
        self.d = d
        self.streams: list[Stream] = []
        self.held: dict[str, Ints] = {}
        self.loads: list[Load] = []
        self.received = 0

    def submit(self, prompt: tuple[int, ...], params: SamplingParams, remote: bool) -> Stream:
        stream = Stream(len(self.streams), prompt, params, remote)
        self.streams.append(stream)
        self._start(stream)
        return stream

    def migrate(self, stream: Stream) -> None:
        """Its worker is lost: prompt and tokens so far go out again, wherever they then run."""
        if stream.done:
            return
        self._leave(stream)
        stream.attempt += 1
        self._start(stream)

    def abort(self, stream: Stream) -> None:
        if not stream.done:
            self._leave(stream)
            stream.done = stream.aborted = True

    def step_prefill(self) -> None:
        _, finished, loads = self.p.step()
        assert not loads
        for end in finished:
            stream = self._stream(end.request)
            if stream is not None:
                self.held[end.request] = end.held
                self._decode(stream, remote=len(stream.prompt) + len(stream.tokens))

    def step_decode(self) -> None:
        new, finished, loads = self.d.step()
        self.loads += loads
        for request, tokens in new.items():
            stream = self._stream(request)
            assert stream is not None, f"{request} goes on after its end"
            stream.tokens += tokens
        for end in finished:
            stream = self._stream(end.request)
            assert stream is not None
            assert end.reason is not FinishReason.ABORT
            stream.done = True

    def deliver(self, good: float = 1.0) -> None:
        """End the oldest load, with this share of its blocks; 0 is a transfer that failed."""
        if not self.loads:
            return
        load = self.loads.pop(0)
        source = self.held.pop(load.request, None)
        count = int(len(load.blocks) * good) if source is not None else 0
        if count:
            assert source is not None
            ids = source[load.first : load.first + count]
            self.d.cache.write(load.blocks[:count], self.p.cache.read(ids))
            self.received += count
        if len(load.blocks):
            self.d.core.loaded(load.request, count * self.d.config.block_size)
        self.p.core.release(load.request)
        self.d.core.check_integrity()
        self.p.core.check_integrity()

    def run(self, limit: int = 3000) -> None:
        """Until every stream has ended."""
        for _ in range(limit):
            if all(stream.done for stream in self.streams):
                while self.loads:
                    self.deliver(0.0)
                for side in (self.p, self.d):
                    side.settle()
                return
            self.step_prefill()
            self.deliver()
            self.step_decode()
        raise AssertionError("streams do not end")

    def _start(self, stream: Stream) -> None:
        if stream.remote:
            tokens = (*stream.prompt, *stream.tokens)
            one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            self.p.add(stream.id, tokens, one, hold=True)
        else:
            self._decode(stream, remote=0)

    def _decode(self, stream: Stream, remote: int) -> None:
        done = len(stream.tokens)
        left = SamplingParams(
            max_tokens=stream.params.max_tokens - done,
            temperature=stream.params.temperature,
            seed=stream.params.seed,
            frequency_penalty=stream.params.frequency_penalty,
        )
        self.d.add(stream.id, (*stream.prompt, *stream.tokens), left, done, remote=remote)

    def _leave(self, stream: Stream) -> None:
        for side in (self.p, self.d):
            side.abort(stream.id)
        if not any(load.request == stream.id for load in self.loads):
            self.held.pop(stream.id, None)

    def _stream(self, request: str) -> Stream | None:
        number, attempt = map(int, request.split("."))
        stream = self.streams[number]
        return stream if stream.attempt == attempt and not stream.done else None


class Reference:
    """What one engine alone says, one request at a time, with nothing cached or preempted."""

    def __init__(self, model: LoadedModel) -> None:
        config = EngineConfig(
            blocks=64, block_size=16, max_model_len=256, max_batched_tokens=256,
            prefix_caching=False,
        )  # fmt: skip
        self._engine = LocalEngine(model, config)
        self._known: dict[object, tuple[list[int], list[float]]] = {}
        self.excused = 0

    def check(self, stream: Stream) -> None:
        """Compare a stream's tokens; an aborted one by the tokens that it had."""
        expected, gaps = self._answer(stream)
        if not stream.aborted:
            assert len(stream.tokens) <= len(expected) + self.excused
        for i, (got, want) in enumerate(zip(stream.tokens, expected, strict=False)):
            if got != want:
                assert stream.params.temperature == 0.0, f"stream {stream.number} at {i}"
                assert gaps[i] < TIE, f"stream {stream.number} at {i}: gap {gaps[i]}"
                self.excused += 1
                return
        if not stream.aborted:
            assert stream.tokens == expected

    def _answer(self, stream: Stream) -> tuple[list[int], list[float]]:
        p = stream.params
        key = (stream.prompt, p.max_tokens, p.temperature, p.seed, p.frequency_penalty)
        if key not in self._known:
            asked = SamplingParams(
                max_tokens=p.max_tokens, temperature=p.temperature, seed=p.seed,
                frequency_penalty=p.frequency_penalty, logprobs=2,
            )  # fmt: skip
            output = self._engine.generate([stream.prompt], asked)[0]
            gaps = [float(np.subtract(*report.logprobs[:2])) for report in output.logprobs]
            self._known[key] = (output.tokens, gaps)
        return self._known[key]
