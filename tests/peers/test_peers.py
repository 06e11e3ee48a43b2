"""The peers themselves: what the other marked tests take for granted."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from benchmarks.common import get_json, post_json
from benchmarks.peers import EVENTS_TOPIC

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

    from benchmarks.peers import VllmPair

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
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            assert replay.poll(20_000), "no answer from the replay socket"
            _, topic, sequence, payload = replay.recv_multipart()
        stored = msgspec.msgpack.decode(payload)[1][0]
        assert topic == EVENTS_TOPIC.encode()
        assert sequence == (0).to_bytes(8, "big")
        assert stored["type"] == "BlockStored"
        assert stored["token_ids"] == prompt[: 2 * worker.block_size]
    context.term()
