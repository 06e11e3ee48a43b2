"""The catalogue of public traces (`traces.yaml`), and their download."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from importlib.resources import files
from pathlib import Path
from typing import cast

import msgspec

from pigou import __version__
from pigou.config import ConfigError, RunError
from pigou.small_file import load_yaml, read_text

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")
#: Called with bytes so far and in total (0 if unknown).
Watch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Listed:
    """One public trace."""

    name: str
    what: str  # a few words
    address: str  # URL of the file; empty if it is no single file
    page: str
    licence: str
    kind: str  # format, as in `pigou.workload.trace_formats`; empty if unreadable
    sha256: str = ""  # hash of the file; empty if unknown
    size: int = 0  # bytes; 0 if unknown

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.address.rsplit("/", 1)[-1]

    @property
    def verified(self) -> bool:
        """True if a checksum or size verifies the download."""
        return bool(self.sha256)


#: In the order of the list: `traces.yaml` beside this file.
TRACES: tuple[Listed, ...] = msgspec.convert(
    load_yaml(files("pigou.workload").joinpath("traces.yaml").read_bytes()), tuple[Listed, ...]
)


def listed(name: str) -> Listed:
    """Return the trace of this name."""
    for trace in TRACES:
        if trace.name == name:
            return trace
    names = ", ".join(trace.name for trace in TRACES)
    raise ConfigError(f"trace is {name!r}; it must be one of: {names}")


class DownloadError(RunError):
    """A failed download, and the remedy."""


def download(
    trace: Listed, folder: Path, address: str = "", watch: Watch = lambda _so_far, _all: None
) -> Path:
    """Return a trace's file, downloaded or resumed if missing; raises DownloadError."""
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
    same = read_text(mark) if mark.exists() else ""
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
    match = _RANGE.match(answer.headers.get("content-range", "")) if answer.status == 206 else None
    return int(match[1]) if match and match[1] else 0


def _all_there(said: str, have: int) -> bool:
    match = _RANGE.match(said)
    return match is not None and match[2] == str(have)


def _validator(answer: HTTPResponse) -> str:
    """Return the file's version: a strong entity tag, or a date."""
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
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != trace.sha256:
        raise DownloadError(
            f"{path} has the SHA-256 {digest}, and {trace.name} has {trace.sha256}; {remedy}"
        )


def _unreachable(address: str, target: Path, part: Path, error: Exception) -> str:
    why = getattr(error, "reason", None) or error
    part_bytes = part.stat().st_size if part.exists() else 0
    remedy = (
        f"{part_bytes} bytes are kept, and the same command goes on from there"
        if part_bytes
        else f"without a network, fetch it elsewhere and put it at {target}"
    )
    return f"{address} cannot be had ({why}); {remedy}"
