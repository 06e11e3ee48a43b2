"""The gateway before real vLLM servers: legs over a pair, load over two, events read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.client import Endpoint
from tests.e2e.fleet import Fleet

from benchmarks.lib.servers import get_json

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

    from benchmarks.lib.peers import VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

WATCH = {"timeout": 30.0, "failures": 10, "hang": 300.0}
BLOCK = 32


def prompt(seed: int, size: int = 200) -> list[int]:
    return [6 + (seed * 131 + i * 17) % 1900 for i in range(size)]


def greedy(tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip


@pytest.fixture(scope="module")
def pair(
    vllm_pair: VllmPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Endpoint, Endpoint]]:
    """A gateway over the pair; the prefill and the decode server."""
    attach = [f"{vllm_pair.prefill},role=prefill,events={vllm_pair.prefill_events}",
              f"{vllm_pair.decode},role=decode,events={vllm_pair.decode_events}"]  # fmt: skip
    log = tmp_path_factory.mktemp("attached-pair") / "log"
    fleet = Fleet.start(log, attach=attach, watch=WATCH)
    fleet.recovered()
    yield fleet, Endpoint(vllm_pair.prefill), Endpoint(vllm_pair.decode)
    fleet.stop()


@pytest.fixture(scope="module")
def two(
    vllm_plain_two: list[VllmWorker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A gateway over two plain servers, which tell it themselves where their events are."""
    attach = [each.url for each in vllm_plain_two]
    fleet = Fleet.start(tmp_path_factory.mktemp("attached-two") / "log", attach=attach, watch=WATCH)
    fleet.recovered()
    yield fleet
    fleet.stop()


def pulled(decode: Endpoint) -> float:
    name = "vllm:prompt_tokens_by_source_total"
    return decode.metric(name, source="external_kv_transfer")


@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_run_and_tokens_are_those_of_one_server(
    pair: tuple[Fleet, Endpoint, Endpoint], stream: bool
) -> None:
    fleet, prefill, decode = pair
    for seed in range(4):
        tokens = prompt(seed + 10 * stream)
        before = pulled(decode)
        if stream:
            found = fleet.stream(**greedy(tokens)).tokens
        else:
            found = fleet.complete(**greedy(tokens))["choices"][0]["token_ids"]
        assert pulled(decode) - before >= len(tokens) - BLOCK
        alone = prefill.complete(**greedy(tokens, cache_salt=f"alone{seed}"))
        assert found == alone["choices"][0]["token_ids"]


def test_chats_run_over_both_legs(pair: tuple[Fleet, Endpoint, Endpoint]) -> None:
    fleet, prefill, decode = pair
    body = {"messages": [{"role": "user", "content": "Where is the market? " * 20}],
            "max_tokens": 8, "temperature": 0, "ignore_eos": True}  # fmt: skip
    before = pulled(decode)
    told = fleet.stream(**body)
    assert told.told[2] == "length"
    assert pulled(decode) > before
    alone = prefill.complete(**body, cache_salt="alone")
    assert told.text == alone["choices"][0]["message"]["content"]


def test_requests_of_clients_with_transfer_params_never_reach_a_server(
    pair: tuple[Fleet, Endpoint, Endpoint],
) -> None:
    fleet, prefill, decode = pair
    for params in ({"do_remote_prefill": True}, {"do_remote_decode": True}):
        reply = fleet.post("/v1/completions", {"prompt": "a", "kv_transfer_params": params})
        assert reply.status == 400
    assert prefill.get("/health").status == decode.get("/health").status == 200


def test_events_of_the_pair_reach_the_index(pair: tuple[Fleet, Endpoint, Endpoint]) -> None:
    fleet, _, _ = pair
    fleet.complete(**greedy(prompt(77)))
    fleet.wait(lambda rows: all(row["cached_blocks"] > 0 for row in rows.values()), 30)
    assert not any(row["gaps"] for row in fleet.rows().values())


def test_load_is_spread_over_two_servers(two: Fleet, vllm_plain_two: list[VllmWorker]) -> None:
    servers = [Endpoint(each.url) for each in vllm_plain_two]
    before = [each.metric("vllm:request_success_total") for each in servers]
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda n: two.stream(**greedy(prompt(n))), range(16)))
    assert all(len(stream.tokens) == 12 for stream in told)
    after = [each.metric("vllm:request_success_total") for each in servers]
    served = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(served) == 16
    assert min(served) >= 4, served


def test_a_gateway_knows_what_two_servers_have_cached(two: Fleet) -> None:
    def blocks() -> dict[str, int]:
        return {name: row["cached_blocks"] for name, row in two.rows().items()}

    for number in range(6):
        two.stream(**greedy(prompt(200 + number, 160)))
    two.wait(lambda rows: all(row["cached_blocks"] > 0 for row in rows.values()), 30)
    before = blocks()
    two.stream(**greedy(prompt(300, 640)))  # 20 blocks that nobody has
    two.wait(lambda _: sum(blocks().values()) >= sum(before.values()) + 640 // BLOCK, 30)
    assert not any(row["gaps"] for row in two.rows().values())


def test_a_gateway_says_what_the_servers_serve(two: Fleet, vllm_plain_two: list[Any]) -> None:
    [card] = two.get("/v1/models").json["data"]
    assert card["id"] == get_json(vllm_plain_two[0].url + "/v1/models")["data"][0]["id"]
    reply = two.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
    assert reply.status == 400
    assert reply.json["error"]["param"] == "max_tokens"
