"""Compiles request grammars off the event loop and engine, fairly by tenant."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pigou.request import Grammar
from pigou.runtime.step_output import GrammarError, described, is_contained
from pigou.text.reasoning import Reasoning
from pigou.wire.errors import APIError, bad_request
from pigou.wire.fair_turns import FairTurns
from pigou.wire.openai_requests import ChatRequest, GenerationRequest
from pigou.wire.structured_output import grammar
from pigou.worker.http.sequence_output import Tools, request_tools
from pigou.worker.http.served_model import ServedModel

if TYPE_CHECKING:
    from pigou.runtime.structured_output import Grammars, GrammarState

log = logging.getLogger(__name__)

#: Max queued grammars, per tenant and in total.
MAX_QUEUED_PER_TENANT = 16
MAX_QUEUED = 256
#: Concurrent compilations, at most one per tenant.
THREADS = 2
_REFUSALS = 256
_JSON = ("json_schema", "json_object")
#: Wall-clock limit of a trial, besides its CPU limit.
TRIAL_SECONDS = 60.0


class CompileQueueFull(Exception):
    """Raised if too many grammars are queued."""


class GrammarSource:
    """Compiles a request's grammar to states for its sequences; without a model, refuses."""

    def __init__(self, refuse: Callable[[Grammar], None]) -> None:
        self._refuse = refuse

    async def prepare(
        self, grammar: Grammar, tenant: str, count: int, output: Sequence[int] = ()
    ) -> list[GrammarState]:
        """Return `count` states after `output`; raises ValueError or CompileQueueFull."""
        del tenant, count, output
        self._refuse(grammar)
        return []

    def warm_up(self) -> None:
        """Load the tokenizer before the first request."""

    def close(self) -> None:
        """Stop all threads and processes."""


@dataclass(eq=False, slots=True)
class _Job:
    grammar: Grammar
    count: int
    output: tuple[int, ...]
    left: bool = False  # the client is gone


class GrammarCompilePool(GrammarSource):
    """Compiles grammars on a few threads, one per tenant, round-robin. Event loop only."""

    def __init__(
        self,
        grammars: Callable[[], Grammars],
        trials: Callable[[], GrammarSandbox],
        threads: int = THREADS,
    ) -> None:
        self._make = grammars
        self._grammars: Grammars | None = None
        self._idle = [trials() for _ in range(threads)]
        self._all_trials = tuple(self._idle)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._turns = FairTurns(threads, max_per_tenant=1)
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._making = threading.Lock()
        self._unusable: ValueError | None = None

    def warm_up(self) -> None:
        """Load the tokenizer, which can hold the GIL for a second; errors surface on use."""
        with suppress(ValueError):
            self._made()

    @property
    def queued(self) -> int:
        """Queued grammars."""
        return self._turns.total_waiting

    async def prepare(
        self, grammar: Grammar, tenant: str, count: int, output: Sequence[int] = ()
    ) -> list[GrammarState]:
        """Return `count` grammar states after `output` (see `GrammarSource`)."""
        if (message := self._refused.get(grammar)) is not None:
            self._refused.move_to_end(grammar)
            raise ValueError(message)
        known = self._grammars
        if known is not None and not output and known.has(grammar):
            return [known.start(grammar) for _ in range(count)]
        self._check_room(tenant)
        await self._turns.take(tenant)
        job, trials = _Job(grammar, count, tuple(output)), self._idle.pop()
        work = asyncio.get_running_loop().create_task(self._compile(job, trials))
        work.add_done_callback(partial(self._done, tenant, trials))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            job.left = True
            trials.kill()
            raise

    def close(self) -> None:
        """Stop threads and processes; queued jobs fail."""
        self._turns.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trials in self._all_trials:
            trials.close()

    def _check_room(self, tenant: str) -> None:
        if (own := self._turns.waiting(tenant)) >= MAX_QUEUED_PER_TENANT:
            raise CompileQueueFull(f"{own} of its tenant wait to be compiled")
        if (queued := self.queued) >= MAX_QUEUED:
            raise CompileQueueFull(f"{queued} wait to be compiled")

    def _done(
        self, tenant: str, trials: GrammarSandbox, work: asyncio.Task[list[GrammarState]]
    ) -> None:
        if not work.cancelled():
            work.exception()  # the client may be gone
        self._idle.append(trials)
        self._turns.give_back(tenant)

    async def _compile(self, job: _Job, trials: GrammarSandbox) -> list[GrammarState]:
        loop = asyncio.get_running_loop()
        try:
            grammars = self._grammars
            if grammars is None:
                grammars = await loop.run_in_executor(self._pool, self._made)
            return await loop.run_in_executor(self._pool, _compile, grammars, job, trials)
        except ValueError as error:
            if not job.left and not job.output:  # the output may be at fault
                self._refused[job.grammar] = str(error)
                while len(self._refused) > _REFUSALS:
                    self._refused.popitem(last=False)
            raise
        except Exception:  # raised by the pool itself at process exit
            log.exception("compiling a grammar failed")
            raise

    def _made(self) -> Grammars:
        """Return the tokenizer's grammars, loading it once; thread-safe."""
        with self._making:
            if self._unusable is not None:
                raise self._unusable
            if self._grammars is None:
                try:
                    self._grammars = self._make()
                except ValueError as error:
                    self._unusable = error
                    raise
            return self._grammars


def _compile(grammars: Grammars, job: _Job, trials: GrammarSandbox) -> list[GrammarState]:
    if job.left:
        raise ValueError("the client is gone")
    try:
        if not grammars.has(job.grammar):
            trials.try_grammar(job.grammar)
        return [grammars.start(job.grammar, job.output) for _ in range(job.count)]
    except BaseException as error:
        # Library panics are not `Exception`, but must answer the request.
        if isinstance(error, ValueError) or not is_contained(error):
            raise
        raise ValueError(f"{job.grammar.kind}: {described(error)}") from None


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Constraint on the output."""

    grammar: Grammar | None  # None for free output
    # grammar state per sequence; None without a grammar.
    states: list[GrammarState | None]
    tools: Tools | None = None  # callable tools


class OutputConstraints:
    """Builds the output constraints of requests."""

    def __init__(self, source: GrammarSource, model: ServedModel, *, flexible: bool) -> None:
        self._source = source
        self._model = model
        self._flexible = flexible

    def tools(self, request: GenerationRequest) -> Tools | None:
        """Return a request's validated tools, if it may call any."""
        if not isinstance(request, ChatRequest):
            return None
        return request_tools(request, self._model.tool_format, self._model.reasoning)

    async def shape(
        self, request: GenerationRequest, count: int, output: Sequence[int], tenant: str = "",
        tools: Tools | None = None, reasoning: Reasoning | None = None,
    ) -> OutputConstraint:  # fmt: skip
        """Return a request's constraint, which holds after reasoning.

        Raises APIError 400 (bad grammar) or 503 (queue full).
        """
        wanted, name = self._wanted(request, tools)
        if wanted is None:
            return OutputConstraint(None, [None] * count, tools)
        watches = []
        if reasoning is not None:
            watches = [reasoning.end(self._model.tokenizer) for _ in range(count)]
        output = [token for token in output if not [end for end in watches if end.take(token)]]
        try:
            tenant_key = tenant or request.cache_salt or ""
            states = await self._source.prepare(wanted, tenant_key, count, output)
        except CompileQueueFull as error:
            raise APIError(
                503, f"{name} cannot be compiled now: {error}.", name, retry_after=1
            ) from None
        except ValueError as error:
            raise bad_request(f"{name} cannot be honoured: {error}", name) from None
        for state, end in zip(states, watches, strict=False):
            state.wait_for(end)
        return OutputConstraint(wanted, [*states], tools)

    def _wanted(
        self, request: GenerationRequest, tools: Tools | None
    ) -> tuple[Grammar | None, str]:
        if tools is not None and tools.use.grammar is not None:
            return self._closing(request, tools.use.grammar), "tools"
        form = request.response_format
        formed = form is not None and form.type != "text"
        name = "response_format" if formed else "structured_outputs"
        return self._closing(request, grammar(request, self._flexible)), name

    def _closing(self, request: GenerationRequest, wanted: Grammar | None) -> Grammar | None:
        """Let JSON without a token limit close early where the model's config says so."""
        limits = (request.max_tokens, getattr(request, "max_completion_tokens", None))
        if wanted is None or wanted.kind not in _JSON or limits != (None, None):
            return wanted
        return replace(wanted, close_after=self._model.defaults.json_close_after)


class GrammarSandbox:
    """Tries grammars in a child process, restarted after a crash. Only `kill` is thread-safe."""

    def __init__(self, tokenizer: Path, vocab: int, end_tokens: frozenset[int]) -> None:
        self._first = {"tokenizer": str(tokenizer), "vocab": vocab, "ends": sorted(end_tokens)}
        self._process: subprocess.Popen[str] | None = None
        self._killed: subprocess.Popen[str] | None = None
        self._closed = False
        self.started = 0

    def try_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar and sample outputs in the child; raises GrammarError on failure."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(TRIAL_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            fields = {name: getattr(grammar, name) for name in Grammar.__dataclass_fields__}
            process.stdin.write(json.dumps(fields) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self._end(process)
            raise GrammarError(
                f"{grammar.kind}: compiling it took too long, too much memory or too deep a "
                "recursion: make it smaller"
            )
        error = json.loads(answer)["error"]
        if error is not None:
            raise GrammarError(error)

    def kill(self) -> None:
        """Kill the child and its trial; thread-safe."""
        process = self._process
        if process is not None:
            self._killed = process
            process.kill()

    def close(self) -> None:
        """Kill the child for good; thread-safe."""
        self._closed = True
        self.kill()

    def _running(self) -> subprocess.Popen[str]:
        if self._closed:
            raise GrammarError("this worker is shutting down")
        process = self._process
        if process is not None:
            # A killed process may briefly appear alive.
            if process is not self._killed and process.poll() is None:
                return process
            self._end(process)
        process = subprocess.Popen(
            [sys.executable, "-m", "pigou.runtime.grammar_trial"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._process = process
        self.started += 1
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._first) + "\n")
        process.stdin.flush()
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unread output
                    pipe.close()
        self._process = None
