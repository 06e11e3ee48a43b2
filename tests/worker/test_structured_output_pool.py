"""Grammars are compiled in turn by tenant, off the loop, and only while somebody waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pigou.models import bundled_path
from pigou.request import Grammar
from pigou.runtime.step_output import GrammarError
from pigou.runtime.structured_output import Grammars, read_grammars
from pigou.wire.openai_requests import decode_generation
from pigou.wire.sampling_params import Defaults
from pigou.worker.http.served_model import ServedModel
from pigou.worker.http.structured_output_pool import (
    MAX_QUEUED_PER_TENANT,
    CompileQueueFull,
    GrammarCompilePool,
    GrammarSandbox,
    GrammarSource,
    OutputConstraints,
)

VOCAB, ENDS = 2560, frozenset({1})


class PanicException(BaseException):
    """As libraries in Rust raise it."""


class Gate:
    """Trials that wait until they are let through, or killed."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.kills = 0
        self._open = threading.Event()

    def try_grammar(self, grammar: Grammar) -> None:
        self.begun.append(grammar.source)
        assert self._open.wait(60)
        if grammar.source.startswith("panic"):
            raise PanicException("index out of bounds")
        if grammar.source.startswith("bad"):
            raise GrammarError("it is bad")

    def kill(self) -> None:
        self.kills += 1
        self.open()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.open()


def grammars() -> Grammars:
    return read_grammars(bundled_path(), VOCAB, ENDS)


def run(
    law: Callable[[GrammarCompilePool, Gate], Coroutine[Any, Any, None]], threads: int = 1
) -> None:
    async def main() -> None:
        gate = Gate()
        pool = GrammarCompilePool(grammars, lambda: gate, threads)
        try:
            await law(pool, gate)
        finally:
            pool.close()

    asyncio.run(main())


def ask(pool: GrammarCompilePool, tenant: str, source: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(pool.prepare(Grammar("regex", source), tenant, 1))


async def until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")


def test_tenants_take_turns_however_many_grammars_one_of_them_sends() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        tasks = [ask(pool, "many", f"a{i}") for i in range(8)]
        await until(lambda: gate.begun == ["a0"])
        tasks.append(ask(pool, "one", "b"))
        await until(lambda: pool.queued == 8)
        gate.open()
        await asyncio.gather(*tasks)
        assert gate.begun[:3] == ["a0", "b", "a1"] or gate.begun[:3] == ["a0", "a1", "b"]
        assert len(gate.begun) == 9

    run(law)


def test_one_tenant_never_takes_all_threads() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        first = [ask(pool, "many", f"a{i}") for i in range(4)]
        await until(lambda: gate.begun == ["a0"])
        other = ask(pool, "one", "b")
        await until(lambda: sorted(gate.begun) == ["a0", "b"])
        gate.open()
        await asyncio.gather(*first, other)

    run(law, threads=2)


def test_a_grammar_that_nobody_waits_for_leaves_the_queue_and_its_trial_is_killed() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        under_way, queued = ask(pool, "t", "a0"), ask(pool, "t", "a1")
        await until(lambda: gate.begun == ["a0"] and pool.queued == 1)
        queued.cancel()
        await until(lambda: pool.queued == 0)
        assert gate.kills == 0
        under_way.cancel()
        await until(lambda: gate.kills == 1)
        await ask(pool, "t", "a2")
        assert gate.begun == ["a0", "a2"]

    run(law)


def test_a_tenant_with_a_full_queue_is_refused_and_others_are_not() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        tasks = [ask(pool, "many", "a")]
        await until(lambda: gate.begun == ["a"])
        tasks += [ask(pool, "many", f"a{i}") for i in range(MAX_QUEUED_PER_TENANT)]
        await until(lambda: pool.queued == MAX_QUEUED_PER_TENANT)
        with pytest.raises(CompileQueueFull):
            await pool.prepare(Grammar("regex", "c"), "many", 1)
        tasks.append(ask(pool, "one", "b"))
        await until(lambda: pool.queued == MAX_QUEUED_PER_TENANT + 1)
        gate.open()
        await asyncio.gather(*tasks)

    run(law)


def test_a_faulty_grammar_is_remembered_and_a_good_one_is_tried_once() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        gate.open()
        for _ in range(3):
            with pytest.raises(ValueError, match="it is bad"):
                await pool.prepare(Grammar("regex", "bad"), "t", 1)
            assert len(await pool.prepare(Grammar("regex", "good"), "t", 3)) == 3
        assert gate.begun == ["bad", "good"]

    run(law)


def test_a_panic_of_the_library_is_answered() -> None:
    async def law(pool: GrammarCompilePool, gate: Gate) -> None:
        gate.open()
        with pytest.raises(ValueError, match="index out of bounds"):
            await pool.prepare(Grammar("regex", "panic"), "t", 1)
        assert await pool.prepare(Grammar("regex", "good"), "t", 1)

    run(law)


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(bundled_path() / "tokenizer.json", VOCAB, ENDS)
    yield made
    made.close()


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(4000)) + '\nr4000: "a"'


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("grammar", CHAIN),
        Grammar("grammar", 'start: e\ne: e e | e e e | /[a-z]/ | ""'),
        Grammar("regex", "([a-z]{1,1000}){1,1000}["),
        Grammar("json_schema", json.dumps({"type": "no such type"})),
        Grammar("json_schema", "[" * 100_000),
    ],
    ids=["deep chain", "ambiguous", "regex", "type", "brackets"],
)
def test_a_grammar_that_crashes_or_overruns_is_refused_and_the_next_is_served(
    trials: GrammarSandbox, grammar: Grammar
) -> None:
    with pytest.raises(GrammarError):
        trials.try_grammar(grammar)
    trials.try_grammar(Grammar("regex", "[a-z]{3}"))
    trials.kill()
    trials.try_grammar(Grammar("json_object"))


def test_a_warm_pool_has_read_the_tokenizer_and_reads_it_no_more() -> None:
    made: list[int] = []

    def make() -> Grammars:
        made.append(1)
        return grammars()

    async def main() -> None:
        gate = Gate()
        gate.open()
        pool = GrammarCompilePool(make, lambda: gate, 1)
        pool.warm_up()
        assert made == [1]
        await asyncio.gather(
            *(pool.prepare(Grammar("regex", f"a{i}"), str(i), 1) for i in range(4))
        )
        assert made == [1]
        pool.close()

    asyncio.run(main())


def test_a_tokenizer_that_grammars_cannot_use_is_read_once_and_told_each_time() -> None:
    made: list[int] = []

    def make() -> Grammars:
        made.append(1)
        raise GrammarError("the tokenizer cannot be used for grammars: it is odd")

    async def main() -> None:
        pool = GrammarCompilePool(make, Gate, 1)
        pool.warm_up()
        for i in range(3):
            with pytest.raises(ValueError, match="it is odd"):
                await pool.prepare(Grammar("regex", f"a{i}"), "t", 1)
        assert made == [1]
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "fields", "close_after"),
    [
        (96, {}, 96), (0, {}, 0), (96, {"max_tokens": 900}, 0),
        (96, {"max_completion_tokens": 900}, 0),
        (96, {"response_format": {"type": "json_object"}}, 96),
        (96, {"response_format": None, "structured_outputs": {"regex": "a*"}}, 0),
        (96, {"response_format": None, "tool_choice": "required",
              "tools": [{"type": "function", "function": {"name": "f"}}]}, 96),
    ],
)  # fmt: skip
async def test_json_closes_where_the_model_says_so_and_the_request_has_no_limit(
    said: int, fields: dict[str, Any], close_after: int
) -> None:
    async def prepare(*_: Any) -> list[None]:
        return [None]

    model = SimpleNamespace(
        defaults=Defaults(json_close_after=said), tool_format=None, reasoning=None
    )
    constraints = OutputConstraints(
        cast(GrammarSource, SimpleNamespace(prepare=prepare)), cast(ServedModel, model),
        flexible=False,
    )  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": form, **fields}
    request = decode_generation(json.dumps(body).encode())
    shape = await constraints.shape(request, 1, (), tools=constraints.tools(request))
    assert shape.grammar is not None
    assert shape.grammar.close_after == close_after
