"""The seconds of a worker go to whom it served."""

from __future__ import annotations

import pytest

from pigou.cost.usage import Payer, Usage, WorkerRate
from pigou.cost.worker_meter import WorkerMeter
from pigou.request import SECOND

RATE = WorkerRate(usd_per_s=1.0, weight_bytes=1000.0, kv_bytes=1.0)


def payer() -> Payer:
    return Payer((Usage(),))


def test_streams_pay_the_shares_of_a_step() -> None:
    meter, payers, sizes = WorkerMeter(RATE, 0), [payer(), payer()], [100.0, 900.0]
    for name, who, size in zip("ab", payers, sizes, strict=True):
        meter.stream_began(name, who, int(size), 1, 0)
    meter.settle(10 * SECOND)
    paid = [who.usages[0].decode_usd for who in payers]
    tolls = [who.usages[0].marginal_usd for who in payers]
    weights = 1000.0  # as long as the KV of both: half of a step, shared equally
    assert paid == pytest.approx([10 * (size + weights / 2) / (2 * weights) for size in sizes])
    assert tolls == pytest.approx([10 * size / (2 * weights) for size in sizes])


def test_prompts_one_after_another_pay_their_own_seconds() -> None:
    meter, payers = WorkerMeter(RATE, 0), [payer(), payer()]
    for name, who in zip("ab", payers, strict=True):
        meter.prompt_sent(name, who, 100, 0)
    meter.prompt_ended("a", 2 * SECOND)
    meter.settle(3 * SECOND)
    meter.prompt_ended("b", 7 * SECOND)
    meter.settle(8 * SECOND)
    assert [who.usages[0].prefill_gpu_s for who in payers] == pytest.approx([3.0, 4.0])
    assert meter.idle_s == pytest.approx(1.0)


def test_prompts_of_one_step_share_it_by_their_tokens() -> None:
    meter, payers = WorkerMeter(RATE, 0), [payer(), payer()]
    for name, who, tokens in zip("ab", payers, (100, 300), strict=True):
        meter.prompt_sent(name, who, tokens, 0)
    for name in "ab":
        meter.prompt_ended(name, 4 * SECOND)
    meter.settle(4 * SECOND)
    assert [who.usages[0].prefill_gpu_s for who in payers] == pytest.approx([1.0, 3.0])


def test_a_prompt_beside_streams_pays_what_their_steps_leave() -> None:
    meter, stream, prompt = WorkerMeter(RATE, 0), payer(), payer()
    meter.stream_began("s", stream, 0, 1, 0)
    meter.tick(0)
    for tenth in range(1, 11):  # a step takes 10 ms
        meter.stream_tokens("s", 10, tenth * SECOND // 10)
        meter.tick(tenth * SECOND // 10)
    meter.settle(SECOND)
    alone = stream.usages[0].decode_gpu_s
    meter.prompt_sent("p", prompt, 1000, SECOND)
    meter.stream_tokens("s", 20, 2 * SECOND)  # 20 steps in a second: 0.2 s and a little
    meter.prompt_ended("p", 2 * SECOND)
    meter.settle(2 * SECOND)
    assert alone == pytest.approx(1.0)
    assert stream.usages[0].decode_gpu_s - alone == pytest.approx(0.21, abs=0.02)
    assert prompt.usages[0].prefill_gpu_s == pytest.approx(0.79, abs=0.02)


def test_reading_the_beginning_of_a_prompt_is_paid_apart() -> None:
    meter, who = WorkerMeter(RATE, 0), payer()
    meter.prompt_sent("a", who, 100, 0, restore_s=0.5)
    meter.prompt_ended("a", 2 * SECOND)
    meter.settle(2 * SECOND)
    assert who.usages[0].restore_gpu_s == pytest.approx(0.5)
    assert who.usages[0].prefill_gpu_s == pytest.approx(1.5)
