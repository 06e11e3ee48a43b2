"""A worker of a model with experts: loads by page and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_process import Worker, start, stop

from pigou_lab.gpu_check.random_model import TINY, write_checkpoint

LAYERS, EXPERTS, TOP = 2, 8, 2
SHAPE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "num_experts_per_tok": TOP,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_hidden_layers": LAYERS,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    write_checkpoint(path, SHAPE, torch.float32)
    return path


@pytest.fixture
def begin(folder: Path) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def begin(*options: str) -> Worker:
        started.append(
            start(folder, "--executor", "torch", "--blocks", "64", "--max-model-len", "256",
                  "--dtype", "fp32", *options)
        )  # fmt: skip
        return started[-1]

    yield begin
    for worker in started:
        stop(worker)


def loads_of(worker: Worker) -> dict[str, Any]:
    found: dict[str, Any] = worker.get("/experts").json
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--enable-expert-parallel",), marks=pytest.mark.slow, id="fixed"),
        pytest.param(
            ("--enable-expert-parallel", "--enable-eplb", "--eplb-config",
             '{"window_size": 8, "step_interval": 10, "num_redundant_experts": 2}'), id="balanced",
        ),
    ],
)  # fmt: skip
def test_processes_that_share_experts_answer_as_one(
    options: tuple[str, ...], begin: Callable[..., Worker]
) -> None:
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    prompts = ["experts of a mixture", "a b c d e f g", "x"]
    alone = begin()
    expected = [alone.complete(prompt, **body)["choices"][0]["text"] for prompt in prompts]
    shared = begin("--tensor-parallel-size", "2", *options)
    assert [shared.complete(p, **body)["choices"][0]["text"] for p in prompts] == expected
    loads = loads_of(shared)
    assert loads["ranks"] == 2
    slots = EXPERTS + (2 if len(options) > 1 else 0)
    assert all(len(row) == slots and set(row) == set(range(EXPERTS)) for row in loads["placements"])
    assert shared.metric("pigou_experts_moved_total") == loads["moved"]


def test_every_token_counts_once_for_each_of_its_experts(begin: Callable[..., Worker]) -> None:
    worker = begin()
    before = loads_of(worker)
    worker.complete("experts of a mixture", max_tokens=12, temperature=0, ignore_eos=True)
    after = loads_of(worker)
    # 20 prompt tokens and 11 of 12 sampled ones; the last layer computes the last prompt token.
    assert after["tokens"] - before["tokens"] == TOP * ((20 + 11) + (1 + 11))
    assert after["layers"] == [0, 1]
    counts = torch.tensor(after["window_tokens"])
    assert counts.shape == (LAYERS, EXPERTS)
    assert int(counts.sum()) == after["tokens"]
    assert 1 <= after["activated_per_step"] <= EXPERTS
    spread = (counts.max(1).values / counts.double().mean(1) - 1).mean()
    assert after["imbalance"] == pytest.approx(float(spread))
    assert worker.metric("pigou_expert_tokens_total") == after["tokens"]
    assert "pigou_expert_rank_imbalance" not in worker.get("/metrics").body.decode()
