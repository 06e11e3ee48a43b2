"""Special tokens that clients type: text in chats, as ever in completions, raw where asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from worker_process import Worker, start, stop

from pigou.gateway.prompt_reader import PromptTokenizer
from pigou.gateway.request import BodyFields
from pigou.models import bundled_path

SPELLER = PromptTokenizer.load(bundled_path())
SPECIAL = {
    i: token.content
    for i, token in SPELLER.tokenizer.backend.get_added_tokens_decoder().items()
    if token.special
}
EVIL = "".join(f"a{text}b" for text in SPECIAL.values())


def _controls(tokens: list[int]) -> list[int]:
    return [i for i in tokens if i in SPECIAL]


@pytest.fixture(scope="module")
def ask() -> Any:
    """Return a function from the options of a worker to one that tokenizes there."""
    workers: list[Worker] = []

    def begin(*options: str) -> Callable[..., list[int]]:
        workers.append(start("bundled", "--blocks", "64", *options))

        def tokenize(**body: Any) -> list[int]:
            reply = workers[-1].post("/tokenize", body)
            assert reply.status == 200, reply.body
            return list(reply.json["tokens"])

        return tokenize

    yield begin
    for worker in workers:
        stop(worker)


def _spelt(speller: PromptTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    asked = BodyFields(messages=msgspec.Raw(msgspec.json.encode(messages)))
    text = speller.prompt_of(asked, chat=True, stock=False)
    return speller.encode(text, asked, chat=True)


def test_worker_and_gateway_read_them_as_text_in_chats_and_alike(ask: Any) -> None:
    tokenize = ask()
    plain, typed = ([{"role": "user", "content": text}] for text in ("a b", EVIL))
    own = _controls(tokenize(messages=plain))
    assert own, "the template has control tokens of its own"
    assert _controls(tokenize(messages=typed)) == own
    assert tokenize(messages=typed) == _spelt(SPELLER, typed)
    assert tokenize(messages=plain) == _spelt(SPELLER, plain)
    assert set(_controls(tokenize(prompt=EVIL))) == set(SPECIAL), "completions are raw"


def test_a_switch_lets_them_be_control_tokens(ask: Any) -> None:
    raw = PromptTokenizer.load(bundled_path())
    raw.allow_special_tokens = True
    typed = [{"role": "user", "content": EVIL}]
    tokens = ask("--allow-special-tokens")(messages=typed)
    assert len(_controls(tokens)) > len(SPECIAL)
    assert tokens == _spelt(raw, typed)
