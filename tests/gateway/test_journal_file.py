"""The journal's file: whatever happens to it, the gateway goes on."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import JournalEntry, JournalHead, decode
from pigou.control.messages import Tick
from pigou.gateway.journal import Journal

CONFIG = ControlConfig(policy="toll", seed=3)


def wait(law: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not law():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_entries_are_in_the_file_soon_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, CONFIG)
    for now in range(1000):
        journal.write(JournalEntry(now=now, message=Tick()))
    wait(lambda: path.read_bytes().count(b"\n") == 1001)
    journal.close()
    head, *rest = [decode(line) for line in path.read_bytes().splitlines()]
    assert isinstance(head, JournalHead)
    assert head.config == CONFIG
    assert [each.now for each in rest] == list(range(1000))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_run_is_appended_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, CONFIG).close()
    path.write_bytes(path.read_bytes() + b'{"k":"ti')
    Journal(path, CONFIG).close()
    first, cut, second = path.read_bytes().splitlines()
    assert isinstance(decode(first), JournalHead)
    assert isinstance(decode(second), JournalHead)
    assert cut == b'{"k":"ti'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_ends_the_journal_with_a_warning_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "pigou.gateway"):
        journal = Journal(Path("/dev/full"), CONFIG)
        wait(lambda: journal.failed)
        for now in range(100):
            journal.write(JournalEntry(now=now, message=Tick()))
        journal.close()
    assert "No space left" in caplog.text
    assert "the gateway goes on" in caplog.text
    assert not journal._lines


def test_a_disk_that_is_too_slow_ends_the_journal_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou.gateway.journal._MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr("pigou.gateway.journal._FLUSH_S", 30)
    journal = Journal(tmp_path / "j", CONFIG)
    for now in range(1000):
        journal.write(JournalEntry(now=now, message=Tick()))
    assert "slow" in journal.failed
    assert not journal._lines
    journal.close()


def test_what_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name another file"):
        Journal(tmp_path / "nowhere" / "j", CONFIG)
    with pytest.raises(ConfigError, match="journal"):
        Journal(tmp_path, CONFIG)
    os.mkfifo(tmp_path / "fifo")  # whose writer would wait for a reader, at the end too
    with pytest.raises(ConfigError, match="it is a FIFO"):
        Journal(tmp_path / "fifo", CONFIG)
