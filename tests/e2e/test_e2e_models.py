"""Three models on one gateway, of random weights, asked by OpenAI's client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.e2e.conftest import SHAPE
from tests.e2e.fleet import Fleet

from tools.make_random_checkpoint import write_checkpoint

openai = pytest.importorskip("openai")

NAMES = ("ant", "bee", "cow")
ALIASES = {f"{name}-{i}": name for name in NAMES for i in range(33)}
PROMPT = "Two roads lead from the village to the market. The short one is narrow, the other not."


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("models")
    pools = []
    for seed, name in enumerate(NAMES):
        write_checkpoint(folder / name, SHAPE, dtype="float32", seed=seed)
        pools.append(f"  - {name},model={folder / name},both=1\n")
    aliases = [f"  - {alias}={name}\n" for alias, name in ALIASES.items()]
    file = folder / "serve.yaml"
    file.write_text(f"port: 0\nmodel-pool:\n{''.join(pools)}model-alias:\n{''.join(aliases)}")
    command = [
        sys.executable,
        "-m",
        "pigou",
        "serve",
        "--config",
        str(file),
        "--hang-timeout",
        "20",
    ]
    options = ["--dtype", "fp32", "--drain", "3", "--", "--blocks", "256", "--rehearse", "0"]
    fleet = Fleet.run([*command, *options], folder / "log")
    yield fleet
    fleet.stop()


def test_each_name_gets_the_text_of_its_model(three: Fleet) -> None:
    with openai.OpenAI(base_url=three.url + "/v1", api_key="any", max_retries=0) as client:
        assert [card.id for card in client.models.list()][:2] == ["ant", "ant-0"]
        assert len(list(client.models.list())) == 102

        def ask(name: str) -> tuple[str, str, int]:
            reply = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=6, temperature=0
            )
            cached = reply.usage.prompt_tokens_details.cached_tokens
            return reply.model, reply.choices[0].text, cached

        # The same prompt: what one model has cached is nothing to the others.
        cold = {name: ask(name) for name in NAMES}
        assert [cached for *_, cached in cold.values()] == [0, 0, 0]
        assert len({text for _, text, _ in cold.values()}) == 3
        with ThreadPoolExecutor(8) as pool:
            replies = dict(zip(ALIASES, pool.map(ask, ALIASES), strict=True))
        for alias, (model, text, cached) in replies.items():
            assert (model, text) == cold[ALIASES[alias]][:2]
            assert cached >= 16, "an alias has the blocks of its model"
        with pytest.raises(openai.NotFoundError, match="The model `dog` does not exist"):
            ask("dog")


def test_a_killed_worker_of_one_model_harms_no_other(three: Fleet) -> None:
    ids = {row["model"]: id for id, row in three.rows().items()}
    with openai.OpenAI(base_url=three.url + "/v1", api_key="any", max_retries=0) as client:

        def ask(name: str) -> str:
            asked = {"model": name, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
            pieces = client.completions.create(
                **asked, stream=True, extra_body={"ignore_eos": True}
            )
            return "".join(piece.choices[0].text for piece in pieces if piece.choices)

        right = {name: ask(name) for name in NAMES}
        with ThreadPoolExecutor(8) as pool:
            running = {name: [pool.submit(ask, name) for _ in range(2)] for name in NAMES}
            pid = three.signal(ids["bee"])
            running["bee"].append(pool.submit(ask, "bee"))  # it waits for the worker to come back
            for name, streams in running.items():
                assert {stream.result() for stream in streams} == {right[name]}
    three.recovered([pid])
    assert {id: row["restarts"] for id, row in three.rows().items()} == {
        id: int(name == "bee") for name, id in ids.items()
    }
