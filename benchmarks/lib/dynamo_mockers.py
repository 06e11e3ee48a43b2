"""Start a real NVIDIA Dynamo's mock workers, and as many frontends before them as wanted.

| variable                | what it names                                               |
|-------------------------|-------------------------------------------------------------|
| `PIGOU_PEER_DYNAMO`     | a venv made by `$PIGOU_SHARED/tools/peer-dynamo.sh`          |
| `PIGOU_PEER_DYNAMO_142` | another, of Dynamo 1.4.2, which honours per-request overrides |
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.lib.peers import PeerMissing, shared
from benchmarks.lib.servers import LOOPBACK, Server, ServerFailed, free_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "src" / "pigou" / "models" / "tiny"
NAME = "tiny"
BLOCK_SIZE = 16


def dynamo_home(variable: str = "PIGOU_PEER_DYNAMO") -> Path:
    """The venv with Dynamo; raises PeerMissing with the way to make it."""
    named = os.environ.get(variable)
    version = " 1.4.2" if variable.endswith("142") else ""
    remedy = f"run $PIGOU_SHARED/tools/peer-dynamo.sh DIR{version}, then set {variable}=DIR"
    if not named:
        raise PeerMissing(f"{variable} is not set; {remedy}")
    if not (Path(named) / ".peer-dynamo").exists():
        raise PeerMissing(f"{variable}={named} holds no finished Dynamo; {remedy}")
    return Path(named).resolve()


@dataclass
class Mockers:
    """Mock workers and a frontend of a real Dynamo on loopback; `frontend` starts more.

    `folder` is that of file discovery (`DYN_FILE_KV`).
    """

    home: Path
    run_dir: Path
    url: str
    workers: int
    block_size: int = BLOCK_SIZE
    more: list[Server] = field(default_factory=list)

    @classmethod
    def start(
        cls, home: Path, run_dir: Path, workers: int, *, speedup: float = 10.0,
        frontend: Sequence[str] = ("--router-replica-sync",), mocker: Sequence[str] = (),
        block_size: int = BLOCK_SIZE,
    ) -> Self:  # fmt: skip
        """Run `run-dynamo-mocker.sh` on a free port; returns when it answers.

        Args:
            home: venv of Dynamo.
            frontend, mocker: further arguments of each.
            block_size: tokens in a KV block.

        Raises:
            ServerFailed: with the script's words.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        port = free_ports(1)[0]
        found = cls(home, run_dir, f"http://{LOOPBACK}:{port}", workers, block_size)
        settings = {
            "PORT": str(port), "MODEL_NAME": NAME, "BLOCK": str(block_size),
            "SPEEDUP": f"{speedup:g}", "FRONTEND_ARGS": " ".join(frontend),
            "MOCKER_ARGS": " ".join(mocker),
        }  # fmt: skip
        found._script([str(MODEL), str(workers)], settings)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """The discovery folder."""
        return self.run_dir / "kv"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to join this Dynamo."""
        return {
            "DYN_FILE_KV": str(self.folder), "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_EVENT_PLANE_HOST": LOOPBACK, "DYN_EVENT_PLANE": "zmq",
            "DYN_REQUEST_PLANE": "tcp", "HF_HUB_OFFLINE": "1", "DYN_LOG": "error",
            "PYTHONPATH": str(ROOT / "src"),
        }  # fmt: skip

    def frontend(self, *arguments: str, wait: bool = True) -> Server:
        """Start another frontend over the same workers; it ends with them."""
        port = free_ports(1)[0]
        argv = [str(self.home / "bin" / "python"), "-m", "dynamo.frontend"]
        argv += ["--http-host", LOOPBACK, "--http-port", str(port), "--router-mode", "kv"]
        argv += ["--kv-cache-block-size", str(self.block_size), "--discovery-backend", "file"]
        argv += ["--request-plane", "tcp", "--event-plane", "zmq", "--router-replica-sync"]
        server = Server(
            [*argv, *arguments],
            url=f"http://{LOOPBACK}:{port}",
            log=self.run_dir / f"frontend-{port}.log",
            env=self.environment,
        )
        self.more.append(server)
        if wait:
            server.wait_healthy("/v1/models", 60.0)
            self._serves(server.url)
        return server

    def python(
        self, *arguments: str, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Dynamo's Python with Pigou on its path, joined to this Dynamo."""
        return subprocess.run(
            [str(self.home / "bin" / "python"), *arguments],
            env={**os.environ, **self.environment, **(env or {})},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def instances(self) -> list[int]:
        """Ids of the workers, as a frontend lists them."""
        with urllib.request.urlopen(self.url + "/health", timeout=10) as reply:
            found = json.load(reply)["instances"]
        return sorted(
            each["instance_id"]
            for each in found
            if (each["component"], each["endpoint"]) == ("backend", "generate")
        )

    def complete(self, url: str = "", **fields: Any) -> dict[str, Any]:
        """Post a completion; return the reply."""
        body = {"model": NAME, "max_tokens": 2, **fields}
        request = urllib.request.Request(
            (url or self.url) + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
            return found

    def stop(self) -> None:
        """End every process that was started here."""
        for server in self.more:
            server.stop()
        self.more.clear()
        self._script(["--stop"], {})

    def _serves(self, url: str, timeout_s: float = 30.0) -> None:
        # A frontend lists the model some time before it has found the workers: 404 until then.
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.complete(url, prompt="hello")
            except urllib.error.HTTPError as error:
                if error.code not in (404, 503) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def _script(self, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
        log = self.run_dir / "script.log"
        script = shared() / "tools" / "run-dynamo-mocker.sh"
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                ["bash", str(script), str(self.home), *arguments],
                stdout=output, stderr=subprocess.STDOUT, timeout=200, check=False,
                env={**os.environ, **self.environment, **settings, "RUN_DIR": str(self.run_dir)},
            )  # fmt: skip
        if done.returncode != 0:
            raise ServerFailed(f"run-dynamo-mocker.sh: {log.read_text()}; logs in {self.run_dir}")
