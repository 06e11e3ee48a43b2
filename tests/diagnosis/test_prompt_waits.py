"""Laws of waits by prompt length: from arrival to computation, and what they show of a fleet."""

from __future__ import annotations

import pytest
from prometheus_client.core import Metric

from pigou.diagnosis.metric_pages import MetricPage
from pigou.gateway.api import metrics
from pigou.gateway.api.diagnosis import GatewayDiagnosis
from pigou.windows.prompts import PromptWaits


def waits_of(prefill_s: float = 0.0) -> PromptWaits:
    waits = PromptWaits(lambda _: prefill_s)
    for number in range(50):
        waits.arrive(f"known-{number}", 100, 0.0)
        waits.end(f"known-{number}", 0.0)
    return waits


def count(waits: PromptWaits, length: str) -> int:
    return sum(waits.by_length[length].counts)


def test_a_stream_waits_to_its_first_token_and_a_whole_reply_until_it_is_routed() -> None:
    waits = waits_of()
    before = waits.by_length["short"].total
    for name, streamed in (("stream", True), ("whole", False)):
        waits.arrive(name, 100, 10.0)
        waits.route(name, 11.0, streamed=streamed)
        waits.begin(name, 14.0)
        waits.arrive(name, 100, 14.5)  # it migrates
        waits.begin(name, 15.0)
        waits.end(name, 16.0)
    assert waits.by_length["short"].total - before == 4.0 + 1.0
    assert waits.late(100.0) == []


def test_a_long_prompts_own_prefill_is_no_wait() -> None:
    waits = waits_of(prefill_s=20.0)
    waits.arrive("long", 50_000, 100.0)
    waits.route("long", 101.0, streamed=True)
    assert waits.maxima(140.0) == (1.0, 50_000)
    assert waits.late(140.0) == []
    assert waits.late(143.0) == ["long"]
    waits.begin("long", 145.0)
    assert count(waits, "long") == 1
    assert waits.maxima(146.0) == (5.0, 0)
    assert waits.maxima(160.0) == (0.0, 0)


def test_who_leaves_the_queue_has_waited() -> None:
    waits = waits_of()
    waits.arrive("long", 50_000, 100.0)
    assert waits.maxima(130.0) == (30.0, 0)
    waits.end("long", 131.0)
    waits.end("unknown", 131.0)
    assert waits.maxima(132.0)[0] == 31.0


class Loop:
    """A gateway's page and clock around waits of prompts, sampled every ten seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0.0, PromptWaits(lambda _: 1.0)
        self.queue_s: list[float] = []
        monkeypatch.setattr(metrics, "time", self)
        self.diagnosis = GatewayDiagnosis(self.page, lambda: {"workers": []}, lambda: self.now)
        self.diagnosis.sample()

    def monotonic(self) -> float:
        return self.now

    def page(self) -> MetricPage:
        families: list[Metric] = list(metrics._wait_families(self.waits))
        samples = [(s.name, s.labels, s.value) for family in families for s in family.samples]
        bounds = (0.1, 1.0, 10.0, 100.0, float("inf"))
        samples += [("pigou_queue_wait_seconds_bucket", {"le": str(b)},
                     float(sum(s <= b for s in self.queue_s))) for b in bounds]  # fmt: skip
        return MetricPage(samples)

    def request(self, name: str, tokens: int, queue_s: float, wait_s: float) -> None:
        """Let a stream arrive now, and its first token come after `queue_s` and `wait_s`."""
        self.waits.arrive(name, tokens, self.now)
        self.waits.route(name, self.now + queue_s, streamed=True)
        self.waits.begin(name, self.now + queue_s + wait_s)
        self.waits.end(name, self.now + queue_s + wait_s + 1.0)
        self.queue_s.append(queue_s)

    def end_window(self) -> None:
        self.now += 10.0
        self.diagnosis.sample()

    def causes(self) -> list[int]:
        return [finding["number"] for finding in self.diagnosis.view()["findings"]]


@pytest.mark.parametrize("blocks", [False, True])
def test_short_prompts_behind_a_long_one_are_head_of_line_blocking(
    monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    loop = Loop(monkeypatch)
    for window in range(12):
        long = window % 3 == 2
        for number in range(40):
            loop.request(f"{window}/{number}", 100, 0.0, 2.0 if blocks and long else 0.03)
        if long:
            loop.request(f"{window}/long", 60_000, 0.0, 2.0)
        loop.end_window()
    assert loop.causes() == ([8] if blocks else [])


@pytest.mark.parametrize("starves", [False, True])
def test_long_prompts_that_never_begin_starve(
    monkeypatch: pytest.MonkeyPatch, starves: bool
) -> None:
    loop = Loop(monkeypatch)
    for window in range(8):
        for number in range(40):
            loop.request(f"{window}/{number}", 100, 0.5, 0.05)
        if window == 1:
            loop.waits.arrive("long", 60_000, loop.now)
            if not starves:
                loop.waits.route("long", loop.now + 0.5, streamed=True)
                loop.waits.begin("long", loop.now + 2.5)
        loop.end_window()
    assert loop.causes() == ([9] if starves else [])
