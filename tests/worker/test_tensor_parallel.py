"""Workers of several processes: the same replies, KV for any other size, and a clean end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from worker_process import Worker, start, stop

from pigou.config import ConfigError, EvictionConfig
from pigou.fleet.config import WorkersConfig
from pigou.fleet.sources.local import WorkerTemplate
from pigou.models import bundled_path
from pigou.request import Role
from pigou.wire.prefill_decode_legs import leg_one, leg_two
from pigou.worker.config import WorkerConfig

torch = pytest.importorskip("torch")

PROMPT = [5 + (i * i) % 490 for i in range(200)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True,
                        "return_token_ids": True}  # fmt: skip
OPTIONS = ("--executor", "torch", "--dtype", "fp32", "--blocks", "40", "--max-model-len", "512")
Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with each KV head twice: 4 heads of both kinds."""
    from safetensors.torch import load_file, save_file

    copy = tmp_path_factory.mktemp("model") / "four-heads"
    shutil.copytree(bundled_path(), copy)
    config = json.loads((copy / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    config["num_key_value_heads"] = 4
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if re.search(r"\.[kv]_proj\.", name):
            heads = tensor.unflatten(0, (-1, width)).repeat_interleave(2, 0)
            tensors[name] = heads.flatten(0, 1).contiguous()
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[Start]:
    """Starts a worker of a size and options once, for all tests."""
    started: dict[tuple[Any, ...], Worker] = {}

    def find(size: int, *options: str) -> Worker:
        if (size, options) not in started:
            started[size, options] = start(
                folder, *OPTIONS, "--tensor-parallel-size", str(size), *options
            )
        return started[size, options]

    yield find
    for worker in started.values():
        stop(worker)


def prefill(worker: Worker, body: dict[str, Any]) -> dict[str, Any]:
    reply = worker.post("/v1/completions", leg_one(body, chat=False))
    assert reply.status == 200, reply.body
    ticket: dict[str, Any] = reply.json["kv_transfer_params"]
    return ticket


def salted(name: str, **changes: Any) -> dict[str, Any]:
    return BODY | {"cache_salt": f"{name}-{time.monotonic_ns()}"} | changes


@pytest.fixture(scope="module")
def alone(workers: Start) -> list[int]:
    tokens: list[int] = workers(1).complete(**salted("alone"))["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize(("source", "target", "backend"), [
    (1, 2, "shm"), (2, 1, "tcp"),
    *(pytest.param(*sizes, marks=pytest.mark.slow)
      for sizes in ((1, 2, "tcp"), (2, 1, "shm"), (2, 4, "shm"), (2, 4, "tcp"))),
])  # fmt: skip
def test_kv_moves_between_workers_of_any_two_sizes(
    source: int, target: int, backend: str, workers: Start, alone: list[int]
) -> None:
    chosen = () if backend == "shm" else ("--kv-transfer", "tcp")
    first, second = workers(source), workers(target, *chosen)
    body = salted("legs")
    ticket = prefill(first, body)
    assert ticket["remote_tensor_parallel_size"] == source
    assert first.info["kv_layout"].split(":")[1] == second.info["kv_layout"].split(":")[1]
    before = second.metric("pigou_kv_blocks_received_total")
    reply = second.post("/v1/completions", leg_two(body, ticket)).json
    assert reply["choices"][0]["token_ids"] == alone
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second.metric("pigou_kv_blocks_received_total") - before == 12
    first.settle()
    second.settle()


def test_sampling_logprobs_and_grammars_are_the_same_over_ranks(workers: Start) -> None:
    for fields in (
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "top_p": 0.9},
        {"logprobs": 3},
        {"structured_outputs": {"regex": "[0-9]{3} [a-z]{4}"}},
    ):
        one, two = (
            workers(size).complete(**salted("same", **fields))["choices"][0] for size in (1, 2)
        )
        assert one["token_ids"] == two["token_ids"]
        if one["logprobs"]:
            assert two["logprobs"]["token_logprobs"] == pytest.approx(
                one["logprobs"]["token_logprobs"], abs=1e-4
            )


@pytest.mark.slow
def test_quantised_kv_moves_to_more_ranks(workers: Start) -> None:
    options = ("--kv-cache-dtype", "int8_per_token_head")
    first, second = workers(1, *options), workers(2, *options)
    body = salted("int8")
    alone = first.complete(**salted("alone"))["choices"][0]["token_ids"]
    reply = second.post("/v1/completions", leg_two(body, prefill(first, body))).json
    assert reply["choices"][0]["token_ids"] == alone
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    other = workers(1)
    reply = other.post("/v1/completions", leg_two(body, prefill(first, body))).json
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # another format


def test_a_tier_keeps_its_blocks_when_the_size_changes(
    folder: Path, alone: list[int], tmp_path: Path
) -> None:
    tier = ("--tier", f"disk=64MiB@{tmp_path}/tier", "--no-tier-recall")
    cached = []
    for size in (2, 1):
        worker = start(folder, *OPTIONS, "--tensor-parallel-size", str(size), *tier)
        for number in range(3):  # of 40 device blocks, each takes 14
            first = worker.complete(**BODY, cache_salt=f"tier-{number}")
            assert first["choices"][0]["token_ids"] == alone
            cached.append(first["usage"]["prompt_tokens_details"]["cached_tokens"])
        time.sleep(1.0)
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait(60)
        stop(worker)
    assert cached[:3] == [0, 0, 0]
    assert max(cached[3:]) > 0


def ranks_of(worker: Worker) -> list[int]:
    children = Path(f"/proc/{worker.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"pigou.runtime.ranks" in command(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while command(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not command(pid)


def test_a_killed_source_costs_recomputing_alone(
    folder: Path, workers: Start, alone: list[int]
) -> None:
    source = start(folder, *OPTIONS, "--tensor-parallel-size", "2")
    body = salted("killed")
    ticket = prefill(source, body)
    ranks = ranks_of(source)
    source.process.kill()
    assert len(ranks) == 1
    assert gone(ranks[0])
    reply = workers(2).post("/v1/completions", leg_two(body, ticket)).json
    stop(source)
    assert reply["choices"][0]["token_ids"] == alone


@pytest.mark.parametrize("busy", [
    pytest.param(False, marks=pytest.mark.slow, id="idle"), pytest.param(True, id="streaming")
])  # fmt: skip
def test_a_worker_ends_with_its_rank_and_says_why(busy: bool, folder: Path, tmp_path: Path) -> None:
    worker = start(folder, *OPTIONS, "--tensor-parallel-size", "2", log=tmp_path / "log")
    connection = worker.connect()
    if busy:
        body = json.dumps(BODY | {"max_tokens": 300, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
    [rank] = ranks_of(worker)
    os.kill(rank, signal.SIGKILL)
    if busy:
        assert b'"error"' in reply.read()
    connection.close()
    assert worker.process.wait(30) == 1
    assert "rank 1 (process" in (tmp_path / "log").read_text()
    stop(worker)


def test_what_several_processes_cannot_do_is_refused_by_name() -> None:
    for options, message in (
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": 2, "executor": "sleep"}, "timing_tp"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "give kv_transfer none"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora is True"),
        ({"tensor_parallel_size": 2, "eviction": EvictionConfig(policy="pigou")}, "'pigou'"),
    ):
        with pytest.raises(ConfigError, match=message):
            WorkerConfig(**options)


def test_prefill_workers_of_a_fleet_may_have_a_size_of_their_own() -> None:
    config = WorkersConfig(prefill=1, decode=1, prefill_tensor_parallel_size=1)
    template = WorkerTemplate.of(config, ["--tensor-parallel-size", "2"])
    sizes = {
        role: [
            value
            for name, value in pairwise(template.worker(role, 0, "cpu").arguments)
            if name == "--tensor-parallel-size"
        ][-1]
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert sizes == {Role.PREFILL: "1", Role.DECODE: "2"}
