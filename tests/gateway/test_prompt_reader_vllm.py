"""The gateway's tokens are those of a real vLLM: what it has cached is what overlaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.fleet.harness import WATCH, running
from tests.gateway.test_prompt_reader import CHAT, COMPLETION, TEXT, decided, overlapping
from tests.peers.conftest import BLOCK_SIZE, peer_model, vllm_plain_two, vllm_venv

from pigou.config import ControlConfig
from pigou.fleet.config import AttachedWorker
from pigou.gateway.prompt_reader import TokenizationMode

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

__all__ = ["peer_model", "vllm_plain_two", "vllm_venv"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": TEXT * 4}),
    (COMPLETION, {"prompt": "bare " + TEXT * 4, "add_special_tokens": False}),
    (COMPLETION, {"prompt": "cut " + TEXT * 4, "truncate_prompt_tokens": 101}),
    (COMPLETION, {"prompt": [10 + i % 200 for i in range(147)]}),
    (COMPLETION, {"prompt": "salty " + TEXT * 4, "cache_salt": "mine"}),
    (COMPLETION, {"prompt": "twice " + TEXT * 4, "n": 2, "temperature": 0.5}),
    (CHAT, {"messages": [{"role": "user", "content": TEXT * 4}]}),
    (CHAT, {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "parts " + TEXT * 3},
                                     {"type": "text", "text": "more"}]},
        {"role": "assistant", "content": "Indeed. " * 12},
        {"role": "user", "content": "And then?"},
    ]}),
    (CHAT, {"messages": [{"role": "user", "content": "open " + TEXT * 3},
                         {"role": "assistant", "content": "They pay " * 9}],
            "add_generation_prompt": False, "continue_final_message": True}),
]  # fmt: skip


@pytest.mark.parametrize("here", [True, False])
async def test_a_repeated_prompt_overlaps_in_all_its_full_blocks(
    vllm_plain_two: list[VllmWorker], here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not here:
        monkeypatch.setattr("pigou.gateway.prompt_reader._find", lambda engine: None)
    worker = AttachedWorker(id="attached-0", url=vllm_plain_two[0].url)
    watch = WATCH
    async with running(
        0, 0, 0, attach=(worker,), watch=watch, control=ControlConfig(policy="toll")
    ) as (serving, client):
        prompts = serving.plane_driver.prompts
        assert prompts is not None
        mode = TokenizationMode.GATEWAY if here else TokenizationMode.WORKER
        assert (prompts.mode(chat=False), prompts.mode(chat=True)) == (mode, mode)
        for path, made in BODIES:
            body = {**made, **({} if "cache_salt" in made else {"cache_salt": f"here-{here}"})}
            first, before = await decided(client, path, body)
            tokens = first["usage"]["prompt_tokens"]
            expected = min(tokens // BLOCK_SIZE * BLOCK_SIZE, tokens - 1)
            again, after = await overlapping(client, path, body, expected)
            assert before["cached_tokens"] == 0 or body["cache_salt"] == "mine"
            assert before["prompt_tokens"] == after["prompt_tokens"] == tokens, body
            assert after["cached_tokens"] == expected, (body, after)
            told = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert expected - BLOCK_SIZE <= told <= expected
