"""What `pigou serve` says once it is up: what is served, where, and from what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pigou.cli.serve import _banner, _beginning
from pigou.fleet.config import AttachedWorker, LocalWorker
from pigou.gateway.fleet_status import WorkerRow
from pigou.request import Role

REGISTRY = "nats://user:secret@h:4222/fleet"


def serving(*rows: WorkerRow, model: str = "m", declared: tuple[str, ...] = ()) -> Any:
    ups = {row.id: SimpleNamespace(engine=SimpleNamespace(model=model)) for row in rows}
    return SimpleNamespace(
        port=8000,
        plane_driver=SimpleNamespace(upstreams=ups),
        supervisor=SimpleNamespace(rows=lambda: list(rows), models=dict.fromkeys(declared)),
    )


def row(id: str, kind: str) -> WorkerRow:
    return WorkerRow(id=id, url=f"http://{id}:1", role="both", state="up", kind=kind)


@pytest.mark.parametrize(
    ("rows", "registry", "shown", "hidden"),
    [
        ((), REGISTRY, ["waits for workers", "those of nats://h:4222/fleet", "/v1/models"], "Try"),
        ((row("a", "attached"),), "", ["serves m at", "1 attached", "both     attached", "Try"],
         "those of"),
        ((row("a", "attached"), row("r", "registered"), row("s", "registered")), REGISTRY,
         ["1 attached, 2 registered; those of nats://h:4222/fleet", "http://s:1"], "secret"),
    ],
    ids=["registry without workers", "attached", "both"],
)  # fmt: skip
def test_it_says_what_is_served_where_and_from_what(
    rows: tuple[WorkerRow, ...], registry: str, shown: list[str], hidden: str
) -> None:
    text = _banner(serving(*rows), "0.0.0.0", registry)
    assert "http://127.0.0.1:8000/v1" in text
    assert all(words in text for words in shown), text
    assert hidden not in text
    assert "MODEL" not in text


def test_it_begins_with_what_it_starts_attaches_and_looks_for() -> None:
    local = LocalWorker(id="decode-0", role=Role.DECODE)
    attached = AttachedWorker(id="attached-0", url="http://h:1", role=Role.BOTH)
    assert _beginning([local, attached], "") == (
        "Starting 1 decode worker, attaching 1 both worker ..."
    )
    assert _beginning([], REGISTRY) == "Looking for workers in nats://h:4222/fleet ..."
