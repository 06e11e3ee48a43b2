"""Hostile grammars fail their own requests; a healthy stream and the worker go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import Worker, start, stop

pytest.importorskip("torch")

CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3500)) + '\nr3500: "a"'
HOSTILE: list[dict[str, Any]] = [
    {"grammar": 'start: e\ne: e e | e e e | /[a-z]/ | ""'},
    {"grammar": CHAIN},
    {"choice": [f"c{i}" for i in range(150_000)]},
    {"regex": "(" * 5000 + ")" * 5000},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    worker = start("bundled", "--executor", "torch", "--rehearse", "0", log=Path(log))
    yield worker
    stop(worker)


@pytest.mark.parametrize("wanted", HOSTILE, ids=["ambiguous", "chain", "choice", "nested", "ref"])
def test_a_hostile_grammar_is_refused_by_name_beside_a_healthy_stream(
    real: Worker, wanted: dict[str, Any]
) -> None:
    body = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    alone = real.complete(**body)["choices"][0]["text"]
    said: list[str] = []
    stream = threading.Thread(
        target=lambda: said.append(real.complete(**body)["choices"][0]["text"])
    )
    stream.start()
    replies = [
        real.post(
            "/v1/completions",
            {"prompt": "Once", "max_tokens": 200, "structured_outputs": wanted, "seed": seed},
        )
        for seed in range(3)
    ]
    stream.join(120)
    assert said == [alone]
    for reply in replies:
        assert reply.status == 400, reply.body
        assert reply.json["error"]["param"] == "structured_outputs"
    good = real.complete("Once", max_tokens=20, structured_outputs={"regex": "[a-z]{4}"})
    assert len(good["choices"][0]["text"]) == 4


def test_structured_json_ends_within_its_tokens_for_every_seed(real: Worker) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(8):
        reply = real.complete(
            "Who?", max_tokens=64, seed=seed, structured_outputs={"json": schema}, temperature=1.0
        )
        choice = reply["choices"][0]
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["text"])
        assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == choice["text"]
