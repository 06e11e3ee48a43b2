"""Laws of the logs: one line a record, whatever a client sends, and nothing secret in any."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
from collections.abc import Iterator

import pytest

from pigou import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, names = logging.getLogger(), ("pigou", "pigou.access")
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def test_a_record_is_one_line_of_json_with_its_fields() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access=False, stream=stream)
    logger = logging.getLogger("pigou.gateway")
    logger.info("two\nlines %s", 1, extra={"fields": {"tenant": 'a"b'}})
    logger.debug("not shown")
    try:
        raise ValueError("x\ny")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"]) == ("info", "pigou.gateway")
    assert (first["message"], first["tenant"]) == ("two\nlines 1", 'a"b')
    assert "ValueError: x\ny" in second["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_path_or_name_breaks_a_line_of_the_access_log(log_format: logs.LogFormat) -> None:
    stream = io.StringIO()
    logs.configure(log_format, "error", access=True, stream=stream)
    with logs.accessed("GET", "/x\nERROR forged: y z=1") as fields:
        logs.describe_access(tenant="a b", ttft_s=None)
        fields["status"] = 200
    assert stream.getvalue().count("\n") == 1
    assert "ttft_s" not in stream.getvalue()
    if log_format == "json":
        line = json.loads(stream.getvalue())
        assert (line["status"], line["tenant"]) == (200, "a b")
        assert line["duration_s"] >= 0


def test_without_an_access_log_nothing_is_kept() -> None:
    stream = io.StringIO()
    logs.configure("text", "debug", access=False, stream=stream)
    with logs.accessed("GET", "/") as fields:
        logs.describe_access(tenant="a")
        assert fields == {}
    assert stream.getvalue() == ""


def test_a_lost_client_is_logged_as_499() -> None:
    stream = io.StringIO()
    logs.configure("text", "info", access=True, stream=stream)
    with pytest.raises(ConnectionError), logs.accessed("GET", "/"):
        raise ConnectionError
    assert "status=499" in stream.getvalue()


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ('{"level": "warning", "message": "m", "logger": "pigou.x", "a": 1}', "warning", "m"),
        ("plain", "info", "w | plain"),
        ('{"level": "shout", "message": "m"}', "info", None),
        ('{"level": 1, "message": "m"}', "info", None),
        ("[" * 10_000, "info", None),
        ("{", "info", "w | {"),
    ],
)
def test_lines_of_workers_keep_their_level_and_fields(
    line: str, level: str, message: str | None
) -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access=False, stream=stream)
    logs.relay(logging.getLogger("pigou.worker"), "w", line)
    told = json.loads(stream.getvalue())
    assert told["level"] == level
    assert message is None or told["message"] == message
    if line.startswith('{"level": "w'):
        assert (told["worker"], told["a"]) == ("w", 1)


async def test_lines_about_a_request_have_its_ids_and_others_have_none() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access=False, stream=stream)
    logger = logging.getLogger("pigou.gateway")
    logs.note_request("r1", "t1")
    logger.info("about it")
    with logs.traced("cmpl-r1", "t1"):
        await asyncio.to_thread(
            contextvars.Context().run, logger.info, "a thread", extra=logs.about("cmpl-r1-0-1f")
        )
    logger.info("over", extra=logs.about("cmpl-r1-0-1f"))
    logs.note_request()
    logger.info("about none")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    ids = [(line.get("request_id"), line.get("trace_id")) for line in lines]
    assert ids == [("r1", "t1"), ("cmpl-r1", "t1"), ("cmpl-r1", None), (None, None)]
