"""The halves of PigouConnector, driven as vLLM drives them, over shared memory and TCP."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.integrations.vllm.transfer import (
    CacheBlocks,
    ConnectorConfig,
    SchedulerHalf,
    WorkerHalf,
)
from pigou.kv.block import KVLayout
from pigou.request import SECOND
from pigou.runtime.tensor_io import DeviceCopies, rows_in_storage
from pigou.worker.kv_transfer.transfer_params import TransferConfig, TransferReason

SIZE, BLOCKS, PLANES, WIDTH = 16, 32, 3, 256  # tokens in a block; blocks; planes of rows
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
KEY = b"k" * 32


def layout(**changes: Any) -> KVLayout:
    fields = {"model": "m", "digest": "d", "dtype": "bfloat16", "block_size": SIZE, "layers": 3,
              "kv_heads": 1, "head_dim": 2, "block_bytes": PLANES * WIDTH}  # fmt: skip
    return KVLayout(**(fields | changes))


def cache(seed: int | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows = np.zeros((PLANES * BLOCKS, WIDTH), dtype=np.uint8)
    if seed is not None:
        rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


class Rank(WorkerHalf):
    """A worker of a fake engine."""

    def __init__(self, server: Server, rank: int, seed: int | None, alike: KVLayout) -> None:
        self.rows = cache(None if seed is None else seed + rank)
        store = CacheBlocks(self.rows, PLANES, BLOCKS, alike)
        self.open_worker(store, server.limits, server.key, rank)

    def block(self, number: int) -> bytes:
        return self.rows[number::BLOCKS].tobytes()


class Server(SchedulerHalf):
    """A fake engine: a scheduler and its workers, stepped by hand."""

    def __init__(self, seed: int | None = None, key: bytes = b"", ranks: int = 1,
                 layout: KVLayout | None = None, sends: bool = True, pulls: bool = True,
                 **limits: Any) -> None:  # fmt: skip
        self.key = key
        self.limits = TransferConfig(**({"timeout": 2 * SECOND} | limits))
        alike = layout or globals()["layout"]()
        self.ranks = [Rank(self, rank, seed, alike) for rank in range(ranks)]
        self.open_scheduler(SIZE, key, sends=sends, pulls=pulls)
        tickets = {n: rank.get_handshake_metadata() for n, rank in enumerate(self.ranks)}
        self.set_xfer_handshake_metadata(tickets)

    def step(self) -> None:
        work = self.build_connector_meta(None)
        for rank in self.ranks:
            rank.run(work)

    def until(self, kind: int, request: Any, rank: int = 0) -> set[int]:
        """Poll until a rank reports a request as sent (0) or received (1); its failed blocks."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = self.ranks[rank].get_finished(set())[kind]
            if found:
                assert found == {request.request_id}
                return self.ranks[rank].get_block_ids_with_load_errors()
            self.step()
            time.sleep(0.005)
        raise AssertionError(f"{request.request_id} is not reported")

    def prefill(self, request: Any, blocks: list[int]) -> dict[str, Any] | None:
        self.on_new_request(request)
        self.step()
        held, params = self.request_finished_all_groups(request, (blocks,))
        assert held == (params is not None)
        return params

    def admit(self, request: Any, blocks: list[int], computed: int = 0) -> int:
        """Look up and allocate, as vLLM's scheduler; return the external tokens."""
        count, load = self.get_num_new_matched_tokens(request, computed)
        assert load == (count > 0)
        self.update_state_after_alloc(request, Fake(get_block_ids=lambda: (blocks,)), count)
        self.step()
        return count or 0

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()


def request(name: str, params: dict[str, Any] | None, tokens: int = 100, **changes: Any) -> Any:
    ids = [(7 * i) % 1000 for i in range(tokens)]
    fields = {"request_id": name, "kv_transfer_params": params, "prompt_token_ids": ids,
              "prompt_embeds": None, "num_prompt_tokens": tokens, "num_computed_tokens": tokens,
              "cache_salt": None, "lora_request": None, "mm_features": [],
              "status": Fake(name="FINISHED_LENGTH_CAPPED")}  # fmt: skip
    return Fake(**(fields | changes))


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def build(*args: Any, **changes: Any) -> Server:
        servers.append(Server(*args, **changes))
        return servers[-1]

    yield build
    for server in servers:
        server.close()


SOURCE, TARGET = [3, 9, 4, 30, 11, 1, 20], [5, 6, 2, 8, 31, 0, 7]  # 100 tokens: 7 blocks


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("computed", [0, 2 * SIZE])
def test_a_prompt_arrives_with_its_partial_block(
    make: Any, backend: str, ranks: int, computed: int
) -> None:
    sender = make(1, KEY, ranks, backends=(backend,))
    receiver = make(None, KEY, ranks, backends=(backend,))
    held = request("p", ASK)
    params = sender.prefill(held, SOURCE)
    wanted = request("d", {**params, "remote_prefill_cached_tokens": 0})
    assert receiver.admit(wanted, TARGET, computed) == 100 - computed
    sender.step()
    for rank in range(ranks):
        assert receiver.until(1, wanted, rank) == set()
        sender.until(0, held, rank)
        for number, (one, other) in enumerate(zip(SOURCE, TARGET, strict=True)):
            same = sender.ranks[rank].block(one) == receiver.ranks[rank].block(other)
            assert same == (number >= computed // SIZE)
    assert receiver.admit(wanted, TARGET) == 0  # preempted later: it is computed


def test_a_receiver_that_comes_before_the_offer_waits_for_it(make: Any) -> None:
    sender, receiver = make(1), make()
    held = request("p", ASK)
    wanted = request("d", sender.prefill(held, SOURCE))
    receiver.admit(wanted, TARGET)
    time.sleep(0.3)
    assert receiver.ranks[0].get_finished(set()) == (None, None)
    sender.step()  # the next step's scheduler tells the worker
    assert receiver.until(1, wanted) == set()


@pytest.mark.parametrize("changes", [
    {"cache_salt": "b"}, {"lora_request": Fake(lora_name="l")}, {"prompt_token_ids": [1] * 100},
    {"prompt_token_ids": None}, {"prompt_embeds": torch.zeros(1)}, {"num_prompt_tokens": 99},
    {"mm_features": [Fake(identifier="i", mm_position=Fake(offset=0))]},
])  # fmt: skip
def test_a_ticket_is_for_its_prompt_salt_adapter_and_media(
    make: Any, changes: dict[str, Any]
) -> None:
    sender, receiver = make(1), make()
    held = request("p", ASK, cache_salt="a")
    params = sender.prefill(held, SOURCE)
    other = request("d", params, **({"cache_salt": "a"} | changes))
    assert receiver.admit(other, TARGET) == 0
    assert not receiver.ranks[0]._pulls
    sender.step()
    assert sender.ranks[0].get_finished(set()) == (None, None)  # held for whom it is for
    right = request("e", params, cache_salt="a")
    assert receiver.admit(right, TARGET) == 100
    assert receiver.until(1, right) == set()


@pytest.mark.parametrize("field", ["remote_port", "remote_num_tokens", "remote_last_hash"])
def test_a_ticket_of_another_fleet_or_altered_is_refused(make: Any, field: str) -> None:
    sender, receiver, foreign = make(1, KEY), make(None, KEY), make(None, b"x" * 32)
    params = sender.prefill(request("p", ASK), SOURCE)
    assert foreign.admit(request("d", params), TARGET) == 0
    [ticket] = params["tickets"]
    value = "0" * 32 if field == "remote_last_hash" else ticket[field] - 1
    forged = {**params, "tickets": [{**ticket, field: value}]}
    assert receiver.admit(request("d", forged), TARGET) == 0
    assert receiver.admit(request("e", params), TARGET) == 100


@pytest.mark.parametrize(
    "other", [{"layout": layout(digest="e")}, {"layout": layout(block_size=32)}, {"ranks": 2}]
)
def test_another_layout_is_refused_before_a_pull(make: Any, other: Any, caplog: Any) -> None:
    sender, receiver = make(1), make(None, **other)
    params = sender.prefill(request("p", ASK), SOURCE)
    assert receiver.admit(request("d", params), TARGET) == 0
    assert "same vLLM, model, dtype, block size and TP size" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def test_rubbish_is_computed_and_raises_nothing(make: Any) -> None:
    server = make()

    @given(st.dictionaries(st.sampled_from(["tickets", "do_remote_decode", "x"]), JSON))
    def refused(params: dict[str, Any]) -> None:
        wrong = request("d", {"do_remote_prefill": True, **params})
        assert server.admit(wrong, TARGET) == 0
        server.request_finished_all_groups(wrong, (TARGET,))

    refused()


def test_an_expired_lease_fails_every_block(make: Any) -> None:
    sender, receiver = make(1, lease=SECOND // 10), make()
    held = request("p", ASK)
    params = sender.prefill(held, SOURCE)
    sender.until(0, held)  # the blocks are free again
    wanted = request("d", params)
    assert receiver.admit(wanted, TARGET) == 100
    assert receiver.until(1, wanted) == set(TARGET)


def test_a_dead_sender_fails_every_block(make: Any) -> None:
    sender, receiver = make(1), make()
    params = sender.prefill(request("p", ASK), SOURCE)
    sender.close()
    wanted = request("d", params)
    receiver.admit(wanted, TARGET)
    assert receiver.until(1, wanted) == set(TARGET)


def test_a_corrupted_block_fails_with_those_after_it(make: Any) -> None:
    sender, receiver = make(1, backends=("tcp",)), make()
    held = request("p", ASK)
    params = sender.prefill(held, SOURCE)
    sender.step()
    offer = sender.ranks[0]._sender._book._offers["p"]
    assert offer.ready.wait(10)
    sender.ranks[0].rows[BLOCKS + SOURCE[4], 7] ^= 1
    wanted = request("d", params)
    receiver.admit(wanted, TARGET)
    assert receiver.until(1, wanted) == set(TARGET[4:])
    for one, other in zip(SOURCE[:4], TARGET[:4], strict=True):
        assert sender.ranks[0].block(one) == receiver.ranks[0].block(other)
    sender.until(0, held)


@pytest.mark.parametrize("case", ["aborted in the queue", "cached here", "aborted unseen"])
def test_an_unused_ticket_frees_the_senders_blocks(make: Any, case: str) -> None:
    sender, receiver = make(1), make()
    held = request("p", ASK)
    params = sender.prefill(held, SOURCE)
    sender.step()
    wanted = request("d", params, status=Fake(name="FINISHED_ABORTED"))
    if case == "cached here":
        assert receiver.admit(wanted, TARGET, computed=112) == 0
    elif case == "aborted in the queue":
        receiver.get_num_new_matched_tokens(wanted, 0)
    assert receiver.request_finished_all_groups(wanted, ([],)) == (False, None)
    receiver.step()
    sender.until(0, held)


def test_a_request_aborted_in_its_pull_is_received_once(make: Any) -> None:
    sender, receiver = make(1), make()
    held = request("p", ASK)
    wanted = request("d", sender.prefill(held, SOURCE), status=Fake(name="FINISHED_ABORTED"))
    receiver.admit(wanted, TARGET)  # the sender does not know of the offer yet: the pull waits
    assert receiver.request_finished_all_groups(wanted, (TARGET,)) == (False, None)
    receiver.step()
    sender.step()
    assert receiver.until(1, wanted) == set(TARGET)
    sender.until(0, held)
    assert receiver.ranks[0].get_finished(set()) == (None, None)
    assert wanted.request_id not in receiver._tickets


@pytest.mark.parametrize("changes", [
    {"status": Fake(name="FINISHED_ABORTED")}, {"prompt_embeds": torch.zeros(1)},
    {"kv_transfer_params": None}, {"kv_transfer_params": {"do_remote_decode": "yes"}},
])  # fmt: skip
def test_other_ends_hold_no_blocks(make: Any, changes: dict[str, Any]) -> None:
    sender = make(1)
    ended = request("p", ASK, **changes)
    assert sender.prefill(ended, SOURCE) is None
    sender.step()
    assert sender.ranks[0]._sender.held == 0
    assert not sender.ranks[0]._sender._book._expected


def test_a_role_is_kept(make: Any) -> None:
    producer, consumer = make(1, pulls=False), make(1, sends=False)
    params = producer.prefill(request("p", ASK), SOURCE)
    assert consumer.prefill(request("c", ASK), SOURCE) is None
    assert producer.admit(request("q", params), TARGET) == 0
    assert consumer.admit(request("d", params), TARGET) == 100


class NoCUDA:
    """Streams that do at once what is queued."""

    def Stream(self, device: torch.device) -> NoCUDA:
        return self

    def default_stream(self, device: torch.device) -> None: ...

    def wait_stream(self, other: None) -> None: ...

    def stream(self, other: NoCUDA) -> nullcontext[None]:
        return nullcontext()

    def record_event(self) -> NoCUDA:
        return self

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("planes", [1, 3])
def test_a_cache_on_host_and_on_a_device_are_read_and_written_alike(planes: int) -> None:
    cache = torch.zeros(planes * BLOCKS * 256, dtype=torch.int8).view(torch.bfloat16)
    view = cache[8:].view(-1, 4)  # a layer's view begins anywhere in the storage
    host = rows_in_storage(view, 256)
    alike = layout(block_bytes=planes * 256)
    device = DeviceCopies(torch.from_numpy(host), NoCUDA())
    stores = [CacheBlocks(rows, planes, BLOCKS, alike) for rows in (host, device)]
    ids = np.array([4, 0, 31, 9], dtype=np.int32)
    data = np.random.default_rng(0).integers(0, 256, (4, planes * 256), dtype=np.uint8)
    for store in stores:
        store.write(ids, data)
        assert all((other.read(ids) == data).all() for other in stores)
        flat = cache.view(torch.uint8).numpy().reshape(planes, BLOCKS, 256)
        assert (flat[:, 31].reshape(-1) == data[2]).all()
        store.write(ids, np.zeros_like(data))
        assert not flat.any()


@pytest.mark.parametrize(("extra", "words"), [
    ({"hosts": "x"}, "unknown field `hosts`; fields are host, port"),
    ({"backends": ["rdma"]}, "backends is"), ({"host": "0.0.0.0"}, "advertise"),
    ({"lease_s": 0}, "lease"), ({"timeout_s": float("nan")}, "NaN"), ({"port": "x"}, "port"),
])  # fmt: skip
def test_a_wrong_field_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as error:
        ConnectorConfig.read(extra)
    assert words in str(error.value)


def test_ranks_take_consecutive_ports() -> None:
    config = ConnectorConfig.read({"port": 7000, "lease_s": 400})
    assert [config.transfer(rank).port for rank in range(3)] == [7000, 7001, 7002]
    assert config.transfer(0).lease == 400 * SECOND
    assert ConnectorConfig.read({}).transfer(1).port == 0


def test_threads_of_transfers_are_not_pinned_as_the_worker_is(make: Any) -> None:
    wide = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(wide)])
        before = {thread.native_id for thread in threading.enumerate()}
        make(1)
        started = [t.native_id for t in threading.enumerate() if t.native_id not in before]
        assert os.sched_getaffinity(0) == {min(wide)}
        assert len(started) >= 4
        assert all(os.sched_getaffinity(number or 0) == wide for number in started)
    finally:
        os.sched_setaffinity(0, wide)


def test_reasons_reach_the_log_with_the_request(make: Any, caplog: Any) -> None:
    sender, receiver = make(1), make()
    params = sender.prefill(request("p", ASK), SOURCE)
    receiver.admit(request("d", params, cache_salt="x"), TARGET)
    assert "d computes its prompt, its ticket is refused" in caplog.text
    assert TransferReason.OTHER_PROMPT in caplog.text
