"""Journals of version 1 say what they said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pigou.config import ControlConfig
from pigou.control.journal import JournalEntry, JournalError
from pigou.control.messages import (
    Assessed,
    CacheKeyed,
    CacheLost,
    Ended,
    FirstToken,
    GroupEnded,
    LoadReport,
    PrefillDone,
    ReadFailed,
    Submit,
    Tick,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from pigou.control.prefix_index.index import KeyedCleared, KeyedRemoved, KeyedStored
from pigou.gateway.journal import Journal
from pigou.request import FinishReason, Role, Worker
from pigou.workload.journal_file import decode_v1, lines, read_workload
from pigou.workload.journal_replay import replay_journal

RECORDED = Path(__file__).with_name("journal_v1.jsonl")
MESSAGES = {
    '"k":"up","worker":{"id":"w","url":"","role":"decode","block_size":32}':
        WorkerUp(Worker("w", "", Role.DECODE, 32)),
    '"k":"down","worker":"w"': WorkerDown("w"),
    '"k":"prefilled","id":"r","well":false': PrefillDone("r", False),
    '"k":"prefilled","id":"r"': PrefillDone("r"),
    '"k":"unread","id":"r"': ReadFailed("r"),
    '"k":"first","id":"r"': FirstToken("r"),
    '"k":"tokens","id":"r","count":3': Tokens((("r", 3),)),
    '"k":"end","id":"r","reason":"error"': Ended("r", FinishReason.ERROR),
    '"k":"group","id":"g"': GroupEnded("g"),
    '"k":"lost","worker":"w"': CacheLost("w"),
    '"k":"load","worker":"w","running":1,"waiting":2,"usage":0.375': LoadReport("w", 1, 2, 0.375),
    '"k":"load","worker":"w","running":1,"waiting":2,"usage":"inf"':
        LoadReport("w", 1, 2, float("inf")),
    '"k":"assessed"': Assessed(None),
    '"k":"assessed","found":{"anarchy":null}': Assessed(None),
    '"k":"tick"': Tick(),
}  # fmt: skip


def entry(line: str) -> JournalEntry:
    return decode_v1(f'{{"now":5,{line}}}'.encode())


@pytest.mark.parametrize("line", MESSAGES)
def test_every_line_of_version_1_is_a_message(line: str) -> None:
    assert entry(line).message == MESSAGES[line]
    assert entry(line).now == 5


def test_every_field_of_a_request_of_version_1_is_read() -> None:
    line = (
        '"k":"submit","id":"r","prompt":100,"most":7,"priority":-2,"deadline":"1180591620717411303424",'
        '"tenant":"ann","hold":true,"streamed":false,"hashes":"AQAAAAAAAAACAAAAAAAAAA==",'
        '"keys":{"16":"BQAAAAAAAAA="},"overrides":{"temperature":"0.1","x":"inf"},'
        '"exclude":["a","b"],"group":"g","held":3'
    )
    found = entry(line).message
    assert isinstance(found, Submit)
    request = found.request
    assert (request.id, request.prompt, request.max_tokens, request.priority) == ("r", 100, 7, -2)
    assert (request.deadline, request.tenant, request.hold) == (2**70, "ann", True)
    assert (request.streamed, request.group, request.held) == (False, "g", 3)
    assert request.hashes.tolist() == [[1, 2]]
    assert request.keys[16].tolist() == [5]
    assert dict(request.overrides) == {"temperature": 0.1, "x": float("inf")}
    assert found.exclude == ("a", "b")


def test_kv_events_of_version_1_are_read() -> None:
    words = "BQAAAAAAAAA="
    found = entry(
        f'"k":"cache","worker":"w","events":[["stored","{words}","{words}",7,null],'
        f'["removed","{words}","CPU"],["cleared"]]'
    ).message
    assert isinstance(found, CacheKeyed)
    stored, removed, cleared = found.events
    assert isinstance(stored, KeyedStored)
    assert (stored.hashes.tolist(), stored.keys.tolist(), stored.parent) == ([5], [5], 7)
    assert isinstance(removed, KeyedRemoved)
    assert (removed.hashes.tolist(), removed.medium) == ([5], "CPU")
    assert isinstance(cleared, KeyedCleared)


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"request": "r", "choice": {"decode": "w"}, "priority": None}, "route"),
        ({"request": "r", "ahead": 3}, "queue"),
        ({"request": "r", "reason": "full", "retry_after": 1, "tenant": False}, "shed"),
        ({"request": "r", "worker": "w"}, "recall"),
    ],
)
def test_a_decision_of_version_1_gets_its_kind(told: dict[str, Any], kind: str) -> None:
    assert entry(f'"k":"tick","out":[{json.dumps(told)}]').out == [{"kind": kind} | told]
    assert entry('"k":"tick","out":[{"assess":true}]').out == [{"kind": "assess"}]


@pytest.mark.parametrize("line", ['"k":"what"', '"id":"r"', '"k":"down","worker":"w","more":1'])
def test_what_version_1_had_not_is_refused(line: str) -> None:
    with pytest.raises(JournalError):
        entry(line)


def test_a_journal_of_version_1_replays_to_the_same_decisions() -> None:
    found = replay_journal(lines(RECORDED))
    assert found.difference is None
    assert (found.entries, found.requests, found.decisions) == (72, 24, 31)
    trace = read_workload(RECORDED)
    assert sum(turn.output for session in trace.sessions for turn in session.turns) == 78


def test_a_run_of_today_is_appended_to_a_journal_of_version_1(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(RECORDED.read_bytes())
    Journal(path, ControlConfig()).close()
    found = replay_journal(lines(path))
    assert (found.runs, found.difference) == (2, None)


def test_words_of_version_1_may_be_changed_by_no_kernel_of_another_type() -> None:
    found = entry('"k":"submit","id":"r","prompt":16,"most":7,"keys":{"16":"BQAAAAAAAAA="}').message
    assert isinstance(found, Submit)
    keys = found.request.keys[16]
    assert keys.flags.writeable
    assert keys.dtype == np.uint64
