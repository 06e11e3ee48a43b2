"""Clients that others wrote, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.fleet import Fleet

openai = pytest.importorskip("openai")

PROMPT = "Two roads lead from the village to the market. The short one is narrow."
MESSAGES = [{"role": "user", "content": "Where is the market?"}]


@pytest.fixture(scope="module")
def client(real: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_lists_the_model(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]


def test_openai_completes_and_streams_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True))
    assert whole.choices[0].text == "".join(p.choices[0].text for p in pieces)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12


def test_openai_chats_and_streams_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    usage, text, role = None, "", None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            role = choice.delta.role or role
    assert (text, role) == (whole.choices[0].message.content, "assistant")
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_openai_gets_as_many_choices_as_it_wants(client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "n": 3, "seed": 5}
    texts = ["", "", ""]
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        for choice in client.chat.completions.create(**asked).choices:
            texts[choice.index] = choice.message.content
    assert len(set(texts)) == 3


def test_openai_stops_before_a_stop_string(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    choice = client.completions.create(**asked, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


def test_openai_gets_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(item.logprob <= 0 and len(item.top_logprobs) >= 3 for item in content)
    completion = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, logprobs=2, temperature=0
    )
    found = completion.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    assert "".join(found.tokens) == completion.choices[0].text


def test_openai_raises_the_right_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope") as missing:
        client.completions.create(model="nope", prompt=PROMPT)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="max_tokens") as refused:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=-1)
    assert refused.value.param == "max_tokens"
    told = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"temprature": 1}
    )
    assert told.headers["x-pigou-unknown-fields"] == "temprature"
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="tiny", prompt=[7] * 5000, max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        next(iter(client.completions.create(model="tiny", prompt=[7] * 5000, stream=True)))


def test_openai_streams_from_an_asynchronous_client(real: Fleet) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="any") as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"{number} {PROMPT}", max_tokens=8, stream=True
                )
                return "".join([c.choices[0].text async for c in stream if c.choices])

            return await asyncio.gather(*(one(number) for number in range(16)))

    assert all(asyncio.run(main()))


def run(command: list[str], seconds: float = 240) -> str:
    """Run a client; return what it said."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False,
        cwd=tempfile.gettempdir(),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def peer(variable: str, program: str) -> Path:
    home = os.environ.get(variable)
    if not home or not (Path(home) / "bin" / program).exists():
        pytest.skip(f"{variable} names no venv with {program}")
    return Path(home) / "bin" / program


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--backend", "openai"],
     ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]],
    ids=["completions", "chat"],
)  # fmt: skip
def test_vllm_bench_serve_runs(
    real: Fleet, checkpoint: Path, tmp_path: Path, options: list[str]
) -> None:
    vllm = peer("PIGOU_PEER_VLLM", "vllm")
    run([str(vllm), "bench", "serve", *options, "--base-url", real.url, "--model", "tiny",
         "--tokenizer", str(checkpoint), "--dataset-name", "random", "--random-input-len", "96",
         "--random-output-len", "24", "--num-prompts", "16", "--max-concurrency", "8",
         "--ignore-eos", "--temperature", "0", "--num-warmups", "2", "--disable-tqdm",
         "--save-result", "--result-dir", str(tmp_path),
         "--result-filename", "r.json"])  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (16, 0)
    assert result["total_output_tokens"] == 16 * 24
    real.settle()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("format", ["", ",request_format=/v1/completions"], ids=["chat", "text"])
def test_guidellm_runs(real: Fleet, checkpoint: Path, tmp_path: Path, format: str) -> None:
    guidellm = peer("PIGOU_PEER_GUIDELLM", "guidellm")
    report = tmp_path / "report.json"
    run([str(guidellm), "run", "--backend",
         f"kind=openai_http,target={real.url},model=tiny{format}",
         "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
         "--tokenizer", f"kind=hf_auto,model={checkpoint}",
         "--data", "kind=synthetic_text,prompt_tokens=96,output_tokens=16",
         "--output", f"kind=json,path={report}", "--disable-console-interactive"])  # fmt: skip
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals
    real.settle()
