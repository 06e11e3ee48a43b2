"""A worker whose stores fail goes on, says so, and uses them again when they are back."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tiered_worker import PROMPTS, TieredWorker, caches, until

SERVER = Path(__file__).parents[1] / "runtime" / "kv_offload" / "s3_server.py"


def test_a_full_disk_takes_no_more_and_recovers(
    texts: list[str], tmp_path: Path, begin: Callable[..., TieredWorker]
) -> None:
    worker = begin(*caches(tmp_path / "disk"))
    pid = worker.worker.process.pid
    least, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, most))  # as if there were no room

    def asked() -> str:
        assert worker.texts(PROMPTS) == texts
        return str(worker.health()["status"])

    until(lambda: asked() == "degraded")
    disk = worker.health()["tiers"]["disk"]
    assert not disk["up"]
    assert "written" in disk["reason"]
    assert worker.figure("up", "disk") == 0
    assert worker.figure("up", "host") == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (least, most))
    until(lambda: asked() == "ok" and worker.figure("stored_blocks", "disk") > 0)
    assert worker.figure("up", "disk") == 1


def test_a_removed_folder_is_missed_until_it_is_back(
    texts: list[str], tmp_path: Path, begin: Callable[..., TieredWorker]
) -> None:
    folder = tmp_path / "disk"
    worker = begin(*caches(folder))
    assert worker.texts(PROMPTS) == texts
    until(lambda: worker.figure("stored_blocks", "disk") > 0)
    shutil.rmtree(folder)
    seen = iter(range(PROMPTS, 10_000))

    def asked() -> str:
        worker.ask(next(seen))  # a new prompt, so that there is something to be written
        assert worker.texts(PROMPTS) == texts
        return str(worker.health()["status"])

    until(lambda: asked() == "degraded")
    assert str(folder) in worker.health()["tiers"]["disk"]["reason"]
    folder.mkdir()
    until(lambda: asked() == "ok" and any(folder.glob("*.pigou-kv")))
    assert "files were removed" in worker.log.read_text()


@pytest.mark.slow  # it waits for breakers to open and to close
def test_a_dead_object_storage_is_a_miss_until_it_is_back(
    texts: list[str], begin: Callable[..., TieredWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"

        def answers(mode: str) -> None:
            request = urllib.request.Request(f"{url}/-/{mode}", method="POST")
            urllib.request.urlopen(request, timeout=60).close()

        worker = begin(
            "--tier", f"bucket=32MiB@s3://test/kv?endpoint={url}&region=us-east-1,policy=lru"
        )  # fmt: skip

        seen = iter(range(PROMPTS, 10_000))

        def asked() -> str:
            worker.ask(next(seen))  # a new prompt, so that there is something to be written
            assert worker.texts(PROMPTS) == texts
            return str(worker.health()["status"])

        until(lambda: asked() == "ok" and worker.figure("stored_blocks", "bucket") > 0)
        answers("deny")
        until(lambda: asked() == "degraded")
        assert "s3://test/kv" in worker.health()["tiers"]["bucket"]["reason"]
        assert worker.figure("up", "bucket") == 0
        answers("normal")
        before = worker.figure("stored_blocks", "bucket")
        until(lambda: asked() == "ok" and worker.figure("stored_blocks", "bucket") > before)
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
