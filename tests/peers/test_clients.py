"""Clients that others wrote, unmodified, against the gateway; skipped where they are not there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.fleet.harness import running
from tests.gateway.stub import Stub, serving

MODEL = "pigou-tiny"
#: The bundled model computes: nothing sleeps in its place.
COMPUTES = ("--threads", "1", "--dtype", "fp32")
PROGRAMS = Path(__file__).parent / "clients"


#: Programs by the package that each is of.
PYTHON = {
    "openai": "openai_chat.py", "langchain_openai": "langchain_chat.py",
    "litellm": "litellm_chat.py", "instructor": "instructor_chat.py",
    "llama_index/llms/openai_like": "llama_index_chat.py", "pydantic_ai": "pydantic_ai_chat.py",
    "agents": "openai_agents_chat.py", "smolagents": "smolagents_chat.py",
}  # fmt: skip
NODE = {
    "openai": "openai_chat.mjs", "@langchain/openai": "langchain_chat.mjs",
    "@ai-sdk/openai": "vercel_ai.mjs", "@ai-sdk/openai-compatible": "vercel_compatible.mjs",
}  # fmt: skip


def has_python(package: str) -> bool:
    """Whether the venv that `PIGOU_PEER_CLIENTS` names has a package."""
    home = os.environ.get("PIGOU_PEER_CLIENTS", "")
    return bool(home) and any(Path(home).glob(f"lib/*/site-packages/{package}/__init__.py"))


async def run(*command: str) -> str:
    """Run a program; return why the client did not get what it should, empty where it did."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
    return output.decode()[-4000:] if process.returncode else ""


async def check(*program: str) -> None:
    """Fail with what a client says that does not get what it should of the bundled model."""
    async with running(0, 0, 1, arguments=COMPUTES) as (_, client):
        assert not await run(*program, client.url, MODEL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("package", PYTHON)
async def test_python_clients_get_what_they_ask_for(package: str) -> None:
    if not has_python(package):
        pytest.skip(f"PIGOU_PEER_CLIENTS names no venv with {package}")
    await check(f"{os.environ['PIGOU_PEER_CLIENTS']}/bin/python", str(PROGRAMS / PYTHON[package]))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("package", NODE)
async def test_node_clients_get_what_they_ask_for(package: str, tmp_path: Path) -> None:
    home, node = os.environ.get("PIGOU_PEER_NODE", ""), shutil.which("node")
    modules = Path(home) / "node_modules"
    if not home or node is None or not (modules / package).is_dir():
        pytest.skip(f"PIGOU_PEER_NODE names no folder with node_modules/{package}, or no node")
    # Node looks for packages beside the program.
    (tmp_path / "node_modules").symlink_to(modules.resolve())
    copy = shutil.copy(PROGRAMS / NODE[package], tmp_path)
    await check(node, "--preserve-symlinks-main", str(copy))


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer as a server of Anthropic's Messages API does."""
    asked = await request.json()
    usage = {"input_tokens": 5, "output_tokens": 3}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"],
               "content": [{"type": "text", "text": "by the river"}], "stop_reason": "end_turn",
               "stop_sequence": None, "usage": usage}  # fmt: skip
    if not asked.get("stream"):
        return web.json_response(message)
    out = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await out.prepare(request)
    await out.write(event("message_start", message={**message, "content": []}))
    block = {"type": "text", "text": ""}
    await out.write(event("content_block_start", index=0, content_block=block))
    for word in ("by ", "the ", "river"):
        delta = {"type": "text_delta", "text": word}
        await out.write(event("content_block_delta", index=0, delta=delta))
    await out.write(event("content_block_stop", index=0))
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    await out.write(event("message_delta", delta=end, usage={"output_tokens": 3}))
    await out.write(event("message_stop"))
    return out


@asynccontextmanager
async def gateways() -> AsyncIterator[tuple[str, str]]:
    """Gateways before a server that has `/v1/messages`, and before one that has not."""
    having = Stub("a", stock=True, routes={"/v1/messages": messages})
    async with (
        serving(having, strict=False) as first,
        serving(Stub("b", stock=True), strict=False) as second,
    ):
        yield first.url, second.url


async def test_anthropic_reaches_a_server_that_has_messages() -> None:
    if not has_python("anthropic"):
        pytest.skip("PIGOU_PEER_CLIENTS names no venv with anthropic")
    python = f"{os.environ['PIGOU_PEER_CLIENTS']}/bin/python"
    command = [python, str(PROGRAMS / "anthropic_messages.py")]
    async with gateways() as (having, lacking):
        assert not await run(*command, having, "stub", "passed")
        assert not await run(*command, lacking, "stub", "refused")
