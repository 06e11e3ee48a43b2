"""Greedy tokens in fp32 are the same whoever computed them, wherever, and beside whom."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from tests.e2e.client import Endpoint, Streamed
from tests.e2e.conftest import BLOCK_BYTES
from tests.e2e.fleet import Fleet

from pigou.wire.prefill_decode_legs import leg_one, leg_two

BLOCK = 16
#: Below it, fp32 rounding may turn the order of the two likeliest tokens.
TIE = 1e-5
OUTPUT = 24


def prompts(count: int) -> list[list[int]]:
    """Random prompts of 16 to 400 tokens; a third share a prefix, some end with a block."""
    generator = random.Random(count)
    shared = [generator.randrange(6, 1024) for _ in range(100)]
    found = []
    for number in range(count):
        size = generator.choice((16, 17, 31, 32, 48, 100, 255, 256, 257, 400))
        fresh = [generator.randrange(6, 1024) for _ in range(size)]
        found.append((shared[: 16 * (number % 6)] + fresh)[:400] if number % 3 == 0 else fresh)
    return found


class Reference:
    """What one worker alone says, one request at a time, and how sure it was."""

    def __init__(self, worker: Endpoint, count: int) -> None:
        self.prompts = prompts(count)
        self.tokens: list[list[int]] = []
        self.ties: list[list[bool]] = []
        self.excused = 0
        for number, prompt in enumerate(self.prompts):
            body = greedy(prompt) | {"logprobs": 2, "cache_salt": f"alone{number}"}
            choice = worker.complete(**body)["choices"][0]
            tops = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
            self.tokens.append(choice["token_ids"])
            self.ties.append([len(top) < 2 or top[1] - top[0] < TIE for top in tops])

    def check(self, number: int, tokens: list[int]) -> None:
        """Hold a reply against what was said; a difference is excused only at a tie."""
        expected = self.tokens[number]
        if tokens == expected:
            return
        pairs = zip(tokens, expected, strict=False)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        assert at is not None, f"prompt {number}: {len(tokens)} tokens, not {len(expected)}"
        assert self.ties[number][at], f"prompt {number} differs at token {at}"
        self.excused += 1


def greedy(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module", params=[40, pytest.param(200, marks=pytest.mark.slow)])
def reference(request: pytest.FixtureRequest, real: Fleet) -> Reference:
    return Reference(real.worker("decode-shm"), request.param)


def test_a_worker_that_plans_one_step_says_the_same_as_one_that_plans_eight(
    real: Fleet, reference: Reference
) -> None:
    single = real.worker("decode-tcp")
    for number, prompt in enumerate(reference.prompts):
        reply = single.complete(**greedy(prompt), cache_salt=f"single{number}")
        reference.check(number, reply["choices"][0]["token_ids"])
    report("one step a plan", reference)


@pytest.mark.parametrize("decode", ["decode-shm", "decode-tcp"])
def test_a_pulled_prompt_gives_the_same_tokens_and_at_most_a_block_is_computed_again(
    real: Fleet, reference: Reference, decode: str
) -> None:
    first, second = real.worker("prefill-0"), real.worker(decode)
    before = Counts(second)
    for number, prompt in enumerate(reference.prompts):
        body = greedy(prompt) | {"cache_salt": f"{decode}{number}"}
        reply = first.complete(**leg_one(body, chat=False))
        reply = second.complete(**leg_two(body, reply["kv_transfer_params"]))
        reference.check(number, reply["choices"][0]["token_ids"])
        made = (now := Counts(second)).since(before)
        before = now
        assert 0 < made["prompt"] <= BLOCK
        assert made["blocks"] in {len(prompt) // BLOCK, (len(prompt) - 1) // BLOCK}
        assert made["bytes"] == made["blocks"] * BLOCK_BYTES
        assert made["computed"] <= BLOCK + OUTPUT
    report(decode, reference)


class Counts:
    """What a worker has computed and received."""

    def __init__(self, worker: Endpoint) -> None:
        page = worker.metrics()
        self.values = {
            "prompt": page.metric("vllm:prompt_tokens_by_source_total", source="local_compute"),
            "computed": page.metric("pigou_computed_tokens_total"),
            "blocks": page.metric("pigou_kv_blocks_received_total"),
            "bytes": page.metric("pigou_kv_bytes_received_total"),
        }

    def since(self, before: Counts) -> dict[str, float]:
        return {name: value - before.values[name] for name, value in self.values.items()}


@pytest.mark.parametrize("concurrency", [1, 64])
def test_a_fleet_says_the_same_as_a_worker_alone(
    real: Fleet, reference: Reference, concurrency: int
) -> None:
    def ask(number: int) -> Streamed:
        return real.stream(**greedy(reference.prompts[number]), cache_salt=f"{concurrency}x")

    before = {name: Counts(real.worker(name)) for name in ("decode-shm", "decode-tcp")}
    for turn in ("new", "prefix hit"):
        with ThreadPoolExecutor(concurrency) as pool:
            for number, reply in enumerate(pool.map(ask, range(len(reference.prompts)))):
                assert reply.told[2] == "length"
                reference.check(number, reply.tokens)
        report(f"fleet at {concurrency}, {turn}", reference)
        if turn == "new":
            counts = [Counts(real.worker(name)).since(before[name]) for name in before]
            assert all(count["blocks"] for count in counts), "a backend was not used"
            assert all(c["bytes"] == c["blocks"] * BLOCK_BYTES for c in counts)
            assert sum(c["prompt"] for c in counts) <= BLOCK * len(reference.prompts)
    real.settle()


def test_a_stream_that_migrates_says_the_same(real: Fleet, reference: Reference) -> None:
    speaks = Event()

    def ask(number: int) -> Streamed:
        body = greedy(reference.prompts[number]) | {"cache_salt": "moved"}
        for stream in real.follow(**body):
            if stream.tokens:
                speaks.set()
        return stream

    before = real.metric("pigou_migrations_total")
    count = min(64, len(reference.prompts))
    for victim in ("decode-shm", "decode-tcp"):
        pid = real.pid(victim)
        speaks.clear()
        with ThreadPoolExecutor(count) as pool:
            replies = pool.map(ask, range(count))
            assert speaks.wait(30)
            os.kill(pid, signal.SIGKILL)
            for number, reply in enumerate(replies):
                assert reply.told[2] == "length"
                reference.check(number, reply.tokens)
        real.recovered([pid])
    moved = real.metric("pigou_migrations_total") - before
    assert moved > 0
    report(f"{moved:.0f} moves", reference)
    real.settle()


def report(what: str, reference: Reference) -> None:
    print(f"{what}: {len(reference.prompts)} prompts, {reference.excused} excused")
