"""Every bound on a body gives a 400 that names field, count and remedy, at a worker too."""

from __future__ import annotations

import pytest
from tests.wire.hostile_bodies import CASES, encode
from worker_process import Worker


@pytest.mark.parametrize("name", CASES)
def test_what_is_out_of_bounds_is_refused_by_name(worker: Worker, name: str) -> None:
    path, body, field, words = CASES[name]
    reply = worker.post(path, encode(body))
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, field), error
    assert all(word in error["message"] for word in words), error


def test_a_prompt_longer_than_the_context_is_refused_before_it_is_decoded(worker: Worker) -> None:
    reply = worker.post("/v1/completions", {"prompt": [5] * 50_000})
    assert reply.status == 400
    assert "50000 token ids; the model's context is 2048 tokens" in reply.json["error"]["message"]
    assert worker.post("/tokenize", {"prompt": "a"}).status == 200
