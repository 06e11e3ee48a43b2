"""What a gateway decided under load and kills, its journal decides again."""

from __future__ import annotations

import io
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import SLEEP
from tests.e2e.fleet import Fleet

from pigou.cli import main as cli_main
from pigou.control.journal import JournalEntry, JournalHead
from pigou.control.messages import Submit
from pigou.workload.journal_file import lines
from pigou.workload.trace_formats import read_trace

LAWS = {
    "toll": {"policy": "toll", "controller": {"controller": "regime"}, "max_inflight": 4},
    "random, fair": {
        "policy": "power-of-two", "temperature": 0.5, "seed": 7, "max_inflight": 3,
        "max_queued": 8, "queue_timeout": 300_000_000, "admission": {"order": "fair"},
    },
}  # fmt: skip
PREFIXES = [list(range(start, start + 96)) for start in (300, 500, 700)]


def ask(fleet: Fleet, number: int) -> None:
    """Send a request of some kind; how it ends does not matter here."""
    dice = random.Random(number)
    prompt = dice.choice(PREFIXES) + [dice.randrange(300, 900) for _ in range(dice.randrange(40))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": dice.randrange(1, 12),
                            "ignore_eos": True}  # fmt: skip
    kind = number % 6
    try:
        if kind == 0:
            fleet.post("/v1/completions", body)
        elif kind == 1:  # hangs up
            stream = fleet.payloads(**body)
            next(stream, None)
            stream.close()
        else:
            fleet.stream(**body)
    except (AssertionError, OSError):
        pass


def load(fleet: Fleet, requests: range, kill: int) -> None:
    """Send requests; kill a decode worker with one of them; look at the fleet all the while."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            fleet.get("/workers")
            fleet.get("/metrics")
            time.sleep(0.1)

    with ThreadPoolExecutor(17) as pool:
        looking = pool.submit(look)
        futures = []
        for number in requests:
            futures.append(pool.submit(ask, fleet, number))
            if number == kill:
                fleet.signal("decode-0")
            time.sleep(0.01)
        for future in futures:
            future.result()
        over.set()
        looking.result()


def replay(journal: Path, *options: str) -> str:
    """Run `pigou replay`; return what it said.

    This process orders sets of texts otherwise than the one that wrote the journal.
    """
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as ended:
        cli_main(["replay", str(journal), *options])
    assert ended.value.code == 0, said.getvalue()
    return said.getvalue()


@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[] if law == "toll" else pytest.mark.slow) for law in LAWS]
)
def test_the_journal_of_a_fleet_under_kills_replays_to_the_same_decisions(
    law: str, start_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    journal, figures = tmp_path / "journal", tmp_path / "figures.json"
    names = ["prefill-0", "decode-0", "decode-1"]
    gateway = {"journal": str(journal)}
    fleet = start_fleet(names, *SLEEP, control=LAWS[law], gateway=gateway)
    load(fleet, range(60), 24)
    fleet.recovered()
    load(fleet, range(60, 90), 70)
    fleet.recovered()
    fleet.stop(files=False)

    assert "The same decisions" in replay(journal, "--json", str(figures))
    told = json.loads(figures.read_text())
    assert told["same"]
    assert told["requests"] >= 90
    assert told["decisions"] >= told["requests"]
    assert journal.stat().st_mode & 0o777 == 0o600

    compared = replay(journal, "--policy", "round-robin")
    assert "round-robin would have chosen otherwise" in compared

    trace = read_trace(journal)
    messages = [
        each.entry.message for each in lines(journal) if isinstance(each.entry, JournalEntry)
    ]
    asked = {each.request.id for each in messages if isinstance(each, Submit)}
    assert len(trace.sessions) == len(asked) == 90
    assert trace.block == 16
    firsts = {session.turns[0].blocks[:6] for session in trace.sessions}
    assert len(firsts) == len(PREFIXES)


def requests_in(journal: Path) -> int:
    return journal.read_bytes().count(b'"kind":"submit"') if journal.exists() else 0


def await_requests(journal: Path, count: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while requests_in(journal) < count:
        assert time.monotonic() < end, f"{requests_in(journal)} requests in the journal"
        time.sleep(0.02)


def test_a_gateway_that_is_killed_leaves_a_journal_that_replays(
    start_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    for _ in range(2):
        written = requests_in(journal)
        fleet = start_fleet(["both-0"], *SLEEP, gateway={"journal": str(journal)})
        with ThreadPoolExecutor(8) as pool:
            for number in range(24):
                pool.submit(ask, fleet, number)
            await_requests(journal, written + 4)
            fleet.process.send_signal(signal.SIGKILL)
        fleet.process.wait()
        fleet.abandon()
    with journal.open("ab") as file:
        file.truncate(journal.stat().st_size - 9)

    told = replay(journal)
    assert "in 2 runs" in told
    assert "cut off" in told
    assert sum(isinstance(each.entry, JournalHead) for each in lines(journal)) == 2
