"""Embeddings, scores and reranking by pooled hidden states, in the shapes of vLLM's server."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError
from pigou.wire.errors import bad_field, bad_request
from pigou.wire.openai_replies import Json, encode
from pigou.wire.openai_requests import (
    EmbeddingsRequest,
    PoolingRequest,
    Prompt,
    RerankRequest,
    ScoreRequest,
)
from pigou.worker.http.reply import Reply
from pigou.worker.http.served_model import ServedModel, read_spec

#: Keys of sentence-transformers' `1_Pooling/config.json` and what they mean here.
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean",
          "lasttoken": "last", "mean": "mean"}  # fmt: skip
#: Names of a score's two sides.
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2"))


def pooling_of(folder: Path, option: str) -> str:
    """Return how a model's hidden states are pooled: last, mean, or none; raises ConfigError."""
    path = folder / "1_Pooling" / "config.json"
    if option != "auto":
        return option
    if not path.exists():
        return "none"
    spec = read_spec(path)
    named = [key for key in spec if key.startswith("pooling_mode_") and spec[key] is True]
    named += [str(spec["pooling_mode"])] if "pooling_mode" in spec else []
    modes = [_MODES.get(name) for name in named]
    if len(modes) != 1 or modes[0] is None:
        raise ConfigError(f"{path} pools by {', '.join(named) or 'nothing'}; lasttoken and "
                          "mean_tokens work: give --pooling last, mean or none")  # fmt: skip
    return modes[0]


def embedding_dimensions(spec: Json) -> Sequence[int]:
    """Return the lengths that a model's embeddings may be cut to, by its config.json."""
    sizes = spec.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return sorted(sizes)
    return range(1, int(spec["hidden_size"]) + 1) if spec.get("is_matryoshka") else ()


def pooling_request(
    request: EmbeddingsRequest | ScoreRequest | RerankRequest, model: ServedModel
) -> PoolingRequest:
    """Return the prompts whose pooled states answer a request; raises APIError 400."""
    if model.pooling == "none":
        raise bad_request(
            f"The model {model.name} makes no embeddings: its folder has no 1_Pooling/config.json. "
            "Start the worker with --pooling last or mean to pool its hidden states.",
            "model",
        )
    texts: Prompt
    match request:
        case EmbeddingsRequest():
            texts = request.input
            _check_dimensions(request.dimensions, model)
        case ScoreRequest():
            first, second = _sides(request)
            texts = [*first, *second]
        case RerankRequest():
            if request.top_n is not None and request.top_n < 1:
                raise bad_field("top_n", f"is {request.top_n}; it must be at least 1.")
            texts = [request.query, *_texts(request.documents, "documents")]
    shared = {name: getattr(request, name) for name in EmbeddingsRequest.SHARED}
    return PoolingRequest(
        prompt=texts, pooling=model.pooling, max_tokens=0, temperature=0, **shared
    )


def pooling_reply(request: EmbeddingsRequest | ScoreRequest | RerankRequest, reply: Reply) -> bytes:
    """Return the JSON of the answer to a request whose prompts were pooled."""
    vectors = np.stack([np.asarray(one.pooled, dtype=np.float32) for one in reply.sequences])
    head = {"created": int(time.time()), "model": reply.model, "object": "list"}
    prompt = reply.token_counts()[0]
    head["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt}
    if isinstance(request, EmbeddingsRequest):
        shown = _normalized(vectors[:, : request.dimensions or None])
        coded = request.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": at, "embedding": _coded(v) if coded else v.tolist()}
            for at, v in enumerate(shown)
        ]
        return encode({"id": reply.id.replace("cmpl", "embd"), "data": data, **head})
    vectors = _normalized(vectors)
    if isinstance(request, ScoreRequest):
        first = len(_sides(request)[0])
        scores = (vectors[:first] * vectors[first:]).sum(axis=1).tolist()
        data = [{"object": "score", "index": at, "score": s} for at, s in enumerate(scores)]
        return encode({"id": reply.id.replace("cmpl", "score"), "data": data, **head})
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top_n]
    documents = _texts(request.documents, "documents")
    results: list[Json] = [
        {"index": at, "relevance_score": scores[at],
         "document": {"text": documents[at]}}
        for at in order
    ]  # fmt: skip
    if request.return_documents is False:
        results = [{k: v for k, v in one.items() if k != "document"} for one in results]
    return encode({"id": reply.id.replace("cmpl", "rerank"), "results": results, **head})


def _check_dimensions(wanted: int | None, model: ServedModel) -> None:
    if wanted is None or wanted in model.dimensions:
        return
    ways = "leave it out: the model's embeddings are not made to be cut"
    if model.dimensions:
        sizes = model.dimensions
        ways = f"it must be one of {', '.join(map(str, sizes))}"
        if isinstance(sizes, range):
            ways = f"it must be {sizes[0]} to {sizes[-1]}"
    raise bad_field("dimensions", f"is {wanted}; {ways}.")


def _sides(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Return texts of both sides of each pair; one on the left is compared with all."""
    first, second = (_given(request, names) for names in _SIDES)
    left, right = (_texts(getattr(request, name), name) for name in (first, second))
    if len(left) not in (1, len(right)):
        raise bad_field(first, f"has {len(left)} texts, and {second} {len(right)}: send one, or "
                        "as many.")  # fmt: skip
    return left * (len(right) // len(left)), right


def _given(request: ScoreRequest, names: Sequence[str]) -> str:
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise bad_field(
            [names[0], *given][-1],
            f"is given beside {given[0]}: keep one." if given else "is required, and missing.",
        )
    return given[0]


def _texts(value: Any, name: str) -> list[str]:
    items = [value] if isinstance(value, str) else value
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    good = [text for text in texts if isinstance(text, str) and text]
    if not texts or len(good) < len(texts):
        raise bad_field(name, "must be a text or a list of texts, none of them empty.")
    return good


def prompt_field(request: EmbeddingsRequest | ScoreRequest | RerankRequest) -> str:
    """Return the field that errors of prompts name: of two, the one with more text."""
    match request:
        case EmbeddingsRequest():
            return "input"
        case ScoreRequest():
            names = [_given(request, names) for names in _SIDES]
        case RerankRequest():
            names = ["query", "documents"]
    return max(names, key=lambda name: sum(map(len, _texts(getattr(request, name), name))))


def _normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, 1e-12)
    return unit


def _coded(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
