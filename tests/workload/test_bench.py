"""Whole runs against an endpoint with known timing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.workload.stub import LIMIT, MODEL, Stub

from pigou.config import ConfigError
from pigou.workload.bench import BenchResult, bench
from pigou.workload.bench_config import BenchConfig
from pigou.workload.endpoint import EndpointError
from pigou.workload.load_generator import LoadGenerator

Start = Callable[..., Stub]


def run(stub: Stub | str, **options: Any) -> BenchResult:
    url = stub if isinstance(stub, str) else stub.url
    config = BenchConfig(url=url, **({"input": "8", "output": "4", "requests": 3} | options))
    result = asyncio.run(asyncio.wait_for(bench(config), 100))
    assert result is not None
    return result


def test_300_streams_are_really_in_flight_at_once(stub: Start) -> None:
    server = stub(barrier=300)
    result = run(server, concurrency=300, requests=300)
    assert (result.summary.completed, result.summary.failed) == (300, 0)
    assert server.peak == 300


def test_an_open_loop_has_no_hidden_limit_either(stub: Start) -> None:
    server = stub(barrier=250)
    result = run(server, rate=5000.0, requests=250)
    assert (result.summary.completed, server.peak) == (250, 250)


def test_latencies_are_those_of_the_server(stub: Start) -> None:
    seen = run(stub(first=0.2, gap=0.03), output="5", requests=2).summary
    assert None not in (seen.ttft, seen.itl, seen.tpot, seen.e2e)
    assert seen.ttft.p50 >= 200
    assert seen.itl.mean >= 29
    assert seen.tpot.mean == pytest.approx((seen.e2e.mean - seen.ttft.mean) / 4)
    assert seen.tpot.mean == pytest.approx(seen.itl.mean)
    assert (seen.output_tokens, seen.prompt_tokens, seen.counted_by) == (10, 20, "usage")


def test_waiting_for_a_slot_is_client_queue_wait_and_part_of_ttft(stub: Start) -> None:
    seen = run(stub(first=0.1), rate=1000.0, requests=4, max_inflight=1, output="1").summary
    assert seen.queue_wait.p99 >= 280
    assert seen.ttft.mean == pytest.approx(seen.queue_wait.mean + seen.server_ttft.mean)


def test_chunks_of_several_tokens_are_counted_as_what_they_hold(stub: Start) -> None:
    for how in ({"usage": "continuous"}, {"usage": "none", "ids": True}):
        seen = run(stub(per_chunk=3, gap=0.02, **how), output="7", requests=2).summary
        assert (seen.output_tokens, seen.tokens_per_chunk) == (14, 14 / 6)
        assert seen.itl is not None
        assert seen.itl.p50 == 0
        assert seen.itl.mean >= 2 * 20 / 6 - 1


def test_an_endpoint_that_tells_no_counts_is_said_to(stub: Start) -> None:
    result = run(stub(per_chunk=2, usage="final"), output="8", requests=1)
    assert (result.summary.counted_by, result.summary.output_tokens) == ("chunks", 8)
    assert any("2.00 tokens" in note for note in result.notes)
    result = run(stub(per_chunk=2, usage="none"), output="8", requests=1)
    assert result.summary.output_tokens == 4
    assert any("counts as one" in note for note in result.notes)
    (note,) = run(stub(usage="final"), output="8", requests=1).notes
    assert "one each" in note


def test_prompts_are_token_ids_of_the_asked_lengths_where_it_tokenizes(stub: Start) -> None:
    server = stub()
    result = run(server, input="5:9", output="2:3", requests=12, prefixes=2, prefix_length=4)
    assert result.prompts == "token ids"
    prompts = [body["prompt"] for body in server.jobs]
    assert {len(prompt) for prompt in prompts} <= set(range(9, 14))
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 2
    assert {body["max_tokens"] for body in server.jobs} == {2, 3}


def test_prompts_are_words_where_it_does_not(stub: Start) -> None:
    server = stub(tokenizer=False)
    result = run(server, input="6")
    assert result.prompts == "text"
    assert [len(body["prompt"].split()) for body in server.jobs] == [6, 6, 6]


def test_prompts_come_from_the_text(stub: Start, tmp_path: Any) -> None:
    text = "It was the best of times, it was the worst of times. " * 3
    (tmp_path / "text").write_text(text)
    server = stub(tokenizer=False)
    run(server, text=str(tmp_path / "text"), input="5")
    assert all(body["prompt"] in text * 2 for body in server.jobs)


@pytest.mark.parametrize("content", [None, "", b"\xff\xfe"])
def test_a_text_that_cannot_be_used_is_refused(stub: Start, tmp_path: Any, content: Any) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="--text"):
        run(stub(), text=str(path))


def test_chat_sends_messages_and_the_key(stub: Start) -> None:
    server = stub()
    result = run(server, chat=True, api_key="k-123", model="mine", requests=1)
    assert result.summary.completed == 1
    assert server.paths == ["/v1/chat/completions"] * 2
    assert len(server.jobs[0]["messages"][0]["content"].split()) == 8
    assert server.jobs[0]["model"] == result.model == "mine"
    assert server.headers[0]["authorization"] == "Bearer k-123"


def test_the_model_is_the_first_that_is_listed(stub: Start) -> None:
    assert run(stub(), requests=1).model == MODEL


def test_warm_up_is_not_measured_and_shares_prefixes_only(stub: Start) -> None:
    server = stub()
    result = run(server, warmup=4, requests=3, prefixes=1, prefix_length=6)
    assert (result.summary.offered_requests, len(server.jobs)) == (3, 7)
    assert len({tuple(body["prompt"]) for body in server.jobs}) == 7
    assert len({tuple(body["prompt"][:6]) for body in server.jobs}) == 1


def test_the_seed_decides_prompts_and_nothing_else_does(stub: Start) -> None:
    server = stub()
    for seed in (1, 1, 2):
        run(server, seed=seed, requests=2)
    one, two, other = ([body["prompt"] for body in server.jobs[i : i + 2]] for i in range(0, 6, 2))
    assert one == two != other


def test_duration_ends_the_sending(stub: Start) -> None:
    result = run(stub(), rate=100.0, cv=0.0, requests=None, duration=0.2)
    assert result.summary.offered_requests == result.summary.completed == 19
    assert run(stub(first=0.05), requests=None, duration=0.12).summary.completed <= 3


def test_a_schedule_that_ends_ends_the_sending(stub: Start) -> None:
    result = run(stub(), rate="50@0/100@0.1/0@0.2", cv=0.0, requests=None)
    assert result.summary.offered_requests == result.summary.completed == 14


def test_fields_that_are_refused_are_left_out(stub: Start) -> None:
    refuse = ("continuous_usage_stats", "ignore_eos", "temperature", "max_tokens")
    server = stub(refuse=refuse)
    result = run(server, requests=1)
    assert result.summary.completed == 1
    assert not set(refuse) & {*server.jobs[0], *server.jobs[0]["stream_options"]}
    assert server.jobs[0]["max_completion_tokens"] == 4
    assert any("ignore_eos" in note for note in result.notes)


def test_ignore_eos_is_asked_for_left_out_or_insisted_on(stub: Start) -> None:
    server = stub()
    run(server, requests=1)
    run(server, requests=1, ignore_eos=False)
    assert ["ignore_eos" in body for body in server.jobs] == [True, False]
    with pytest.raises(EndpointError, match="--no-ignore-eos"):
        run(stub(refuse=("ignore_eos",)), ignore_eos=True)


def test_outputs_shorter_than_asked_are_told(stub: Start) -> None:
    result = run(stub(short=3), output="4", requests=2)
    assert (result.summary.output_tokens, result.summary.output_tokens_asked) == (6, 8)
    assert any("6 tokens of 8" in note for note in result.notes)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "HTTP 500"),
        ("503", "HTTP 503"),
        ("cut", "broken stream"),
        ("cut at once", "disconnected"),
        ("error", "error event"),
        ("abort", "aborted"),
        ("hang", "timeout"),
    ],
)
def test_a_failure_has_its_reason_and_no_latency(stub: Start, fault: str, reason: str) -> None:
    server = stub(fault=lambda n: fault if n == 1 else "")
    seen = run(server, concurrency=1, requests=4, timeout=1.5).summary
    assert (seen.offered_requests, seen.completed, seen.failed) == (4, 3, 1)
    assert [(f.reason, f.count) for f in seen.failures] == [(reason, 1)]
    assert seen.output_tokens == 12
    assert seen.e2e is not None
    assert seen.e2e.p99 < 1500


def test_a_server_that_dies_is_counted_as_connection_refused(stub: Start) -> None:
    server = stub(fault=lambda n: "die" if n == 1 else "")
    seen = run(server, concurrency=1, requests=6).summary
    assert (seen.completed, seen.failed) == (1, 5)
    assert "connection refused" in {failure.reason for failure in seen.failures}


def test_an_endpoint_that_is_not_there_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointError, match="does not answer"):
            run(f"http://127.0.0.1:{unused.getsockname()[1]}")


def test_requests_that_cannot_fit_the_model_are_refused(stub: Start) -> None:
    with pytest.raises(ConfigError, match=f"{LIMIT}"):
        run(stub(), input=str(LIMIT), output="1")


def test_a_warm_up_that_fails_ends_the_run(stub: Start) -> None:
    with pytest.raises(EndpointError, match="HTTP 500"):
        run(stub(fault=lambda _: "500"), warmup=2)


def test_stopping_gives_what_was_measured_so_far(stub: Start) -> None:
    async def interrupted() -> BenchResult | None:
        stop = asyncio.Event()

        def watch(drive: LoadGenerator) -> None:
            if len(drive.outcomes) == 3:
                stop.set()

        config = BenchConfig(url=server.url, input="8", output="4", requests=50, concurrency=2)
        return await bench(config, stop, watch)

    server = stub(first=0.02)
    result = asyncio.run(interrupted())
    assert result is not None
    assert result.interrupted
    assert 3 <= result.summary.completed <= 4
    assert result.summary.offered_requests == result.summary.completed + result.summary.cancelled
    assert result.summary.failed == 0
