"""`pigou epp` and a real Envoy before a real vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.envoys import Stack, ask, envoy, until

from benchmarks.lib.peers import EventPorts, start_vllm
from benchmarks.lib.servers import available_cores, free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
BLOCK = 32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    pytest.importorskip("grpc", reason="the extra epp is not installed")
    envoy()
    made = Stack(tmp_path_factory.mktemp("epp-vllm"))
    yield made
    made.end()


def test_a_real_vllm_s_tokens_and_cache_hits_are_seen_through_envoy(
    run: Stack, vllm_venv: Path, peer_model: Path, tmp_path: Path
) -> None:
    events = EventPorts(*free_ports(2))
    server = start_vllm(
        peer_model, log=tmp_path / "log", cores=available_cores()[:1], events=events,
        block_size=BLOCK,
    )  # fmt: skip
    with server:
        server.wait_healthy()
        pool = tmp_path / "pool.yaml"
        pool.write_text(
            f"endpoints: [{{url: '{server.url}', events: '{events.endpoint}', "
            f"replay: '{events.replay_endpoint}'}}]\n"
        )
        picker = run.picker("--pool", str(pool), "--tokenizer", str(peer_model))
        until(lambda: picker.ups() == {server.url})
        proxy = run.proxy([picker], [server])
        body = {"prompt": [6 + i * 17 % 1900 for i in range(200)], "max_tokens": 12,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        streamed = ask(proxy.url, body | {"stream": True})
        assert (streamed.status, len(streamed.tokens)) == (200, 12)
        until(lambda: picker.rows()[server.url]["cached_blocks"] >= 200 // BLOCK, 20)
        again = ask(proxy.url, body, {"x-pigou-prices": "1"})
        assert again.tokens == streamed.tokens == ask(server.url, body).tokens
        assert f"{200 // BLOCK * BLOCK} of 200 tokens cached" in again.headers["x-pigou-prices"]
