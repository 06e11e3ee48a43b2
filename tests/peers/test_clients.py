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


def python(package: str) -> list[str]:
    """Return what runs a program with a package of the venv that `PIGOU_PEER_CLIENTS` names."""
    home = os.environ.get("PIGOU_PEER_CLIENTS", "")
    program = Path(home) / "bin" / "python"
    if not home or not list(Path(home).glob(f"lib/*/site-packages/{package}/__init__.py")):
        pytest.skip(f"PIGOU_PEER_CLIENTS names no venv with {package}")
    return [str(program)]


def node(package: str) -> tuple[list[str], Path]:
    """Return what runs a program with a package of the folder that `PIGOU_PEER_NODE` names."""
    home, program = os.environ.get("PIGOU_PEER_NODE", ""), shutil.which("node")
    if not home or program is None or not (Path(home) / "node_modules" / package).is_dir():
        pytest.skip(f"PIGOU_PEER_NODE names no folder with node_modules/{package}, or no node")
    return [program], Path(home)


async def run(command: list[str], *arguments: str) -> None:
    """Run a program, which fails where the client does not get what it should."""
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("openai_chat.py", "openai"),
        ("langchain_chat.py", "langchain_openai"),
        ("litellm_chat.py", "litellm"),
    ],
)
async def test_python_clients_get_what_they_ask_for(program: str, package: str) -> None:
    command = python(package)
    async with running(0, 0, 1, arguments=COMPUTES) as (_, client):
        await run([*command, str(PROGRAMS / program)], client.url, MODEL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("program", "package"), [("openai_chat.mjs", "openai"),
                                                  ("vercel_ai.mjs", "ai")])  # fmt: skip
async def test_node_clients_get_what_they_ask_for(program: str, package: str) -> None:
    command, home = node(package)
    # Node looks for packages beside the program.
    copy = home / f"pigou-{os.getpid()}-{program}"
    shutil.copy(PROGRAMS / program, copy)
    try:
        async with running(0, 0, 1, arguments=COMPUTES) as (_, client):
            await run([*command, str(copy)], client.url, MODEL)
    finally:
        copy.unlink()


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
    command = [*python("anthropic"), str(PROGRAMS / "anthropic_messages.py")]
    async with gateways() as (having, lacking):
        await run(command, having, "stub", "passed")
        await run(command, lacking, "stub", "refused")
