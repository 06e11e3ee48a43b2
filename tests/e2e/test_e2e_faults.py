"""Workers die, hang, and lose each other; streams go on, and nothing leaks."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.e2e.client import SECRET, Streamed
from tests.e2e.fleet import Fleet, alive

from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.prefill_decode_legs import leg_one, leg_two
from pigou.worker.kv_transfer.transfer_params import TransferParams, signed

LONG = [6 + i % 900 for i in range(800)]  # 0.4 s of prompt for the sleeping prefill worker


def body(prompt: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt or LONG, "max_tokens": 12, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True, **fields}  # fmt: skip


def salted(fleet: Fleet) -> dict[str, Any]:
    """A body whose prompt nobody has cached."""
    return body(cache_salt=f"{time.monotonic_ns()}")


@pytest.fixture(scope="module")
def expected(sleeping: Fleet) -> tuple[Any, ...]:
    return sleeping.stream(**body()).told


def begin(fleet: Fleet, pool: ThreadPoolExecutor, law: Any, **fields: Any) -> Future[Streamed]:
    """Begin a stream, and wait until something holds of the fleet; a busy machine may miss it."""
    for _ in range(20):
        future = pool.submit(fleet.stream, **(salted(fleet) | fields))
        while not future.done():
            if law(fleet.rows()):
                return future
            time.sleep(0.02)
    raise AssertionError(f"it never held\n{fleet.tail()}")


def in_leg_one(rows: dict[str, Any]) -> bool:
    return bool(rows["prefill-0"]["prefill_requests"])


def decodes(rows: dict[str, Any]) -> bool:
    return any(row["running"] and row["role"] == "decode" for row in rows.values())


def test_a_prefill_worker_killed_during_leg_one_costs_no_token(
    sleeping: Fleet, expected: tuple[Any, ...]
) -> None:
    with ThreadPoolExecutor() as pool:
        future = begin(sleeping, pool, in_leg_one)
        pid = sleeping.signal("prefill-0")
        assert future.result().told == expected
    sleeping.recovered([pid])
    before = sleeping.worker("prefill-0").metric("pigou_engine_steps_total")
    assert sleeping.stream(**salted(sleeping)).told == expected
    assert sleeping.worker("prefill-0").metric("pigou_engine_steps_total") > before
    sleeping.settle()


@pytest.mark.parametrize(
    "tokens", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 11))]
)
def test_a_stream_of_a_killed_decode_worker_goes_on_at_the_other(
    sleeping: Fleet, expected: tuple[Any, ...], tokens: int
) -> None:
    pid, final = 0, None
    for final in sleeping.follow(**salted(sleeping)):
        if len(final.tokens) >= tokens and not pid:
            name = next(n for n, r in sleeping.rows().items()
                        if r["role"] == "decode" and r["decode_requests"])  # fmt: skip
            pid = sleeping.signal(name)
    assert final is not None
    assert final.told == expected
    sleeping.recovered([pid])
    sleeping.settle()


@pytest.mark.slow
def test_a_decode_worker_killed_before_the_first_token_costs_none(
    sleeping: Fleet, expected: tuple[Any, ...]
) -> None:
    with ThreadPoolExecutor() as pool:
        future = begin(sleeping, pool, in_leg_one)
        name = next(n for n, r in sleeping.rows().items() if r["decode_requests"])
        pid = sleeping.signal(name)
        assert future.result().told == expected
    sleeping.recovered([pid])
    sleeping.settle()


@pytest.mark.slow
def test_a_reply_that_is_not_streamed_is_made_again(
    sleeping: Fleet, expected: tuple[Any, ...]
) -> None:
    with ThreadPoolExecutor() as pool:
        future = pool.submit(sleeping.complete, **salted(sleeping))
        sleeping.wait(lambda rows: decodes(rows) or future.done())
        name = next(n for n, r in sleeping.rows().items() if r["role"] == "decode")
        pid = sleeping.signal(name)
        choice = future.result()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == expected[:2]
    sleeping.recovered([pid])
    sleeping.settle()


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
def test_a_worker_that_hangs_is_replaced_and_its_stream_goes_on(
    sleeping: Fleet, expected: tuple[Any, ...], victim: str
) -> None:
    pid = sleeping.signal(victim, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(sleeping.stream, **salted(sleeping)) for _ in range(4)]:
            assert future.result().told == expected
    sleeping.recovered([pid])
    sleeping.settle()


def test_a_prefill_worker_that_dies_between_the_legs_costs_no_token(
    sleeping: Fleet, expected: tuple[Any, ...]
) -> None:
    first, second = sleeping.worker("prefill-0"), sleeping.worker("decode-0")
    asked = salted(sleeping)
    ticket = first.complete(**leg_one(asked, chat=False))["kv_transfer_params"]
    pid = sleeping.signal("prefill-0")
    reply = second.complete(**leg_two(asked, ticket))
    assert reply["choices"][0]["token_ids"] == expected[1]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    sleeping.recovered([pid])
    sleeping.settle()


def test_a_lease_that_expires_before_the_pull_costs_no_token(
    sleeping: Fleet, expected: tuple[Any, ...]
) -> None:
    first, second = sleeping.worker("prefill-0"), sleeping.worker("decode-0")
    asked = salted(sleeping)
    ticket = first.complete(**leg_one(asked, chat=False))["kv_transfer_params"]
    first.settle()  # the lease is over: the blocks are free again
    before = second.metric("pigou_kv_blocks_received_total")
    reply = second.complete(**leg_two(asked, ticket))
    assert reply["choices"][0]["token_ids"] == expected[1]
    assert second.metric("pigou_kv_blocks_received_total") == before
    sleeping.settle()


class Cut(threading.Thread):
    """Stands before a side channel; cuts the connection after so many bytes of it."""

    def __init__(self, address: tuple[str, int], most: int) -> None:
        super().__init__(daemon=True)
        self.address, self.most, self.passed = address, most, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.address)
            threading.Thread(target=self.pump, args=(near, far, None), daemon=True).start()
            self.pump(far, near, self.most)

    def pump(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        try:
            while data := source.recv(4096 if most is None else min(4096, most - self.passed)):
                sink.sendall(data)
                if most is not None:
                    self.passed += len(data)
                    if self.passed >= most:
                        break
        except OSError:
            pass  # the other direction was cut
        for each in (source, sink):
            each.close()


@pytest.mark.parametrize(
    "most", [20_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 200, 150_000))]
)
def test_a_transfer_that_is_cut_in_the_middle_changes_no_token(real: Fleet, most: int) -> None:
    first, second = real.worker("prefill-0"), real.worker("decode-tcp")
    asked = body(LONG[:400], cache_salt=f"cut{most}")
    expected = second.complete(**asked | {"cache_salt": "whole"})["choices"][0]["token_ids"]
    ticket = first.complete(**leg_one(asked, chat=False))["kv_transfer_params"]
    cut = Cut((ticket["remote_host"], ticket["remote_port"]), most)
    cut.start()
    moved = msgspec.convert(ticket | {"remote_port": cut.port}, TransferParams)
    moved = signed(moved, FleetSecret(SECRET).key("kv-transfer"))
    reply = second.complete(**leg_two(asked, moved.to_params()))
    cut.listener.close()
    assert cut.passed == most, "the cut came too late"
    assert reply["choices"][0]["token_ids"] == expected
    second.settle()
    first.settle()


@pytest.mark.parametrize("when", ["in leg one", "while it streams", "at once"])
def test_a_client_that_leaves_frees_everything(sleeping: Fleet, when: str) -> None:
    before = sleeping.metric("pigou_requests_cancelled_total")
    for stream in (True, False):
        connection = sleeping.connect()
        asked = salted(sleeping) | {"max_tokens": 1000, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(asked),
                           {"content-type": "application/json"})  # fmt: skip
        if when == "in leg one":  # which a busy machine may miss
            sleeping.wait(lambda rows: in_leg_one(rows) or decodes(rows))
        elif when == "while it streams":
            sleeping.wait(decodes)
        connection.close()
    sleeping.wait(lambda rows: not any(r["decode_requests"] for r in rows.values()))
    sleeping.settle()
    assert sleeping.metric("pigou_requests_cancelled_total") == before + 2


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_no_worker_outlives_a_gateway_that_is_killed(
    start_fleet: Callable[..., Fleet], early: bool
) -> None:
    options = ("--executor", "sleep", "--blocks", "64")
    fleet = start_fleet(["prefill-0", "decode-0"], *options)
    if early:  # a worker that has only just been started dies with its gateway, too
        fleet.signal("decode-0")
        fleet.wait(lambda rows: rows["decode-0"]["state"] == "starting")
        fleet.wait(lambda rows: rows["decode-0"]["pid"] != 0)
    fleet.note()
    assert len([p for p in fleet.seen.values() if alive(p)]) >= 2
    fleet.process.kill()
    fleet.process.wait()
    fleet.gone(files=not early)


def test_the_command_line_starts_a_fleet_that_serves_and_ends_it(
    checkpoint: Any, tmp_path: Any
) -> None:
    """`pigou serve` itself: banner, requests, an orderly end."""
    command = [sys.executable, "-m", "pigou", "serve", "--model", str(checkpoint), "--port", "0",
               "--served-model-name", "tiny", "--prefill", "1", "--decode", "1",
               "--", "--executor", "sleep", "--blocks", "256"]  # fmt: skip
    fleet = Fleet.run(command, tmp_path / "log")
    assert fleet.get("/v1/models").json["data"][0]["id"] == "tiny"
    assert fleet.stream(**body(), model="tiny").told[2] == "length"
    assert fleet.get("/health").status == 200
    assert b"<html" in fleet.get("/").body.lower()
    fleet.settle()
    fleet.stop()
