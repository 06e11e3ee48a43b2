"""PigouConnector in real vLLM servers: same tokens as one server's, whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.client import Endpoint
from tests.e2e.fleet import Fleet
from tests.worker.kv_transfer.transfer_stand import Proxy

from benchmarks.lib.peers import VllmPair, pigou_connector, python_path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK, LEASE_S = 32, 45.0
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def test_the_connector_keeps_the_installed_engines_contract(
    vllm_venv: Path, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("vllm_connector_contract.py")
    done = subprocess.run(
        [str(vllm_venv / "bin" / "python"), str(script)],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "contract holds" in done.stdout


class Pair:
    """The pair, and what one server says alone."""

    def __init__(self, pair: VllmPair) -> None:
        self.servers = pair
        self.prefill, self.decode = Endpoint(pair.prefill), Endpoint(pair.decode)
        self._asked = 0

    def body(self, size: int = 200, **fields: Any) -> dict[str, Any]:
        """A prompt that was never asked."""
        self._asked += 1
        tokens = [6 + (self._asked * 131 + i * 17) % 1900 for i in range(size)]
        return {"prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **fields}  # fmt: skip

    def leg_one(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.prefill.complete(**{**body, "max_tokens": 1, "kv_transfer_params": ASK})
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    def pulled(self) -> float:
        name = "vllm:prompt_tokens_by_source_total"
        return self.decode.metric(name, source="external_kv_transfer")

    def leg_two(self, body: dict[str, Any], params: dict[str, Any], **fields: Any) -> float:
        """Decode, compare with one server alone; return the tokens that were pulled."""
        before = self.pulled()
        answer = self.decode.complete(**{**body, "kv_transfer_params": params, **fields})
        pulled = self.pulled() - before
        alone = self.decode.complete(**{**body, "cache_salt": f"alone{self._asked}"})
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        return pulled


@pytest.fixture(scope="module")
def pair(
    vllm_venv: Path, peer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm-connector")
    config = pigou_connector(lease_s=LEASE_S, timeout_s=20.0)
    servers = VllmPair.start(
        peer_model, folder, f"--block-size {BLOCK} {config}", 900,
        {"PYTHONPATH": python_path(folder / "links"), "WAIT": "800"},
    )  # fmt: skip
    yield Pair(servers)
    servers.stop()


@pytest.mark.parametrize("size", [192, 200, 1500])
def test_prompts_are_pulled_whole(pair: Pair, size: int) -> None:
    body = pair.body(size)
    assert pair.leg_two(body, pair.leg_one(body)) == size


def test_what_is_cached_is_not_pulled(pair: Pair) -> None:
    body = pair.body(200)
    pair.decode.complete(**{**body, "prompt": body["prompt"][:100]})
    assert pair.leg_two(body, pair.leg_one(body)) == 200 - 3 * BLOCK


def test_a_salt_is_kept_and_another_pulls_nothing(pair: Pair) -> None:
    body = pair.body(200, cache_salt="tenant a")
    assert pair.leg_two(body, pair.leg_one(body)) == 200
    body = pair.body(200, cache_salt="tenant a")
    assert pair.leg_two(body, pair.leg_one(body), cache_salt="tenant b") == 0


def test_an_expired_lease_is_computed(pair: Pair) -> None:
    body = pair.body(200)
    params = pair.leg_one(body)
    time.sleep(LEASE_S + 1)
    pair.leg_two(body, params)
    log = (pair.servers.run_dir / "decode.log").read_text(errors="replace")
    assert "Recovered from KV load failure: 1 request(s) rescheduled (200 tokens" in log


def test_a_corrupted_or_cut_transfer_is_computed(pair: Pair) -> None:
    def corrupted(offset: int, data: bytes) -> bytes:
        wrong = bytearray(data)
        wrong[-1] ^= 1
        return bytes(wrong) if offset > 20_000 else data

    def cut(offset: int, data: bytes) -> bytes | None:
        return None if offset > 20_000 else data

    for alter, word in ((corrupted, "checksum_mismatch"), (cut, "connection_lost")):
        body = pair.body(1000)
        params = pair.leg_one(body)
        [ticket] = params["tickets"]
        with closing(Proxy(ticket["remote_port"], alter)) as proxy:
            altered = {**ticket, "remote_port": proxy.port, "remote_backends": ["tcp"]}
            pair.leg_two(body, {**params, "tickets": [altered]})
        log = (pair.servers.run_dir / "decode.log").read_text(errors="replace")
        assert word in log


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_runs_both_legs(
    pair: Pair, stream: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    attach = [f"{pair.servers.prefill},role=prefill,events={pair.servers.prefill_events}",
              f"{pair.servers.decode},role=decode,events={pair.servers.decode_events}"]  # fmt: skip
    watch = {"timeout": 30.0, "failures": 10, "hang": 300.0}
    fleet = Fleet.start(tmp_path_factory.mktemp("gateway") / "log", attach=attach, watch=watch)
    try:
        fleet.recovered()
        body, before = pair.body(200), pair.pulled()
        if stream:
            tokens = fleet.stream(**body).tokens
        else:
            tokens = fleet.complete(**body)["choices"][0]["token_ids"]
        assert pair.pulled() - before == 200
        alone = pair.decode.complete(**{**body, "cache_salt": "alone"})
        assert tokens == alone["choices"][0]["token_ids"]
    finally:
        fleet.stop()


def test_a_killed_prefill_server_is_computed(pair: Pair) -> None:
    body = pair.body(200)
    params = pair.leg_one(body)
    pids = (pair.servers.run_dir / "pids").read_text().split()
    os.killpg(int(pids[pids.index("prefill") + 1]), signal.SIGKILL)
    time.sleep(1)
    pair.leg_two(body, params)
    log = (pair.servers.run_dir / "decode.log").read_text(errors="replace")
    assert any(word in log for word in ("sender_unreachable", "connection_lost"))
