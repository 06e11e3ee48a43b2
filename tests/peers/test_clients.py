"""Clients that others wrote, unmodified, against the gateway; skipped where they are not there."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from tests.fleet.harness import running
from tests.lib.reasoning_model import make

MODEL = "pigou-tiny"
#: The bundled model computes: nothing sleeps in its place.
COMPUTES = ("--threads", "1", "--dtype", "fp32", "--pooling", "mean")
PROGRAMS = Path(__file__).parent / "clients"


#: Package that each program is of.
PYTHON = {
    "openai_chat.py": "openai", "openai_responses.py": "openai",
    "langchain_chat.py": "langchain_openai", "langchain_defaults.py": "langchain_anthropic",
    "litellm_chat.py": "litellm", "instructor_chat.py": "instructor",
    "llama_index_chat.py": "llama_index/llms/openai_like", "pydantic_ai_chat.py": "pydantic_ai",
    "openai_agents_chat.py": "agents", "smolagents_chat.py": "smolagents",
    "anthropic_messages.py": "anthropic",
}  # fmt: skip
NODE = {
    "openai_chat.mjs": "openai", "langchain_chat.mjs": "@langchain/openai",
    "vercel_ai.mjs": "@ai-sdk/openai", "vercel_compatible.mjs": "@ai-sdk/openai-compatible",
}  # fmt: skip
#: Programs that are also run with a model that reasons.
REASONING = ("openai_responses.py", "langchain_defaults.py", "openai_agents_chat.py",
             "anthropic_messages.py", "vercel_ai.mjs")  # fmt: skip


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


async def check(tmp_path: Path, reasons: bool, *program: str) -> None:
    """Fail with what a client says that does not get what it should."""
    # A worker's name of its model, and what tells the program that it reasons.
    model, rest = ("bundled", []) if not reasons else (str(make(tmp_path / MODEL)), ["reasons"])
    arguments = ("--model", model, "--served-model-name", MODEL, *COMPUTES)
    async with running(0, 0, 1, arguments=arguments) as (_, client):
        assert not await run(*program, client.url, MODEL, *rest)


def cases(programs: dict[str, str]) -> list[tuple[str, bool]]:
    """Programs, and whether the model reasons."""
    kinds = [(program, reasons) for program in programs for reasons in (False, True)]
    return [(program, reasons) for program, reasons in kinds if program in REASONING or not reasons]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("program", "reasons"), cases(PYTHON))
async def test_python_clients_get_what_they_ask_for(
    program: str, reasons: bool, tmp_path: Path
) -> None:
    if not has_python(PYTHON[program]):
        pytest.skip(f"PIGOU_PEER_CLIENTS names no venv with {PYTHON[program]}")
    python = f"{os.environ['PIGOU_PEER_CLIENTS']}/bin/python"
    await check(tmp_path, reasons, python, str(PROGRAMS / program))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("program", "reasons"), cases(NODE))
async def test_node_clients_get_what_they_ask_for(
    program: str, reasons: bool, tmp_path: Path
) -> None:
    home, node = os.environ.get("PIGOU_PEER_NODE", ""), shutil.which("node")
    modules = Path(home) / "node_modules"
    if not home or node is None or not (modules / NODE[program]).is_dir():
        pytest.skip(f"PIGOU_PEER_NODE names no folder with {NODE[program]}, or no node")
    # Node looks for packages beside the program.
    (tmp_path / "node_modules").symlink_to(modules.resolve())
    copy = shutil.copy(PROGRAMS / program, tmp_path)
    await check(tmp_path, reasons, node, "--preserve-symlinks-main", str(copy))
