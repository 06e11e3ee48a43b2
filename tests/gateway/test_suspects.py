"""Laws of requests that end workers: after the second death they are refused by name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.stub import Script, Stub, serving

POISON = "poison"


@dataclass
class Mortal(Stub):
    """A worker whose server ends once a poisonous request has had some chunks."""

    runner: web.AppRunner | None = None
    after: int = 0

    async def start(self) -> web.AppRunner:
        self.runner = await super().start()
        return self.runner

    async def _misbehave(
        self, request: web.Request, response: Any, head: dict[str, Any], sent: int
    ) -> bool:
        if sent == self.after and bytes(self._asked(request)) == POISON.encode():
            assert self.runner is not None
            for site in list(self.runner.sites):
                await site.stop()
            assert request.transport is not None
            request.transport.abort()
            return True
        return await super()._misbehave(request, response, head, sent)

    def _asked(self, request: web.Request) -> list[int]:
        """Return the prompt's ids of the last request."""
        prompt = self.seen[-1].body["prompt"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        return [each for each in ids if each < 1000]


async def post(url: str, prompt: str, **fields: Any) -> tuple[int, str, dict[str, str]]:
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        return response.status, await response.text(), dict(response.headers)


async def test_a_request_under_way_at_two_deaths_is_refused_by_name_and_sent_to_no_third(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stubs = [Mortal(name) for name in "abcd"]
    with caplog.at_level(logging.WARNING, "pigou.gateway"):
        async with serving(*stubs) as fleet:
            status, text, headers = await post(fleet.url, POISON)
            seen = [stub for stub in stubs if stub.seen]
            assert len(seen) == 2
            name = seen[0].seen[0].request_id
            assert status == 502
            assert name in text
            assert '"SuspectRequestError"' in text
            assert headers["x-should-retry"] == "false"
            assert f"request {name} is refused" in caplog.text
            status, text, _ = await post(fleet.url, "good")
            assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
            await fleet.settle()


async def test_a_request_that_got_tokens_is_not_suspected_of_deaths_of_unknown_cause() -> None:
    stubs = [Mortal(name, after=2) for name in "abc"]
    async with serving(*stubs, Stub("z")) as fleet:
        status, text, _ = await post(fleet.url, POISON)
    assert (status, "SuspectRequestError" in text) == (200, False)


async def test_a_connection_that_breaks_off_is_no_death() -> None:
    stubs = [Stub(name, script=Script(die_after=0, times=1)) for name in "abc"]
    async with serving(*stubs, Stub("z")) as fleet:
        status, text, _ = await post(fleet.url, "x")
    assert (status, "error" in text) == (200, False)


async def test_a_request_that_failed_by_itself_in_the_engine_is_not_sent_again() -> None:
    class Failing(Stub):
        async def _reply(self, request: web.Request) -> web.StreamResponse:
            await request.read()
            self.cancelled += 1
            error = {"message": "injected", "type": "RequestFailedError", "param": None,
                     "code": 500}  # fmt: skip
            return web.json_response({"error": error}, status=500)

    stubs = [Failing(name) for name in "abc"]
    async with serving(*stubs) as fleet:
        status, text, headers = await post(fleet.url, "x")
    assert (status, "injected" in text, headers["x-should-retry"]) == (500, True, "false")
    assert sum(stub.cancelled for stub in stubs) == 1
