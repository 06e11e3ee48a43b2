"""The access log of gateway and worker says who asked what, and nothing of prompts or keys."""

from __future__ import annotations

import json
import logging

import pytest
from tests.fleet.harness import PROMPT, SLEEP, running, text


async def test_requests_are_logged_with_tokens_times_and_worker_but_no_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pigou.access")
    arguments = ("--log-format", "json", "--access-log", *SLEEP)
    async with running(0, 0, 1, arguments=arguments) as (_, client):
        assert len(text(await client.reply(user="bob-secret"))) > 0
        status, _reply = await client.post("/v1/completions", prompt=PROMPT, max_tokens=3, n=2)
        assert status == 200
        status, _reply = await client.post("/v1/completions", prompt=5.5)
        assert status == 400
    records = [r for r in caplog.records if r.name == "pigou.access"]
    fields = [getattr(record, "fields", {}) for record in records]
    own = [each for each in fields if "source" not in each and each["path"] == "/v1/completions"]
    stream, whole, refused = own
    assert (stream["method"], stream["status"], stream["stream"]) == ("POST", 200, True)
    assert (stream["completion_tokens"], stream["worker"]) == (24, "both-0")
    assert 0 < stream["ttft_s"] <= stream["duration_s"]
    assert stream["request_id"]
    assert stream["model"]
    assert whole["prompt_tokens"] > 0
    assert whole["completion_tokens"] == 6
    assert refused["status"] == 400
    assert "completion_tokens" not in refused
    told = [each for each in fields if each.get("source") == "pigou.access"]
    told = [each for each in told if each["path"] == "/v1/completions" and each["status"] == 200]
    assert {each["worker"] for each in told} == {"both-0"}
    assert sum(each["completion_tokens"] for each in told) == 30
    everything = json.dumps(fields)
    assert PROMPT[:20] not in everything
    assert "bob-secret" not in everything
