"""Downloads: what arrives is what was meant, however often it breaks off."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pigou.cli import main
from pigou.workload.catalogue import DownloadError, Listed, download

DATA = bytes(range(256)) * 5000


@dataclass
class Site:
    """A server of one file.

    Attributes:
        data: the file.
        tag: its entity tag; empty for none.
        cut: bytes after which an answer breaks off; 0 for never.
        ranges: whether it knows ranges.
        status: of its answers, if not the usual one.
        asked: ranges that were asked for.
    """

    data: bytes = DATA
    tag: str = '"1"'
    cut: int = 0
    ranges: bool = True
    status: int = 0
    asked_tokens: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    found = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("range")
            found.asked_tokens.append(wanted)
            start = int(re.findall(r"\d+", wanted)[0]) if wanted and found.ranges else 0
            if self.headers.get("if-range") not in (None, found.tag):
                start = 0
            size = len(found.data)
            if found.status or start >= size:
                self.send_response(found.status or 416)
                self.send_header("content-range", f"bytes */{size}")
                self.send_header("content-length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("content-range", f"bytes {start}-{size - 1}/{size}")
            if found.tag:
                self.send_header("etag", found.tag)
            self.send_header("content-length", str(size - start))
            self.end_headers()
            end = min(size, start + found.cut) if found.cut else size
            self.wfile.write(found.data[start:end])
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/t.jsonl"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def entry(site: Site, *, verified: bool = True) -> Listed:
    found = Listed("t", "a trace", site.url, "https://github.com/x/y", "CC0", "mooncake")
    sum_ = hashlib.sha256(DATA).hexdigest()
    return replace(found, sha256=sum_, size=len(DATA)) if verified else found


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_and_is_not_fetched_twice(site: Site, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = download(entry(site), tmp_path, watch=lambda *at: told.append(at))
    assert path.read_bytes() == DATA
    assert told[-1] == (len(DATA), len(DATA))
    assert download(entry(site), tmp_path) == path
    assert len(site.asked_tokens) == 1
    assert left(tmp_path) == ["t.jsonl"]


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("tag", ['"1"', ""])
def test_what_broke_off_is_gone_on_with(
    site: Site, tmp_path: Path, tag: str, verified: bool
) -> None:
    site.tag, site.cut = tag, 400_000
    for _ in range(2):
        with pytest.raises(DownloadError, match="are kept"):
            download(entry(site, verified=verified), tmp_path)
    site.cut = 0
    assert download(entry(site, verified=verified), tmp_path).read_bytes() == DATA
    if tag or verified:
        assert site.asked_tokens == [None, "bytes=400000-", "bytes=800000-"]
    else:  # nothing would tell whether it is still the same file
        assert site.asked_tokens == [None, None, None]
    assert left(tmp_path) == ["t.jsonl"]


def test_a_file_that_changed_meanwhile_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    site.cut = 400_000
    with pytest.raises(DownloadError):
        download(entry(site, verified=False), tmp_path)
    site.cut, site.tag, site.data = 0, '"2"', DATA[::-1][:900_000]
    assert download(entry(site, verified=False), tmp_path).read_bytes() == site.data


def test_a_server_without_ranges_sends_it_all_again(site: Site, tmp_path: Path) -> None:
    site.cut = 400_000
    with pytest.raises(DownloadError):
        download(entry(site), tmp_path)
    site.cut, site.ranges = 0, False
    assert download(entry(site), tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("more", [0, 1000])
def test_a_part_that_is_whole_or_longer_is_no_obstacle(
    site: Site, tmp_path: Path, more: int
) -> None:
    (tmp_path / "t.jsonl.part").write_bytes(DATA + b"x" * more)
    assert download(entry(site), tmp_path).read_bytes() == DATA


def test_another_file_is_refused_and_not_kept(site: Site, tmp_path: Path) -> None:
    site.data = DATA[:-1] + b"?"
    with pytest.raises(DownloadError, match="SHA-256"):
        download(entry(site), tmp_path)
    assert left(tmp_path) == []
    site.data = DATA + b"?"
    with pytest.raises(DownloadError, match="bytes"):
        download(entry(site), tmp_path)
    (tmp_path / "t.jsonl").write_bytes(b"mine")
    with pytest.raises(DownloadError, match="remove it"):
        download(entry(site), tmp_path)
    assert (tmp_path / "t.jsonl").read_bytes() == b"mine"


def test_errors_say_what_to_do(site: Site, tmp_path: Path) -> None:
    site.status = 404
    with pytest.raises(DownloadError, match="answered 404"):
        download(entry(site), tmp_path)
    away = replace(entry(site), address="http://127.0.0.1:9/t.jsonl")
    with pytest.raises(DownloadError, match=r"put it at .*t\.jsonl"):
        download(away, tmp_path)
    with pytest.raises(DownloadError, match="http://"):
        download(replace(away, address="file:///etc/passwd"), tmp_path)
    with pytest.raises(DownloadError, match="no single file"):
        download(replace(away, address=""), tmp_path)


def test_the_command_shows_licence_and_owner_and_takes_other_copies(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["trace", "download", "azure-2024-code", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--address", site.url])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "Licence: CC-BY-4.0. Owner: https://github.com/Azure" in out
    assert "unverified" in out
    assert (tmp_path / "AzureLLMInferenceTrace_code_1week.csv").read_bytes() == DATA
    arguments[2] = "azure-2023-code"
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--address", site.url])
    assert end.value.code == 1
    assert "320117" in capsys.readouterr().err
