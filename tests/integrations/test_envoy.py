"""A real Envoy asks `pigou epp` before real workers: streams, shedding, failures, replicas, P/D."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.envoys import Answer, Picker, Proxy, Stack, ask, get, stack, until
from tests.integrations.inference_pools import DEFINITION, inference_pool, pod
from tests.lib.fake_kubernetes import FakeKubernetes
from tests.lib.server_process import ServerProcess, nats_server

PROMPT = [4 + i % 90 for i in range(200)]
BODY: dict[str, Any] = {
    "model": "tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip
STREAM = BODY | {"stream": True}
DUPLEX = {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("envoy"), model_folder) as made:
        yield made


@pytest.fixture(scope="module")
def workers(run: Stack) -> list[ServerProcess]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda _: run.worker(), range(2)))


def listed(run: Stack, *entries: dict[str, Any]) -> Path:
    """Write a pool's file."""
    path = run.folder / f"pool-{len(run.started)}.json"
    path.write_text(json.dumps({"endpoints": list(entries)}))
    return path


@pytest.fixture(scope="module")
def picker(run: Stack, workers: list[ServerProcess]) -> Picker:
    made = run.picker("--pool", str(listed(run, *({"url": worker.url} for worker in workers))))
    until(lambda: len(made.ups()) == 2)
    return made


@pytest.fixture(scope="module")
def open_proxy(run: Stack, workers: list[ServerProcess], picker: Picker) -> Proxy:
    return run.proxy([picker], workers)


@pytest.fixture(scope="module")
def duplex_proxy(run: Stack, workers: list[ServerProcess], picker: Picker) -> Proxy:
    return run.proxy([picker], workers, **DUPLEX)


@pytest.fixture(params=["buffered", "duplex"])
def proxy(request: pytest.FixtureRequest, open_proxy: Proxy, duplex_proxy: Proxy) -> Proxy:
    return open_proxy if request.param == "buffered" else duplex_proxy


def served(worker: ServerProcess) -> float:
    """Return the requests that a worker has finished."""
    return sum(float(line.rpartition(" ")[2]) for line in get(worker.url, "/metrics").splitlines()
               if line.startswith("vllm:request_success_total"))  # fmt: skip


def test_streams_pass_token_by_token(proxy: Proxy, workers: list[ServerProcess]) -> None:
    alone = ask(workers[0].url, BODY)
    answer = ask(proxy.url, STREAM)
    assert (answer.status, answer.tokens) == (200, alone.tokens)
    assert len(answer.arrivals) >= 12
    gaps = [
        after - before for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    assert sum(gap > 0.01 for gap in gaps) >= 9, gaps  # one token a step of 20 ms


def test_requests_land_where_the_picker_says(
    proxy: Proxy, picker: Picker, workers: list[ServerProcess]
) -> None:
    before = [served(worker) for worker in workers]
    with ThreadPoolExecutor() as pool:
        bodies = [BODY | {"prompt": [5 + number] * 40} for number in range(8)]
        answers = list(pool.map(lambda body: ask(proxy.url, body), bodies))
    assert {answer.status for answer in answers} == {200}
    said = [answer.headers["x-pigou-worker"] for answer in answers]
    urls = {row["id"]: url for url, row in picker.rows().items()}
    for worker, count in zip(workers, before, strict=True):
        assert served(worker) - count == sum(urls[id] == worker.url for id in said)
    assert len(set(said)) == 2, "eight requests at once are spread"


def test_a_large_prompt_passes_whole(proxy: Proxy) -> None:
    text = "one two three " * 90_000  # more than a buffer of a proxy's default
    answer = ask(proxy.url, BODY | {"prompt": text})
    assert answer.status == 400, "the worker's own answer: longer than its context"
    assert "x-pigou-worker" in answer.headers


def test_the_picker_s_headers_are_not_the_client_s(proxy: Proxy) -> None:
    dead = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-prefiller-host-port": "127.0.0.1:1"}
    answer = ask(proxy.url, BODY, dead)
    assert answer.status == 200  # a worker without --prefiller-networks refuses that header
    assert answer.tokens


def test_shedding_arrives_as_429(run: Stack, workers: list[ServerProcess]) -> None:
    limits = ("--max-inflight", "1", "--max-queued", "1")
    tight = run.picker(*limits, *(x for worker in workers for x in ("--attach", worker.url)))
    until(lambda: len(tight.ups()) == 2)
    proxy = run.proxy([tight], workers)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(proxy.url, STREAM | {"max_tokens": 40}), range(8)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == 3, "two run, and one waits"
    for answer in answers:
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json["error"]["message"]
        else:
            assert len(answer.tokens) == 40


def test_a_file_s_changes_reach_the_proxy(run: Stack, workers: list[ServerProcess]) -> None:
    path = listed(run, {"url": workers[0].url})
    made = run.picker("--pool", str(path))
    until(lambda: len(made.ups()) == 1)
    proxy = run.proxy([made], workers)
    path.write_text('{"endpoints": [{"url": "nonsense"}]}')
    path.write_text('{"endpoints": [{"url": "' + workers[1].url + '"}]}')
    until(lambda: made.ups() == {workers[1].url})
    before = served(workers[1])
    assert ask(proxy.url, BODY).status == 200
    assert served(workers[1]) == before + 1


async def test_ready_pods_of_an_inference_pool_are_served_and_deleted_ones_drained(
    run: Stack, workers: list[ServerProcess]
) -> None:
    first, port = workers[0], workers[0].port
    await asyncio.to_thread(run.worker, "--host", "127.0.0.2", port=port)
    second = ServerProcess([], f"http://127.0.0.2:{port}", port, run.folder / "none")
    async with FakeKubernetes() as api:
        api.store.put(DEFINITION)
        api.store.put(inference_pool({"app": "vllm"}, port))
        api.store.put(pod("a", "127.0.0.1"))
        api.store.put(pod("b", "127.0.0.2", ready=False))
        made = await asyncio.to_thread(
            run.picker, "--pool", f"k8s://default/chat?api={api.url}", "--drain", "20"
        )

        async def ups(urls: set[str]) -> None:
            await asyncio.to_thread(until, lambda: made.ups() == urls)

        await ups({first.url})
        api.store.put(pod("b", "127.0.0.2"))
        await ups({first.url, second.url})
        proxy = await asyncio.to_thread(run.proxy, [made], [first, second])
        began = threading.Event()
        streams = [
            asyncio.create_task(asyncio.to_thread(
                ask, proxy.url, STREAM | {"max_tokens": 100}, on_chunk=lambda count: began.set()
            )) for _ in range(2)
        ]  # fmt: skip
        await asyncio.to_thread(began.wait, 20)
        await asyncio.to_thread(until, lambda: _decoding(made) == 2)
        leaving = pod("a", "127.0.0.1")
        leaving["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["t/t"]}
        api.store.put(leaving)
        await ups({second.url})
        bodies = [BODY | {"prompt": [7 + number] * 40, "max_tokens": 2} for number in range(3)]
        answers = [await asyncio.to_thread(ask, proxy.url, body) for body in bodies]
        assert {answer.headers["x-pigou-worker"] for answer in answers} == {"b"}
        assert {row["state"] for row in made.rows().values()} == {"up", "draining"}
        assert [len((await stream).tokens) for stream in streams] == [100, 100]
        await asyncio.to_thread(until, lambda: set(made.rows()) == {second.url})


def test_a_fleet_s_registered_workers_are_asked_with_its_secret(
    run: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIGOU_FLEET_SECRET", "s" * 32)
    registry = f"file://{run.folder}/registry"
    worker = run.worker("--registry", registry)
    made = run.picker("--registry", registry)
    until(lambda: made.ups() == {worker.url})
    proxy = run.proxy([made], [worker])
    assert ask(worker.url, BODY).status == 401
    assert len(ask(proxy.url, STREAM).tokens) == 12
    claims = {"x-pigou-fleet-tenant": "another", "x-gateway-inference-fairness-id": "team"}
    assert ask(proxy.url, BODY, claims).status == 200
    for path in ("/limits", "/v1/kv/offer", "//limits", "/v1/completions/../../limits"):
        assert ask(proxy.url, BODY, path=path).status in (401, 404), path


def test_a_dead_worker_s_requests_go_to_the_next_endpoint(
    run: Stack, workers: list[ServerProcess], picker: Picker, open_proxy: Proxy
) -> None:
    urls = {row["id"]: url for url, row in picker.rows().items()}
    for attempt in range(4):
        body = BODY | {"prompt": [60 + attempt] * 160}
        chosen = ask(open_proxy.url, body).headers["x-pigou-worker"]
        dead = next(worker for worker in workers if worker.url == urls[chosen])
        dead.kill()
        (other,) = (worker for worker in workers if worker is not dead)
        loads: list[int] = []

        def note(count: int, url: str = other.url, loads: list[int] = loads) -> None:
            if count == 4:
                loads.append(picker.rows()[url]["decode_requests"])

        answer = ask(open_proxy.url, body | {"stream": True}, on_chunk=note)  # cached there
        dead.start()
        assert answer.status == 200, answer.body
        assert len(answer.tokens) == 12
        assert loads == [1], "the request weighs on the worker that serves it"
        until(lambda: len(picker.ups()) == 2)
        if answer.headers["x-pigou-worker"] == chosen:  # the picker did not know yet
            assert open_proxy.stat("cluster.workers.upstream_rq_retry_success") >= 1
            return
    raise AssertionError("the picker saw each death before the next request")


def test_a_picker_that_is_killed_ends_no_stream_and_serves_again(
    run: Stack, workers: list[ServerProcess], picker: Picker, open_proxy: Proxy,
    duplex_proxy: Proxy,
) -> None:  # fmt: skip
    """FailOpen; with FailClose, or bodies that the picker holds, Envoy itself cuts them."""
    closed = run.proxy([picker], workers, failure_mode_allow=False)
    begun = threading.Barrier(4)

    def stream(proxy: Proxy) -> Answer:
        def note(count: int) -> None:
            if count == 4:
                begun.wait(20)

        return ask(proxy.url, STREAM | {"max_tokens": 60}, on_chunk=note)

    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(stream, proxy) for proxy in (open_proxy, closed, duplex_proxy)]
        begun.wait(20)
        picker.server.kill()
        whole, *cut = (one.result() for one in streams)
    assert len(whole.tokens) == 60
    assert [answer.whole for answer in cut] == [False, False]
    for _ in range(3):
        answer = ask(open_proxy.url, STREAM)
        assert (answer.status, len(answer.tokens)) == (200, 12)
        assert "x-pigou-worker" not in answer.headers
        assert ask(closed.url, STREAM).status == 500
    picker.server.start()
    until(lambda: len(picker.ups()) == 2)
    for proxy in (open_proxy, closed, duplex_proxy):
        until(lambda: "x-pigou-worker" in ask(proxy.url, BODY).headers)  # noqa: B023
        assert len(ask(proxy.url, STREAM).tokens) == 12


@pytest.mark.slow
def test_replicas_share_their_load(
    run: Stack, workers: list[ServerProcess], tmp_path: Path
) -> None:
    pytest.importorskip("nats", reason="the extra nats is not installed")
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with nats_server(tmp_path) as nats:
        attach = [x for worker in workers for x in ("--attach", worker.url)]
        with ThreadPoolExecutor() as pool:
            peers = ("--peers", nats.url, "--fleet-secret-file", str(secret))
            both = list(pool.map(lambda _: run.picker(*peers, *attach), range(2)))
        until(lambda: all(len(each.ups()) == 2 for each in both))
        first, second = (run.proxy([each], workers) for each in both)
        until(lambda: all(_peers(each) == 1 for each in both))
        running = threading.Event()
        with ThreadPoolExecutor() as pool:
            streams = [
                pool.submit(ask, first.url, STREAM | {"max_tokens": 150}, None,
                            on_chunk=lambda count: running.set()) for _ in range(3)
            ]  # fmt: skip
            assert running.wait(20)
            until(lambda: _decoding(both[1]) == 3, 10)
            # The less busy worker is known to the replica that sent it nothing.
            loads = {url: row["decode_requests"] for url, row in both[1].rows().items()}
            one = ask(second.url, BODY | {"prompt": [99] * 64, "max_tokens": 1})
            ids = {row["id"]: url for url, row in both[1].rows().items()}
            assert loads[ids[one.headers["x-pigou-worker"]]] == min(loads.values())
            assert all(len(stream.result().tokens) == 150 for stream in streams)
        until(lambda: _decoding(both[0]) == _decoding(both[1]) == 0, 10)


def _peers(picker: Picker) -> int:
    return len((get(picker.status, "/health") or {}).get("peers", {}).get("peers", ()))


def _decoding(picker: Picker) -> int:
    return sum(row["decode_requests"] for row in picker.rows().values())


def test_the_prefiller_that_is_picked_reaches_the_decode_worker(run: Stack) -> None:
    with ThreadPoolExecutor() as pool:
        options = [
            ("--role", "prefill"),
            ("--role", "decode", "--prefiller-networks", "127.0.0.0/8"),
        ]
        prefill, decode = pool.map(lambda given: run.worker(*given), options)
    path = listed(
        run, {"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}
    )
    made = run.picker("--pool", str(path), "--policy", "least-loaded")  # it splits every prompt
    until(lambda: len(made.ups()) == 2)
    proxy = run.proxy([made], [prefill, decode])
    alone = ask(prefill.url, BODY | {"cache_salt": "alone"})
    answer = ask(proxy.url, STREAM | {"stream_options": {"include_usage": True}})
    assert answer.tokens == alone.tokens
    assert answer.headers["x-pigou-prefilled-by"] == prefill.url.removeprefix("http://")
    assert answer.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    prefill.kill()
    answer = ask(proxy.url, BODY | {"prompt": PROMPT[::-1]})
    assert answer.status == 200
    assert answer.headers.get("x-pigou-prefilled-by", "local") == "local"


@pytest.mark.slow
def test_a_model_s_tokens_are_the_same_through_the_proxy(run: Stack, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.e2e.conftest import REAL, SHAPE

    from tools.make_random_checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "tiny", SHAPE, dtype="float32")
    real = run.worker(*REAL, "--served-model-name", "tiny", model=str(tmp_path / "tiny"))
    made = run.picker("--attach", real.url)
    until(lambda: len(made.ups()) == 1)
    proxy = run.proxy([made], [real], **DUPLEX)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    alone = ask(real.url, body)
    streamed = ask(proxy.url, body | {"stream": True})
    assert streamed.tokens == alone.tokens
    assert ask(proxy.url, body).tokens == alone.tokens
