"""Logs as text or as lines of JSON, and the access log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TextIO

import msgspec

from pigou.config import option

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
#: Options of a process that writes logs.
LogFormatOption = Annotated[LogFormat, option("Log format on stderr.", "Logs", choices=True)]
LogLevelOption = Annotated[LogLevel, option("Minimum log level.", "Logs", choices=True)]
AccessLogOption = Annotated[
    bool,
    option(
        "Log each answered request: status, tenant, tokens, times; never prompts or keys.",
        "Logs",
    ),
]
#: Level of records by their name in a line of JSON.
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
#: Access log fields of the request that the current task serves.
_fields: ContextVar[dict[str, Any] | None] = ContextVar("access", default=None)
_access = logging.getLogger("pigou.access")
#: Ids of the request that the current task serves; in every line of JSON about it.
_ids: ContextVar[dict[str, str] | None] = ContextVar("ids", default=None)
#: Ids of traces by that of their request, for lines of threads; only while they are served.
_trace_ids: dict[str, str] = {}
#: Whether lines are JSON: lines of text have no ids.
_ids_wanted = False


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the command that starts a fleet logs."""

    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "warning"
    access_log: AccessLogOption = False
    verbose: Annotated[
        bool,
        option(
            "Same as --log-level info; shows the workers' logs, too.",
            "Logs",
            flags=("--verbose", "-v"),
        ),
    ] = False

    @property
    def level(self) -> LogLevel:
        """Least level of the lines."""
        return "info" if self.verbose and self.log_level == "warning" else self.log_level


class JsonFormatter(logging.Formatter):
    """One line of JSON a record: time, level, logger, message, and the record's own fields.

    A record about a request has `request_id`, and `trace_id` where it is traced.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "ids", None) or _ids.get() or {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """One line of text a record, its fields after the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, "fields", {})
        shown = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
        text = super().format(record)
        first, newline, rest = text.partition("\n")
        return f"{first}{shown}{newline}{rest}"


def configure(
    log_format: LogFormat, level: LogLevel, *, access: bool, times: bool = True,
    stream: TextIO | None = None,
) -> None:  # fmt: skip
    """Set up the logs of this process, in place of earlier ones.

    `level` is of Pigou's own records; others are shown from warnings on. `access` logs each HTTP
    request once it is answered, whatever the level; `times` begins lines of text with the time.
    """
    global _ids_wanted  # noqa: PLW0603
    _ids_wanted = log_format == "json"
    handler = logging.StreamHandler(stream or sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else TextFormatter(text if times else text.partition(" ")[2])
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pigou").setLevel(_LEVELS[level])
    _access.setLevel(logging.INFO if access else logging.CRITICAL)


def relay(logger: logging.Logger, worker: str, line: str) -> None:
    """Log a line that a worker logged; where it is JSON, with its own level and fields."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        level, message = _LEVELS[fields.pop("level")], str(fields.pop("message"))
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError):
        logger.info("%s | %s", worker, line)
        return
    fields.pop("time", None)
    source = fields.pop("logger", "")
    record_fields = {"worker": worker, "source": source, **fields}
    (_access if source == _access.name else logger).log(
        level, "%s", message, extra={"fields": record_fields}
    )


@contextmanager
def accessed(method: str, path: str) -> Iterator[dict[str, Any]]:
    """Log one request once it is answered; `status` is to be set, 499 stands for a lost client."""
    if not _access.isEnabledFor(logging.INFO):
        yield {}
        return
    fields: dict[str, Any] = {"method": method, "path": path, "status": 499}
    token, began = _fields.set(fields), time.monotonic()
    try:
        yield fields
    finally:
        _fields.reset(token)
        fields["duration_s"] = round(time.monotonic() - began, 6)
        _access.info("request", extra={"fields": fields})


def note_request(request_id: str = "", trace_id: str = "") -> None:
    """Let lines of the current task have the ids of a request, if any, from now on."""
    if _ids_wanted:
        _ids.set(_named(request_id, trace_id) if request_id else None)


@contextmanager
def traced(request_id: str, trace_id: str) -> Iterator[None]:
    """Within it, lines that threads log `about` a request have its trace's id, if it has one."""
    if not trace_id:
        yield
        return
    _trace_ids[request_id] = trace_id
    try:
        yield
    finally:
        _trace_ids.pop(request_id, None)


def about(request: str) -> dict[str, Any]:
    """Return `extra` of a line of a thread about an engine request, `REPLY-INDEX-NUMBER`."""
    request_id = request.rsplit("-", 2)[0]
    return {"ids": _named(request_id, _trace_ids.get(request_id, ""))}


def _named(request_id: str, trace_id: str) -> dict[str, str]:
    ids = {"request_id": request_id}
    return ids | {"trace_id": trace_id} if trace_id else ids


def describe_access(**fields: Any) -> None:
    """Add fields to the current request's access log line; never prompts, replies or keys."""
    current = _fields.get()
    if current is not None:
        current.update({key: value for key, value in fields.items() if value is not None})


def _shown(value: Any) -> str:
    """Return a value that cannot break its line, nor be taken for several."""
    text = str(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else msgspec.json.encode(text).decode()


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"
