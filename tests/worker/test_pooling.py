"""Embeddings, scores and rankings are pooled hidden states, whatever chunks a prompt comes in."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_process import Worker, start, stop

from pigou.config import ConfigError
from pigou.models import ModelError, bundled_path
from pigou.models.hf_config import HfConfig, read_config
from pigou.models.read import choose_implementation
from pigou.worker.http.pooling import pooling_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = ["The market is by the river.", "Where is the market? " * 30, "No."]


def folder_of(path: Path, pooling: str) -> Path:
    folder = Path(shutil.copytree(bundled_path(), path / "model"))
    (folder / "1_Pooling").mkdir()
    spec = {"word_embedding_dimension": 8, f"pooling_mode_{pooling}": True,
            "pooling_mode_cls_token": False, "include_prompt": True}  # fmt: skip
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(spec))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    return folder


@pytest.fixture(scope="module", params=["lasttoken", "mean_tokens"])
def pooled(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("pooling")
    folder = folder_of(path, request.param)
    worker = start(
        str(folder), "--executor", "torch", "--rehearse", "0", "--dtype", "fp32",
        "--max-batched-tokens", "32", "--served-model-name", "m", log=path / "log",
    )  # fmt: skip
    yield worker, folder, request.param
    stop(worker)


def embed(worker: Worker, **fields: Any) -> Any:
    reply = worker.post("/v1/embeddings", fields)
    assert reply.status == 200, reply.body
    return reply.json


def expected(folder: Path, pooling: str, ids: list[int]) -> Any:
    """Return transformers' embedding of a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    vector = states[-1] if pooling == "lasttoken" else states.mean(0)
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def test_embeddings_are_those_of_transformers_in_chunks_and_from_the_cache(pooled: Any) -> None:
    worker, folder, pooling = pooled
    body = embed(worker, input=TEXTS)
    ids = [worker.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
    assert len(ids[1]) > 64, "the prompt comes in chunks"
    for index, one in enumerate(body["data"]):
        assert (one["index"], one["object"]) == (index, "embedding")
        reference = expected(folder, pooling, ids[index])
        np.testing.assert_allclose(one["embedding"], reference, atol=1e-5)
    assert body["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, ids)))
    again = embed(worker, input=ids, encoding_format="base64")
    for one, other in zip(body["data"], again["data"], strict=True):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        np.testing.assert_allclose(vector, one["embedding"], atol=1e-5)


def test_dimensions_cut_and_normalize(pooled: Any) -> None:
    worker, *_ = pooled
    whole = np.array(embed(worker, input="a")["data"][0]["embedding"])
    cut = np.array(embed(worker, input="a", dimensions=8)["data"][0]["embedding"])
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    refused = worker.post("/v1/embeddings", {"input": "a", "dimensions": 10**6})
    assert (refused.status, refused.json["error"]["param"]) == (400, "dimensions")


def test_scores_and_ranks_are_cosines(pooled: Any) -> None:
    worker, *_ = pooled
    vectors = np.array([one["embedding"] for one in embed(worker, input=TEXTS)["data"]])
    cosines = vectors[1:] @ vectors[0]
    body = worker.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json
    np.testing.assert_allclose([one["score"] for one in body["data"]], cosines, atol=1e-5)
    asked = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}], "top_n": 1}
    (best,) = worker.post("/v1/rerank", asked).json["results"]
    assert best["index"] == int(np.argmax(cosines))
    assert best["relevance_score"] == pytest.approx(cosines.max(), abs=1e-5)
    refused = worker.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "text_1")
    for fields, name in (({"queries": "b"}, "queries"), ({"data_2": "b"}, "data_2"),
                         ({"text_2": ""}, "text_2"), ({"text_2": ["a" * 9999]}, "text_2"),
                         ({"text_1": None}, "text_1")):  # fmt: skip
        refused = worker.post("/v1/score", {"text_1": "a", "text_2": "b"} | fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, name)
    refused = worker.post("/v1/embeddings", {"input": ["a", ""]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "input")


def test_a_model_without_pooling_says_so(tmp_path: Path) -> None:
    worker = start("bundled", "--rehearse", "0", log=tmp_path / "log")
    try:
        refused = worker.post("/v1/embeddings", {"input": "a"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "model")
        assert "--pooling" in refused.json["error"]["message"]
    finally:
        stop(worker)


@pytest.mark.parametrize("wanted", ["auto", "pigou", "transformers"])
def test_a_cross_encoder_is_refused_by_its_name(tmp_path: Path, wanted: str) -> None:
    values = read_config(bundled_path()) | {"architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        choose_implementation(HfConfig(tmp_path, values), wanted)


def test_pooling_that_does_not_work_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "max_tokens")
    with pytest.raises(ConfigError, match="pools by pooling_mode_max_tokens"):
        pooling_of(folder, "auto")
    assert pooling_of(folder, "mean") == "mean"
    assert pooling_of(bundled_path(), "auto") == "none"
