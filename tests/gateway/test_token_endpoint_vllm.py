"""Before a real vLLM: token ids give the replies that text gives, and its load is pushed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.harness import WATCH, running
from tests.gateway.test_token_endpoint import COMPLETION, FEATURES, PROMPTS, ask
from tests.integrations.test_vllm_stat_logger import paths
from tests.peers.conftest import peer_model, vllm_venv

from benchmarks.lib.peers import start_vllm
from benchmarks.lib.servers import free_ports
from pigou.fleet.config import AttachedWorker

__all__ = ["peer_model", "vllm_venv"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm(
    vllm_venv: Path, peer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AttachedWorker]:
    """One server with the endpoint and the load plug-in."""
    load = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIGOU_LOAD", load)
        patch.setenv("PYTHONPATH", os.pathsep.join(paths()))
        server = start_vllm(
            peer_model, log=tmp_path_factory.mktemp("scale-out") / "log", block_size=32,
            extra=["--enable-scale-out", "--enable-prompt-tokens-details"],
        )  # fmt: skip
    with server:
        server.wait_healthy()
        yield AttachedWorker(id="a", url=server.url, load=load)


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_of_a_real_vllm_are_equal_with_token_ids_and_with_text(
    vllm: AttachedWorker, stream: bool
) -> None:
    more: dict[str, Any] = {"stream": stream, "max_tokens": 8, "temperature": 0}
    if stream:
        more["stream_options"] = {"include_usage": True}
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number, feature in enumerate(FEATURES):  # each with another prompt
        path, prompt = PROMPTS[(number + stream) % len(PROMPTS)]
        bodies.append((path, {**more, **prompt, **feature}))
    bodies.append((COMPLETION, {"prompt": "too hot", "temperature": 9}))
    replies: dict[bool, list[Any]] = {}
    for as_tokens in (False, True):
        async with running(0, 0, 0, attach=(vllm,), watch=WATCH, token_endpoint=as_tokens) as (
            _,
            client,
        ):
            salt = {"cache_salt": f"own-{as_tokens}-{stream}"}
            replies[as_tokens] = [await ask(client, path, body | salt) for path, body in bodies]
            async with client.session.get(client.url + "/metrics") as response:
                assert ("pigou_untokenized_tokens_total{" in await response.text()) is as_tokens
    for (path, body), text, tokens in zip(bodies, *replies.values(), strict=True):
        assert tokens == text, (path, body)


async def test_the_load_of_a_real_vllm_is_known_within_its_next_steps(vllm: AttachedWorker) -> None:
    async with running(0, 0, 0, attach=(vllm,), watch=WATCH) as (serving, client):
        state, body = serving.plane_driver.plane.state, {"prompt": [7] * 9, "ignore_eos": True}
        await client.post(COMPLETION, **body, max_tokens=2)
        asked = [
            asyncio.create_task(client.post(COMPLETION, **body, max_tokens=40)) for _ in range(5)
        ]
        seen = set()
        while not all(task.done() for task in asked):
            seen.add(state.figures("a")["running"])
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)
        assert 5 in seen
        await asyncio.sleep(0.1)
        assert state.figures("a")["running"] == 0, "also what an idle engine pushed last"
