"""Downloads of traces: resumed where they broke off, and compared with their checksum."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from pigou import __version__
from pigou.workload.catalogue import Listed

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")

#: Told of bytes so far, and of all of them (0 where that is not known).
Watch = Callable[[int, int], None]


class DownloadError(Exception):
    """What went wrong with a download, and what can be done."""


def download(
    trace: Listed, folder: Path, address: str = "", watch: Watch = lambda _so_far, _all: None
) -> Path:
    """Return the path of a trace's file, downloaded if it is not there.

    What has come when it breaks off is kept (`NAME.part`), and the next call goes on from there,
    if the server can, and says that the file is still the same.

    Args:
        trace: what to download.
        folder: where to; it must exist.
        address: of another copy; empty for the owner's.
        watch: told how far it is.

    Raises:
        DownloadError: it cannot be reached or written, or is not what it should be.
    """
    address = address or trace.address
    if not address:
        raise DownloadError(f"{trace.name} is no single file; see {trace.page}")
    if not address.startswith(("http://", "https://")):
        raise DownloadError(f"the address is {address!r}; it must begin with http:// or https://")
    target = folder / (trace.file or address.rsplit("/", 1)[-1])
    if target.exists():
        _check(target, trace, "remove it, and download again")
        return target
    part = target.with_name(target.name + ".part")
    try:
        _fetch(address, trace, part, watch)
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{address} answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise DownloadError(_unreachable(address, target, part, error)) from error
    except OSError as error:
        raise DownloadError(f"{part} cannot be written ({error.strerror or error})") from error
    try:
        _check(part, trace, "it was removed; download again")
    except DownloadError:
        part.unlink()
        raise
    finally:
        _mark_of(part).unlink(missing_ok=True)
    part.rename(target)
    return target


def _fetch(address: str, trace: Listed, part: Path, watch: Watch) -> None:
    mark = _mark_of(part)
    have = part.stat().st_size if part.exists() else 0
    same = mark.read_text("utf-8") if mark.exists() else ""
    headers = {"user-agent": f"pigou/{__version__}", "accept-encoding": "identity"}
    if have and (same or trace.verified):
        headers["range"] = f"bytes={have}-"
        if same:
            headers["if-range"] = same
    request = urllib.request.Request(address, headers=headers)
    try:
        opened = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or "range" not in headers:
            raise
        if _all_there(error.headers.get("content-range", ""), have):
            return
        part.unlink()  # longer than the file: begin anew
        _fetch(address, trace, part, watch)
        return
    with cast(HTTPResponse, opened) as answer:
        start = _start(answer)
        if start not in (0, have):
            raise HTTPException(f"bytes from {start} were sent, those from {have} were asked for")
        mark.write_text(_validator(answer), "utf-8")
        whole = start + int(answer.headers.get("content-length") or 0)
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            _copy(answer, file.write, start, whole if whole > start else 0, watch)
            file.truncate()
            os.fsync(file.fileno())


def _copy(
    answer: HTTPResponse, write: Callable[[bytes], int], done: int, whole: int, watch: Watch
) -> None:
    while chunk := answer.read(_CHUNK):
        write(chunk)
        done += len(chunk)
        watch(done, whole)
    if whole and done < whole:
        raise ConnectionError(f"it broke off at {done} of {whole} bytes")


def _start(answer: HTTPResponse) -> int:
    """Return the offset of the first byte of an answer."""
    found = _RANGE.match(answer.headers.get("content-range", "")) if answer.status == 206 else None
    return int(found[1]) if found and found[1] else 0


def _all_there(said: str, have: int) -> bool:
    found = _RANGE.match(said)
    return found is not None and found[2] == str(have)


def _validator(answer: HTTPResponse) -> str:
    """Return what tells this version of the file: a strong entity tag, or a date."""
    tag = str(answer.headers.get("etag", ""))
    return tag if tag.startswith('"') else str(answer.headers.get("last-modified", ""))


def _mark_of(part: Path) -> Path:
    return part.with_name(part.name + ".version")


def _check(path: Path, trace: Listed, remedy: str) -> None:
    if trace.size and path.stat().st_size != trace.size:
        raise DownloadError(
            f"{path} has {path.stat().st_size} bytes, and {trace.name} has {trace.size}; {remedy}"
        )
    if not trace.verified:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != trace.sha256:
        raise DownloadError(
            f"{path} has the SHA-256 {found}, and {trace.name} has {trace.sha256}; {remedy}"
        )


def _unreachable(address: str, target: Path, part: Path, error: Exception) -> str:
    why = getattr(error, "reason", None) or error
    kept = part.stat().st_size if part.exists() else 0
    remedy = (
        f"{kept} bytes are kept, and the same command goes on from there"
        if kept
        else f"without a network, fetch it elsewhere and put it at {target}"
    )
    return f"{address} cannot be had ({why}); {remedy}"
