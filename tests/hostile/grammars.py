"""Structured output that costs more than its request, and requests that the engine fails at."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from tests.hostile.faults import BAD_SEED
from tests.hostile.registry import Target, again, attack, expect

#: 400: refused by name. 0: not answered yet when the attacker left.
_FEW_TOKENS = 64


async def _wanted(target: Target, wanted: dict[str, Any], *statuses: int) -> None:
    body = {"prompt": "Once", "max_tokens": _FEW_TOKENS, "structured_outputs": wanted, "seed": 1}
    expect(await again(partial(target.send, body), 4), *statuses)


@cache
def _choices(first: int) -> list[str]:
    return [f"c{i}" for i in range(first, first + 150_000)]


@attack("grammars")
async def ambiguous(target: Target) -> None:
    await _wanted(target, {"grammar": 'start: e\ne: e e | e e e | /[a-z]/ | ""'}, 400)


@attack("grammars")
async def exponential_rules(target: Target) -> None:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3500))
    await _wanted(target, {"grammar": f'start: r0\n{rules}\nr3500: "a"'}, 400)


@attack("grammars")
async def long_choices(target: Target) -> None:
    await _wanted(target, {"choice": _choices(0)}, 400)
    await _wanted(target, {"choice": _choices(150_000)}, 400)


@attack("grammars")
async def most_choices_accepted(target: Target) -> None:
    number = 0

    async def another() -> int:
        nonlocal number
        number += 1
        wanted = {"choice": [f"c{number}x{i}" for i in range(1000)]}
        body = {"prompt": "Once", "max_tokens": _FEW_TOKENS, "structured_outputs": wanted}
        return await target.send(body)

    expect(await again(another), 0, 200, 400, 503)


@attack("grammars")
async def nested_regex(target: Target) -> None:
    await _wanted(target, {"regex": "(" * 5000 + ")" * 5000}, 400)


@attack("grammars")
async def counted_regex(target: Target) -> None:
    await _wanted(target, {"regex": "((a{0,300}){0,300}){0,300}b"}, 200, 400)


@attack("grammars")
async def endless_schema(target: Target) -> None:
    await _wanted(
        target, {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, 400
    )


@attack("grammars")
async def wide_schema(target: Target) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    await _wanted(target, {"json": schema}, 0, 200, 400, 503)


@attack("faults")
async def a_step_that_raises(target: Target) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "seed": BAD_SEED}
    expect(await again(partial(target.send, body)), 500)


@attack("faults")
async def end_ids_beyond_the_vocabulary(target: Target) -> None:
    body = {"prompt": "Once", "min_tokens": 4, "max_tokens": 8, "stop_token_ids": [2**31 - 1]}
    expect(await again(partial(target.send, body)), 200, 400)


@attack("faults")
async def extreme_sampling(target: Target) -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e-300}, {"temperature": 1e300}, {"top_p": 1e-300}, {"seed": 2**64},
        {"presence_penalty": 1e308}, {"repetition_penalty": 1e-308}, {"min_p": 1.0},
        {"logit_bias": {"5": 1e308}}, {"top_k": 2**63}, {"logprobs": 10**9}, {"n": 10**9},
        {"max_tokens": 10**30}, {"truncate_prompt_tokens": 1}, {"allowed_token_ids": [0]},
    ]  # fmt: skip
    number = 0

    async def another() -> int:
        nonlocal number
        number += 1
        body = {"prompt": "Once", "max_tokens": 4} | extremes[number % len(extremes)]
        return await target.send(body)

    expect(await again(another), 200, 400)
