"""A worker with adapters: names, versions, slots, prefill/decode legs, and vLLM's answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.lib.lora_adapters import write_adapter
from worker_process import Worker, start, stop

from pigou.models import bundled_path

PROMPT = "It is a truth universally acknowledged, that a single man in possession of " * 4
KIND = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, bundled_path(), KIND, seed)
            for seed, name in enumerate("abcd")}  # fmt: skip


@pytest.fixture(scope="module")
def begin(folders: dict[str, Path]) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker of the bundled model with adapters a to d."""
    started: list[Worker] = []

    def make(*options: str, names: str = "abcd") -> Worker:
        modules = [part for name in names for part in ("--lora-modules", f"{name}={folders[name]}")]
        started.append(start("bundled", "--executor", "torch", "--dtype", "fp32", *LORA, *modules,
                             "--memory", "64MiB", "--kv-lease", "3", *options))  # fmt: skip
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        yield make
    for worker in started:
        stop(worker)


@pytest.fixture(scope="module")
def served(begin: Callable[..., Worker]) -> Worker:
    return begin()


def text(worker: Worker, model: str | None, **fields: Any) -> str:
    given = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    reply = worker.complete(given.pop("prompt"), **given, **({"model": model} if model else {}))
    assert reply["model"] == (model or "tiny")
    return str(reply["choices"][0]["text"])


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path], begin: Callable[..., Worker]) -> dict[str, str]:
    """What the weights say, and what they say with each adapter merged in."""
    texts = {}
    for name in "ab":
        worker = start(folders[name] / "merged", "--executor", "torch", "--dtype", "fp32",
                       "--memory", "32MiB", "--served-model-name", "tiny")  # fmt: skip
        texts[name] = text(worker, None)
        stop(worker)
    return texts


def test_four_adapters_over_two_slots_answer_as_merged_weights(
    served: Worker, wanted: dict[str, str]
) -> None:
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda i: text(served, "abcd"[i % 4]), range(24)))
    assert texts == texts[:4] * 6
    assert texts[:2] == [wanted["a"], wanted["b"]]
    assert len(set(texts)) == 4
    assert text(served, None) not in texts
    served.settle()


def test_models_and_metrics_show_the_adapters(served: Worker) -> None:
    for adapter in ("b", "a"):  # more may be in slots by tests before
        text(served, adapter)
    cards = {card["id"]: card for card in served.get("/v1/models").json["data"]}
    assert cards.keys() == {"tiny", "a", "b", "c", "d"}
    assert cards["a"]["parent"] == "tiny"
    assert cards["tiny"]["parent"] is None
    assert served.get("/v1/models/a").json == cards["a"]
    assert served.get("/v1/models/none").status == 404
    assert served.metric("vllm:lora_adapter_loaded", adapter_name="a", level="gpu") == 1
    assert served.metric("vllm:lora_adapter_loaded", level="gpu") == 2
    assert served.metric("vllm:lora_requests_info", max_lora="2") > 0
    assert served.metric("pigou_lora_loads_total") > 0


def test_the_cache_is_hit_by_the_same_version_alone(
    served: Worker, folders: dict[str, Path], tmp_path: Path
) -> None:
    served.post("/reset_prefix_cache", {})

    def cached(model: str | None) -> int:
        before = served.metric("vllm:prefix_cache_hits_total")
        text(served, model)
        return int(served.metric("vllm:prefix_cache_hits_total") - before)

    assert [cached(model) for model in (None, "a", "b")] == [0, 0, 0]
    assert min(cached(model) for model in (None, "a", "b")) > 0
    old = text(served, "a")
    folder = write_adapter(tmp_path / "new", bundled_path(), KIND, seed=9)
    body = {"lora_name": "a", "lora_path": str(folder)}
    again = served.post("/v1/load_lora_adapter", body)
    assert (again.status, "load_inplace" in again.body.decode()) == (400, True)
    assert served.post("/v1/load_lora_adapter", body | {"load_inplace": True}).status == 200
    assert cached("a") == 0
    assert text(served, "a") != old
    body = {"lora_name": "a", "lora_path": str(folders["a"]), "load_inplace": True}
    assert served.post("/v1/load_lora_adapter", body).status == 200
    assert cached("a") > 0
    assert text(served, "a") == old


def test_adapters_come_and_go_by_vllms_routes(
    served: Worker, folders: dict[str, Path], tmp_path: Path
) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for body, status in (
        ({"lora_name": "e", "lora_path": str(tmp_path / "none")}, 404),
        ({"lora_name": "e", "lora_path": str(tmp_path)}, 400),
        ({"lora_name": "", "lora_path": "x"}, 400),
        ({"lora_name": "tiny", "lora_path": str(folders["a"])}, 400),
        ({"lora_name": "e"}, 400),
        ({"lora_name": "e", "lora_path": "x", "rank": 3}, 400),
    ):
        reply = served.post(load, body)
        assert reply.status == status, (body, reply.body)
    assert served.post(unload, {"lora_name": "e"}).status == 404
    moved = tmp_path / "e"
    shutil.copytree(folders["b"], moved)
    done = served.post(load, {"lora_name": "e", "lora_path": str(moved)})
    assert done.body == b"Success: LoRA adapter 'e' added successfully."
    assert text(served, "e") == text(served, "b")
    # The others' uses push e out of slots and host memory, sooner or later as reading them took.
    for name in "abcd" * 20:
        text(served, name)
        if not served.metric("vllm:lora_adapter_loaded", adapter_name="e"):
            break
    write_adapter(moved, bundled_path(), KIND, seed=5)
    reply = served.post("/v1/completions", {"model": "e", "prompt": "x", "max_tokens": 2})
    assert reply.status == 500
    assert "load_inplace" in reply.body.decode()
    assert served.post(unload, {"lora_name": "e"}).status == 200
    assert served.post("/v1/completions", {"model": "e", "prompt": "x"}).status == 404
    served.settle()


def test_blocks_travel_between_workers_with_the_adapter(
    served: Worker, begin: Callable[..., Worker], wanted: dict[str, str]
) -> None:
    other = begin(names="ab")
    for name in "ab":
        other.post("/reset_prefix_cache", {})
        leg = {"do_remote_decode": True}
        first = served.complete(PROMPT, model=name, max_tokens=1, temperature=0,
                                kv_transfer_params=leg)  # fmt: skip
        before = other.metric("pigou_kv_blocks_received_total")
        params = first["kv_transfer_params"]
        assert text(other, name, kv_transfer_params=params) == wanted[name]
        assert other.metric("pigou_kv_blocks_received_total") > before
        # Another adapter's blocks are not taken, and cost time alone.
        swapped = "ab"[name == "a"]
        first = served.complete(PROMPT, model=name, max_tokens=1, temperature=0,
                                kv_transfer_params=leg)  # fmt: skip
        params = first["kv_transfer_params"]
        assert text(other, swapped, kv_transfer_params=params) == wanted[swapped]
    reply = other.post("/v1/completions", {"model": "c", "prompt": PROMPT})
    assert (reply.status, "'c'" in reply.body.decode()) == (404, True)
    served.settle()


def test_without_permission_there_are_no_routes(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    (tmp_path / "adapter_config.json").write_text("{}")
    worker = start(model_folder, "--enable-lora", "--lora-modules", f"x={tmp_path}")
    try:
        assert worker.post("/v1/load_lora_adapter", {"lora_name": "y"}).status == 404
        assert worker.complete("Hello", model="x", max_tokens=2)["model"] == "x"
    finally:
        stop(worker)
