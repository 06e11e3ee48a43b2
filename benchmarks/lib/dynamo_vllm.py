"""NVIDIA Dynamo's own vLLM workers, on the vLLM for CPU of $PIGOU_PEER_VLLM.

Dynamo's worker asks for CUDA builds of vLLM that PyPI's plain index lacks. It runs on vLLM for CPU
with three helps: Dynamo's packages on the path of vLLM's interpreter, a stand-in for torchvision
(image processors import its names; text models call none), and a name that vLLM 0.32 dropped.
"""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.error
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.dynamo_mockers import dynamo_home
from benchmarks.lib.peers import EventPorts, vllm_home
from benchmarks.lib.servers import LOOPBACK, Server, ServerFailed, free_ports, get_json, post_json

_PACKAGES = ("dynamo", "ai_dynamo*", "redis*", "zstandard*")
_VISION = ("io", "transforms", "transforms/functional", "transforms/v2", "transforms/v2/functional")
_ANY_NAME = """
__version__ = "0.0.0"


class _Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})
"""
_LAUNCH = """
import vllm.v1.engine.utils as utils

if not hasattr(utils, "get_engine_zmq_addresses"):  # embedding workers alone call it
    utils.get_engine_zmq_addresses = None
if __name__ == "__main__":
    from dynamo.vllm.main import main

    main()
"""


def _small_port() -> int:
    """Return a free port below 32,768: Dynamo reads its system port as a signed 16-bit number."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)):
                return port


class DynamoVllm:
    """Dynamo's vLLM workers over file discovery; `frontend` starts a fresh router before them."""

    def __init__(self, model: Path, folder: Path, block_size: int) -> None:
        self.model, self.folder, self.block_size = model, folder, block_size
        self.home = dynamo_home()
        self.workers: list[Server] = []
        self._environment = {
            "DYN_FILE_KV": str(folder / "kv"), "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_EVENT_PLANE": "zmq", "DYN_EVENT_PLANE_HOST": LOOPBACK, "DYN_REQUEST_PLANE": "tcp",
            "DYN_LOG": "error", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self._planes = ["--discovery-backend", "file", "--request-plane", "tcp"]
        self._planes += ["--event-plane", "zmq"]
        self._install()

    def _install(self) -> None:
        library = self.folder / "library"
        (self.folder / "kv").mkdir(parents=True)
        for name in ("", *_VISION):
            package = library / "torchvision" / name
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(_ANY_NAME)
        (site,) = self.home.glob("lib/python3*/site-packages")
        for pattern in _PACKAGES:
            for path in site.glob(pattern):
                (library / path.name).symlink_to(path)
        (self.folder / "worker.py").write_text(_LAUNCH)

    def start(
        self, stack: ExitStack, count: int, engine: Sequence[str], env: dict[str, str]
    ) -> None:
        """Start workers with the engine arguments, all of whose lives the stack ends."""
        for _ in range(count):
            port = _small_port()
            events = EventPorts(*free_ports(2))
            argv = [str(vllm_home() / "bin" / "python"), str(self.folder / "worker.py")]
            argv += ["--model", str(self.model), "--served-model-name", self.model.name]
            argv += ["--kv-events-config", events.config(), *self._planes, *engine]
            server = Server(
                argv, url=f"http://{LOOPBACK}:{port}", log=self.folder / f"worker-{port}.log",
                env={**env, **self._environment, "DYN_SYSTEM_PORT": str(port),
                     "PYTHONPATH": str(self.folder / "library")},
            )  # fmt: skip
            self.workers.append(stack.enter_context(server))

    def wait(self, timeout_s: float = 200.0) -> None:
        """Wait until all workers serve."""
        deadline = time.monotonic() + timeout_s
        for server in self.workers:
            server.wait_healthy("/live")
            while get_json(server.url + "/health").get("status") != "ready":
                if time.monotonic() > deadline:
                    raise ServerFailed(f"{server.url} not ready\n{server.log_tail()}")
                time.sleep(0.3)

    def frontend(self, log: Path) -> Server:
        """Start Dynamo's frontend with its KV router; it answers when it is returned."""
        (port,) = free_ports(1)
        argv = [str(self.home / "bin" / "python"), "-m", "dynamo.frontend", "--http-host", LOOPBACK]
        argv += ["--http-port", str(port), "--router-mode", "kv", *self._planes]
        argv += ["--kv-cache-block-size", str(self.block_size)]
        server = Server(
            argv, url=f"http://{LOOPBACK}:{port}", log=log, env=self._environment,
        )  # fmt: skip
        try:
            server.wait_healthy("/v1/models", 60.0)
            self._wait_serving(server)
        except BaseException:
            server.stop()
            raise
        return server

    def _wait_serving(self, server: Server, timeout_s: float = 60.0) -> None:
        # A frontend lists model and workers before it can reach them: 404 or 503 till then.
        deadline = time.monotonic() + timeout_s
        body = {"model": self.model.name, "prompt": "one two", "max_tokens": 1}
        while time.monotonic() < deadline:
            found = json.dumps(get_json(server.url + "/health"))
            if found.count('"generate"') >= len(self.workers):
                try:
                    post_json(server.url + "/v1/completions", body)
                    return
                except urllib.error.HTTPError as error:
                    if error.code not in (404, 503):
                        raise
            time.sleep(0.2)
        raise ServerFailed(f"{server.url} did not find the workers\n{server.log_tail()}")
