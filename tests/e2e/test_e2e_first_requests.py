"""After its start no process of a fleet opens a file, imports a module or compiles a kernel.

When descriptors are short, a request that needs one fails. So whatever a request needs is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleet import ROOT, Fleet, worker

from pigou.models import bundled_path

HOOK = Path(__file__).parent / "audited"
#: What may come late, and why it breaks no request that can do without.
LATE = re.compile(
    r"open '/dev/shm/pigou-kv-"  # another worker's cache, once for each: else blocks are computed
    r"|open '/proc/vmstat'"  # the kernel's kills, with each heartbeat: none is known without
    r"|open \d+$"  # a pipe that is open already, to the process below
    r"|open '/dev/null'|subprocess.Popen "  # where grammars are tried: it may be killed, too
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello <|im_end|> there"}]}
TEXT: dict[str, Any] = {"prompt": "Hello there"}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "presence_penalty": 0.2,
           "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "seed": 4,
           "stop": ["zz"], "min_tokens": 1}  # fmt: skip
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", TEXT),
    "stream": ("/v1/completions", TEXT | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "required tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
    "schema": ("/v1/completions", TEXT | {"structured_outputs": {"json": {"type": "object"}}}),
    "regex": ("/v1/completions", TEXT | {"structured_outputs": {"regex": "[a-z]+"}}),
    "choice": ("/v1/completions", TEXT | {"structured_outputs": {"choice": ["a", "b"]}}),
    "token ids": ("/v1/completions", {"prompt": [5, 6, 7, 8] * 40}),
    "prompts": ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}),
    "log-probabilities": ("/v1/completions", TEXT | {"logprobs": 3, "echo": True}),
    "chat log-probabilities": (
        "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2},
    ),
    "sampling": ("/v1/completions", TEXT | SAMPLED),
    "a long text": ("/v1/completions", {"prompt": "Hello there " * 300}),
    "a large body": ("/v1/completions", {"prompt": [5] * 40_000}),
    "a field that is wrong": ("/v1/completions", {"prompt": 5}),
    "tokenize": ("/tokenize", TEXT),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "another route": ("/v1/embeddings", {"input": "a"}),
}  # fmt: skip
PAGES = ("/", "/static/page.js", "/metrics", "/workers", "/decisions", "/history", "/usage",
         "/health", "/v1/models", "/version", "/nowhere")  # fmt: skip


class Noted:
    """What the processes of a fleet noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[str]:
        """Return what they noted since the last call, but for what may come late."""
        lines = []
        for file in sorted(self._folder.iterdir()):
            text = file.read_text(errors="replace")
            command = text.partition("\n")[0]
            new, self._read[file] = text[self._read.get(file, 0) :], len(text)
            if "grammar_trial" not in command:
                lines += [line for line in new.splitlines() if not LATE.match(line)]
        return lines


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Noted]]:
    folder, log = tmp_path_factory.mktemp("noted"), tmp_path_factory.mktemp("log") / "log"
    path = os.pathsep.join([str(HOOK), str(ROOT / "src"), str(ROOT)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("PIGOU_AUDIT", str(folder))
        options = ("--threads", "1", "--blocks", "512")
        workers = [worker(f"{role}-0", bundled_path(), *options)
                   for role in ("prefill", "decode")]  # fmt: skip
        started = Fleet.start(log, workers)
    noted = Noted(folder)
    assert len(list(folder.iterdir())) >= 3
    assert noted.new(), "nothing was noted"
    yield started, noted
    started.stop()


@pytest.mark.slow
def test_no_first_request_of_any_kind_opens_or_imports_anything(
    fleet: tuple[Fleet, Noted],
) -> None:
    served, noted = fleet
    late: dict[str, list[str]] = {}
    for name, (path, body) in POSTS.items():
        fields = body if path.startswith("/v1/em") or "token" in path else {"max_tokens": 6, **body}
        assert served.post(path, fields).status in (200, 400, 404), name
        late[name] = noted.new()
    for path in PAGES:
        assert served.get(path).status in (200, 404), path
        late[path] = noted.new()
    assert {name: lines for name, lines in late.items() if lines} == {}
