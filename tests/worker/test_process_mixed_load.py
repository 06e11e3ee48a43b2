"""Workers with a real model: whatever happens beside a request, its tokens are the same."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from worker_process import Worker, start, stop

from pigou.wire.prefill_decode_legs import leg_one, leg_two

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "make_random_checkpoint.py"
REQUESTS = 250
#: A greedy choice between tokens closer than this is excused, and counted.
TIE = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = "--family llama --hidden 64 --layers 3 --heads 4 --kv-heads 2 --ffn 128 --vocab 512"
    subprocess.run([sys.executable, str(TOOL), str(folder), *shape.split()], check=True)
    options = (
        "--executor torch --dtype fp32 --blocks 40 --host-blocks 40 --max-seqs 8 "
        "--max-batched-tokens 64 --max-model-len 400 --kv-lease 3"
    )
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
    workers = [
        start(folder, *options.split(), *more) for more in ([], ["--speculative-config", drafts])
    ]
    yield workers[0], workers[1]
    for worker in workers:
        stop(worker)


class Client:
    def __init__(self, session: aiohttp.ClientSession, pair: tuple[Worker, Worker]) -> None:
        self.session = session
        self.pair = pair

    async def post(self, worker: Worker, body: dict[str, Any]) -> Any:
        async with self.session.post(worker.url + "/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return answer

    async def stream(self, worker: Worker, body: dict[str, Any]) -> list[int]:
        found: list[int] = []
        url, body = worker.url + "/v1/completions", body | {"stream": True}
        async with self.session.post(url, json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    found += json.loads(line[6:])["choices"][0]["token_ids"]
        return found

    async def tokens(self, kind: str, body: dict[str, Any], want: list[int], at: random.Random
                     ) -> list[int]:  # fmt: skip
        """Return the tokens of a request that is served in one way or another."""
        worker = at.choice(self.pair)
        done: list[int] = []
        if kind == "stream":
            return await self.stream(worker, body)
        if kind == "salt":
            body = body | {"cache_salt": str(at.random())}
        if kind == "choices":
            body = body | {"n": 3}
        if kind == "resume":
            done = want[: at.randrange(len(want))]
            body = body | {"prompt": body["prompt"] + done, "resume_tokens": len(done)}
        if kind == "legs":
            worker = self.pair[1]
            ticket = (await self.post(self.pair[0], leg_one(body, chat=False)))[
                "kv_transfer_params"
            ]
            if ticket is not None and at.random() < 0.2:
                ticket["remote_secret"] = "wrong"
            body = body if ticket is None else leg_two(body, ticket)
        choice = at.choice((await self.post(worker, body))["choices"])
        return [*done, *choice["token_ids"]]


def excused(got: list[int], want: list[int], told: dict[str, Any]) -> bool:
    """Whether the first difference is between two tokens that were equally probable."""
    at = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
    second, first = sorted(told["top_logprobs"][at].values())[-2:]
    return bool(first - second < TIE)


async def mix(pair: tuple[Worker, Worker], seed: int) -> int:
    """Serve requests in all ways at once; return how many differences were excused."""
    at = random.Random(seed)
    prompts = [
        [at.randrange(10, 500) for _ in range(at.choice([3, 16, 17, 40, 100, 150]))]
        for _ in range(10)
    ]
    for i in range(4):
        prompts[i] = prompts[9][: at.choice([16, 32, 48])] + prompts[i]
    base = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    gate = asyncio.Semaphore(24)
    excuses = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, pair)
        alone = {"max_tokens": 60, "cache_salt": "alone", "logprobs": 2}
        truth = [
            (await client.post(pair[0], base | alone | {"prompt": prompt}))["choices"][0]
            for prompt in prompts
        ]

        async def one() -> None:
            nonlocal excuses
            number, most = at.randrange(len(prompts)), at.randrange(1, 60)
            body = base | {
                "prompt": prompts[number], "max_tokens": most, "priority": at.randrange(3),
            }  # fmt: skip
            kind = at.choice(["plain", "stream", "salt", "choices", "resume", "legs", "legs"])
            want = truth[number]["token_ids"][:most]
            async with gate:
                task = asyncio.create_task(client.tokens(kind, body, want, at))
                if at.random() < 0.15:
                    await asyncio.sleep(at.random() * 0.3)
                    task.cancel()
                    await asyncio.wait([task])
                    return
                got = await task
            if got != want:
                assert excused(got, want, truth[number]["logprobs"]), (kind, number, most)
                excuses += 1

        await asyncio.gather(*(one() for _ in range(REQUESTS)))
    return excuses


@pytest.mark.parametrize("seed", [1, 2])
def test_the_tokens_of_a_request_do_not_depend_on_what_else_happens(
    pair: tuple[Worker, Worker], seed: int
) -> None:
    excuses = asyncio.run(mix(pair, seed))
    print(f"{excuses} of {REQUESTS} differences excused")
    for worker in pair:
        worker.settle()
    assert pair[0].metric("vllm:num_preemptions_total") > 0
    assert pair[1].metric("pigou_kv_blocks_received_total") > 0
    accepted = pair[1].metric("vllm:spec_decode_num_accepted_tokens_total")
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert pair[1].metric(by_position) == accepted > 0
    assert pair[1].metric(by_position, position="0") > pair[1].metric(by_position, position="3")
    drafts = (pair[1].metric(f"vllm:spec_decode_num_{n}_total") for n in ("drafts", "draft_tokens"))
    assert 0 < next(drafts) <= next(drafts)
    assert not pair[0].metric("vllm:spec_decode_num_drafts_total")


FIELDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0, "structured_outputs": {"regex": "[0-9]{4}-[a-z]{6}"}},
    {"temperature": 1.0, "seed": 2, "structured_outputs": {"json_object": True}},
    {"temperature": 1.0, "seed": 3, "min_tokens": 9, "stop_token_ids": list(range(256))},
    {"temperature": 1.0, "seed": 4, "logit_bias": {"20": 8, "21": 8}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
def test_a_resumed_stream_draws_the_tokens_of_the_unbroken_one(
    pair: tuple[Worker, Worker], fields: dict[str, Any]
) -> None:
    prompt = list(range(30, 60))
    body = {"max_tokens": 14, "return_token_ids": True, "ignore_eos": False, **fields}
    whole = pair[0].complete(prompt, **body)["choices"][0]
    ids, shown = whole["token_ids"], ""
    for at in range(1, len(ids)):
        rest = pair[1].complete([*prompt, *ids[:at]], resume_tokens=at, **body)
        choice = rest["choices"][0]
        assert choice["token_ids"] == ids[at:]
        assert whole["text"].endswith(choice["text"])
        assert choice["finish_reason"] == whole["finish_reason"]
        assert rest["usage"]["completion_tokens"] == len(ids)
        assert len(choice["text"]) <= len(whole["text"]) - len(shown)
        shown = whole["text"][: len(whole["text"]) - len(choice["text"])]


def test_stop_strings_amid_drafts_end_a_reply_alike(pair: tuple[Worker, Worker]) -> None:
    prompt = list(range(30, 50)) * 3
    few = {str(token): 50 for token in range(300, 304)}  # which repeat each other soon
    body = {"max_tokens": 60, "return_token_ids": True, "temperature": 0, "ignore_eos": True,
            "logit_bias": few}  # fmt: skip
    text = pair[0].complete(prompt, **body)["choices"][0]["text"]
    before = pair[1].metric("vllm:spec_decode_num_accepted_tokens_total")
    for at in range(2, len(text) - 3, max(1, len(text) // 12)):
        ask = body | {"prompt": prompt, "stop": [text[at : at + 2]], "stream": at % 2 == 1}
        replies = [worker.post("/v1/completions", ask) for worker in pair]
        if ask["stream"]:
            ours, theirs = (
                [
                    "".join(c["choices"][0]["text"] for c in reply.chunks),
                    reply.chunks[-1]["choices"],
                ]
                for reply in replies
            )
            assert ours[0] == theirs[0]
            assert [c["finish_reason"] for c in ours[1]] == [c["finish_reason"] for c in theirs[1]]
        else:
            ours, theirs = (
                [r.json["choices"], r.json["usage"]["completion_tokens"]] for r in replies
            )
            assert ours == theirs
    assert pair[1].metric("vllm:spec_decode_num_accepted_tokens_total") > before


FAULTY = [{"regex": "[a-"}, {"grammar": "nonsense ((("}, {"json": {"type": "nope"}}]


@pytest.mark.parametrize("wanted", FAULTY, ids=str)
def test_a_faulty_grammar_is_refused(pair: tuple[Worker, Worker], wanted: Any) -> None:
    reply = pair[0].post("/v1/completions", {"prompt": "a", "structured_outputs": wanted})
    assert (reply.status, reply.json["error"]["param"]) == (400, "structured_outputs")


EXTREMES: dict[str, list[Any]] = {
    "prompt": ["hi", "日本語 é", "x " * 100, [5] * 40, [[1, 2], [3]], ["a", "bb"], [511]],
    "max_tokens": [1, 2, 30, 390],
    "temperature": [0, 1e-30, 0.5, 1, 2],
    "top_p": [1e-12, 0.5, 1],
    "top_k": [-1, 0, 1, 511, 512, 513, 2**31 - 1],
    "min_p": [0, 0.5, 1],
    "n": [1, 2, 5],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [1e-30, 0.1, 1, 1e6],
    "seed": [-(2**63), 0, 2**63 - 1],
    "stop": ["a", ["b", "\n"], "é"],
    "stop_token_ids": [[0], list(range(512))],
    "logit_bias": [{"0": 100, "1": -100}, {str(i): -100 for i in range(512)}],
    "min_tokens": [0, 1, 5],
    "ignore_eos": [True, False],
    "logprobs": [0, 1, 20],
    "prompt_logprobs": [0, 5, 20],
    "echo": [True],
    "stream": [True],
    "structured_outputs": [
        {"regex": "[a-z]+"}, {"json_object": True}, {"choice": ["é", "日本", "x"]},
        {"regex": ""}, {"choice": ["a" * 300]}, {"json": {}}, {"grammar": "start: start"},
    ],
    "truncate_prompt_tokens": [1, 3, 1000],
}  # fmt: skip


def test_extreme_values_are_honoured_or_refused_and_kill_nobody(
    pair: tuple[Worker, Worker],
) -> None:
    at = random.Random(5)

    async def main() -> dict[int, int]:
        gate, statuses = asyncio.Semaphore(16), dict.fromkeys((200, 400), 0)

        async def one(session: aiohttp.ClientSession) -> None:
            names = at.sample(sorted(EXTREMES), at.randrange(1, 8))
            body = {"prompt": "hi", "max_tokens": 20}
            body |= {name: at.choice(EXTREMES[name]) for name in names}
            url = pair[0].url + "/v1/completions"
            async with gate, session.post(url, json=body) as reply:
                text = await reply.text()
                assert reply.status in statuses, (body, text)
                assert reply.status == 400 or '"error"' not in text, (body, text)
                statuses[reply.status] += 1

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session) for _ in range(400)))
        return statuses

    statuses = asyncio.run(main())
    assert statuses[200] > 200
    pair[0].settle()
