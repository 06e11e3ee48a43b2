"""Decode workers die by `kill -9` after any number of tokens, and no client notices."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.client import Streamed
from tests.e2e.fleet import Fleet

TOKENS = 14
PROMPT = list(range(300, 350))
TEXT = "Two roads lead from the village to the market, and the short one is narrow."
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
TEXTUAL = {"prompt": PROMPT}
SEEDED = {"temperature": 1.0, "seed": 11}
GREEDY = {"temperature": 0}
USAGE = {"stream_options": {"include_usage": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "completion, greedy, usage": TEXTUAL | GREEDY | USAGE,
    "completion, seeded, logprobs": TEXTUAL | SEEDED | {"logprobs": 2},
    "completion, seeded, stop": TEXTUAL | SEEDED | {"stop": "?"},
    "completion, seeded, penalties": TEXTUAL | SEEDED | {"presence_penalty": 1.5, "top_k": 40},
    "chat, greedy, stop, usage": CHAT | GREEDY | USAGE | {"stop": "?"},
    "chat, seeded, logprobs": CHAT | SEEDED | {"logprobs": True, "top_logprobs": 2},
    "chat, seeded, grammar": CHAT | SEEDED | {"structured_outputs": {"regex": "[a-z0-9 ]{400}"}},
}


@dataclass
class Case:
    """A request, and what it must say."""

    name: str
    body: dict[str, Any]
    expected: tuple[Any, ...]


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True} | fields


def across_tokens(fleet: Fleet, fields: dict[str, Any]) -> str:
    """Return a stop string that begins within one token, and ends within a later one."""
    fields = {name: value for name, value in fields.items() if name != "stop"}
    ends = [(len(stream.text), stream.text) for stream in fleet.follow(**body(fields))]
    places = sorted({end for end, _ in ends if end})
    text = ends[-1][1]
    for middle in range(len(places) // 2, len(places) - 1):
        stop = text[places[middle] - 1 : places[middle + 1] + 1]
        if text.find(stop) == places[middle] - 1 and len(stop) > 2:
            return stop
    raise AssertionError(f"no stop string in {text!r}")


@pytest.fixture(scope="module")
def cases(real: Fleet) -> list[Case]:
    found = []
    for name, fields in VARIANTS.items():
        fields = dict(fields)
        if "stop" in fields:
            fields["stop"] = across_tokens(real, fields)
        stream = real.stream(**body(fields))
        found.append(Case(name, body(fields), stream.told))
        assert stream.finish == ("stop" if "stop" in fields else "length"), name
        assert "stop" not in fields or stream.stop == fields["stop"]
    return found


Place = tuple[str, int]


class Round:
    """Streams of all cases, begun one after another, whose decode workers are killed.

    They are killed at the moment when a client of the case `target[0]` has `target[1]` tokens;
    for 0 tokens, when that case's streams, which are the last ones, have been asked for.
    """

    def __init__(self, fleet: Fleet, cases: list[Case], target: Place, each: int) -> None:
        self.fleet, self.target = fleet, target
        self.runs = sorted(cases * each, key=lambda case: case.name == target[0])
        rows = fleet.rows().values()
        self.pids = [row["pid"] for row in rows if row["role"] == "decode"]
        self.died = 0.0
        self.lock = threading.Lock()

    def kill(self) -> None:
        with self.lock:
            if not self.died:
                self.died = time.monotonic()
                for pid in self.pids:
                    os.kill(pid, signal.SIGKILL)

    def follow(self, case: Case) -> Place | None:
        """Check one stream; return how far it was told when the workers died, if it was cut."""
        times, stream = [(time.monotonic(), 0)], Streamed()
        for stream in self.fleet.follow(**case.body):
            times.append((time.monotonic(), len(stream.tokens)))
            if stream.tokens and (case.name, len(stream.tokens)) == self.target:
                self.kill()
        assert stream.told == case.expected, case.name
        if not times[0][0] < self.died < times[-1][0]:
            return None
        return case.name, max(count for when, count in times if when <= self.died)

    def run(self) -> set[Place]:
        with ThreadPoolExecutor(len(self.runs)) as pool:
            futures = []
            for case in self.runs:
                futures.append(pool.submit(self.follow, case))
                time.sleep(random.random() * 0.008)
            if not self.target[1]:
                self.kill()
            found = {future.result() for future in futures}
        self.kill()  # all ended before
        self.fleet.recovered(self.pids)
        return {place for place in found if place is not None}


def part(index: int) -> str:
    """Return which part of a stream a token is in."""
    return "begin" if not index else "end" if index >= TOKENS - 4 else "middle"


def kill_at(fleet: Fleet, cases: list[Case], each: int, most: int, law: Any) -> None:
    """Kill decode workers until a place of each part, which `law` names, was hit.

    A round may miss its place: on busy cores the kill may come after the last token.
    """
    places = [(case.name, i) for case in cases for i in range(len(case.expected[1]) - 1)]
    hit: set[Place] = set()
    rounds = 0
    while left := [place for place in places if law(place) not in set(map(law, hit))]:
        assert rounds < most, f"never killed at {left}"
        hit |= Round(fleet, cases, random.choice(left), each).run()
        rounds += 1
    print(f"{rounds} rounds, killed at {len(hit & set(places))} of {len(places)} places")
    fleet.settle()


def test_after_a_kill_at_any_time_no_token_is_lost_and_none_told_twice(
    real: Fleet, cases: list[Case]
) -> None:
    kill_at(real, cases, 1, 60, lambda place: part(place[1]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_after_every_token_index_no_token_is_lost_and_none_told_twice(
    real: Fleet, cases: list[Case]
) -> None:
    kill_at(real, cases, 8, 100, lambda place: place)


def test_a_worker_that_was_killed_serves_again(real: Fleet, cases: list[Case]) -> None:
    for case in cases:
        assert real.stream(**case.body).told == case.expected, case.name
    for row in real.rows().values():
        assert row["state"] == "up"
