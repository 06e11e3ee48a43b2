"""The peers themselves: what the other marked tests take for granted."""

from __future__ import annotations

import time
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from benchmarks.lib.peers import EVENTS_TOPIC
from benchmarks.lib.servers import get_json, post_json

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

    from benchmarks.lib.peers import VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_real_pair_moves_the_cache_and_agrees_with_one_server(vllm_pair: VllmPair) -> None:
    assert "different 0" in vllm_pair.check()
    card = get_json(vllm_pair.decode + "/v1/models")["data"][0]
    assert card["id"] == vllm_pair.model


def test_a_paused_server_answers_again_once_resumed(vllm_plain_two: list[VllmWorker]) -> None:
    server = vllm_plain_two[0].server
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(server.url + "/health", timeout=1)
    finally:
        server.resume()
    server.wait_healthy(timeout_s=30)


def _replayed(replay: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    """Return the events that a server kept, in order."""
    replay.send_multipart([b"", (0).to_bytes(8, "big")])
    events: list[dict[str, Any]] = []
    numbers: list[int] = []
    while True:
        assert replay.poll(20_000), "no answer from the replay socket"
        _, topic, number, payload = replay.recv_multipart()
        if not payload:  # all was sent
            assert numbers == list(range(len(numbers)))
            return events
        assert topic == EVENTS_TOPIC.encode()
        numbers.append(int.from_bytes(number, "big"))
        events += msgspec.msgpack.decode(payload)[1]


def test_each_plain_server_publishes_the_blocks_it_stores(
    vllm_plain_two: list[VllmWorker],
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for i, worker in enumerate(vllm_plain_two):
        with context.socket(zmq.DEALER) as replay:
            replay.connect(worker.events.replay_endpoint)
            prompt = list(range(300 + i, 300 + i + 2 * worker.block_size + 1))
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            post_json(worker.url + "/v1/completions", body)
            wanted, until = prompt[: 2 * worker.block_size], time.monotonic() + 60
            while not any(each.get("token_ids") == wanted for each in _replayed(replay)):
                assert time.monotonic() < until, "the blocks were not published"
                time.sleep(0.1)
    context.term()
