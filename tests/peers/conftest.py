"""Real peers for the marked tests: started once a session, ended with it, skipped when absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.lib.peers import EventPorts, PeerMissing, VllmPair, shared, start_vllm, vllm_home
from benchmarks.lib.servers import Server, available_cores, free_ports
from tools.make_random_checkpoint import Shape, write_checkpoint

BLOCK_SIZE = 32  # the smallest that vLLM has on CPU; its default of 128 hides short prefixes


@dataclass(frozen=True)
class VllmWorker:
    """A plain vLLM server, and where its KV events are published and replayed."""

    server: Server
    events: EventPorts
    block_size: int

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """The venv of the real vLLM; skips with the reason when there is none."""
    try:
        shared()
        return vllm_home()
    except PeerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def peer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama of four layers, which both vLLM and Pigou can load."""
    folder = tmp_path_factory.mktemp("peers") / "peer-tiny"
    write_checkpoint(folder, Shape(rope_theta=10_000.0))
    return folder


@pytest.fixture(scope="session")
def vllm_pair(
    vllm_venv: Path, peer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPair]:
    """A real prefill and decode pair on ports of its own."""
    pair = VllmPair.start(
        peer_model,
        tmp_path_factory.mktemp("vllm-pair"),
        extra=f"--block-size {BLOCK_SIZE} --enable-prompt-tokens-details",
    )
    yield pair
    pair.stop()


@pytest.fixture(scope="session")
def vllm_plain_two(
    vllm_venv: Path, peer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmWorker]]:
    """Two plain servers with KV events, each on a core of its own where there are two."""
    logs = tmp_path_factory.mktemp("vllm-plain")
    cores = available_cores()
    with ExitStack() as stack:
        workers = []
        for i in range(2):
            events = EventPorts(*free_ports(2))
            server = start_vllm(
                peer_model,
                log=logs / f"{i}.log",
                cores=[cores[i % len(cores)]],
                events=events,
                block_size=BLOCK_SIZE,
                extra=["--enable-prompt-tokens-details"],
            )
            workers.append(VllmWorker(stack.enter_context(server), events, BLOCK_SIZE))
        for worker in workers:
            worker.server.wait_healthy()
        yield workers
