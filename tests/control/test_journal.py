"""What is in a journal decides what is decided; what must not be in it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields
from tests.lib.examples import examples

from pigou.config import ConfigError, ControlConfig
from pigou.control.journal import (
    JournalEntry,
    JournalError,
    JournalRecorder,
    Recorded,
    decode,
    encode,
    journal_config,
    replay_call,
    report_tokens,
)
from pigou.control.messages import (
    AdapterReport,
    Assessed,
    CacheChanged,
    CacheKeyed,
    CacheLost,
    Ended,
    FirstToken,
    GroupEnded,
    LoadReport,
    PeerGone,
    PeerReport,
    PrefillClaimed,
    PrefillDone,
    Queue,
    ReadFailed,
    Route,
    Submit,
    Tick,
    Tokens,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from pigou.control.peers.bookings import PredictedPrompt, TenantService, WorkerBookings
from pigou.control.plane import ControlPlane
from pigou.control.planner.planner import PlannerStarted
from pigou.control.prefix_index import PrefixIndex
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.routing.policy import GROUP, params_of
from pigou.games.price_of_anarchy import Estimate, PriceOfAnarchy
from pigou.objectives import ProvisioningTimes, Slo
from pigou.request import (
    SECOND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    FinishReason,
    Rehearsed,
    Request,
    Role,
    Worker,
)
from pigou.windows.planner_window import PlannerWindow
from pigou.wire.kv_event_decoding import Cleared, Removed, Stored

FOUND = PoAEstimate(PriceOfAnarchy(*[Estimate(1.5, 1.25, 2.0)] * 4, (0, 2)), 3.25, 40)
SAMPLES: dict[type, Recorded] = {
    type(each): each
    for each in (
        WorkerUp(Worker("w", "", Role.DECODE, 32, 100, 8, False, layout="tcp:1")),
        WorkerDraining("w"),
        WorkerDown("w"),
        PrefillDone("r", False),
        PrefillClaimed("r", "w", 32),
        ReadFailed("r"),
        FirstToken("r"),
        Submit(Request("r", 3, 4), ("w",)),
        Tokens((("r", 3), ("s", 1), ("r", 2))),
        Tick(),
        Ended("r", FinishReason.ERROR),
        GroupEnded("g"),
        CacheKeyed("w", ()),
        CacheLost("w"),
        LoadReport("w", 1, 2, 0.375),
        AdapterReport("w", 2, ("a", "b"), 0.5),
        PeerReport(
            "g",
            (WorkerBookings("w", 1, sent_prompts=2),),
            (TenantService("t", 3),),
            (PredictedPrompt("w", np.array([7], dtype=np.uint64)),),
            4,
        ),
        PeerGone("g"),
        Assessed(FOUND),
        PlannerStarted(
            planner="price",
            params={"up": 0.1},
            slo=Slo(ttft_s=1.0, itl_s=0.1),
            times=ProvisioningTimes(flip_s=5.0),
        ),
        PlannerWindow(now_ns=5, seconds=1.0),
    )
}


def recorded(call: Callable[[JournalRecorder], object]) -> bytes:
    """The line of a call to a recorded plane."""
    lines: list[bytes] = []
    plane = ControlPlane(ControlConfig())
    call(JournalRecorder(plane, lambda entry: lines.append(encode(entry))))
    return lines[-1]


def again(line: bytes) -> Any:
    """The message of a line."""
    entry = decode(line)
    assert isinstance(entry, JournalEntry)
    return entry.message


def plain(words: Any) -> Any:
    """An array as a list, for comparisons."""
    return words.tolist()


@pytest.mark.parametrize("kind", get_args(Recorded))
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    sample = SAMPLES[kind]
    found = again(encode(JournalEntry(now=5, message=sample)))
    assert msgspec.json.encode(found, enc_hook=plain) == msgspec.json.encode(sample, enc_hook=plain)
    assert type(found) is kind


def test_what_a_worker_measured_comes_back_as_it_was_and_an_older_journal_has_none() -> None:
    measured = (Rehearsed(128, 0, 1, 0.1), Rehearsed(512, 4, 2, 1 / 3), Rehearsed(0, 4, 8, 1e-9))
    line = encode(JournalEntry(now=5, message=WorkerUp(Worker("w", "", rehearsed=measured))))
    found = again(line)
    assert isinstance(found, WorkerUp)
    assert found.worker.rehearsed == measured
    assert all(type(each) is Rehearsed for each in found.worker.rehearsed)
    told = json.loads(line)
    del told["message"]["worker"]["rehearsed"]
    assert again(json.dumps(told).encode()) == WorkerUp(Worker("w", ""))


@pytest.mark.parametrize("usage", ["nan", "inf"])
def test_a_load_that_is_no_number_comes_back_as_it_was(usage: str) -> None:
    report = LoadReport("w", 0, 0, float(usage))
    line = recorded(lambda plane: plane.observe(report, 1))
    assert repr(again(line).kv_usage) == usage


def test_every_field_of_a_request_comes_back_as_it_was() -> None:
    request = Request(
        "r", 100, 7, hashes=np.arange(6, dtype=np.uint64).reshape(3, 2), priority=-2,
        arrival=3, deadline=2**70, tenant="ann", remote=16, hold=True,
        keys={16: np.array([2**64 - 1, 5], dtype=np.uint64)},
        overrides={"temperature": 0.1, "x": float("inf")}, streamed=False, splits=False,
    )  # fmt: skip
    lines: list[bytes] = []
    plane: Any = SimpleNamespace(submit=lambda *_: Queue("r", 0))
    recorder = JournalRecorder(plane, lambda entry: lines.append(encode(entry)))
    recorder.submit(request, 9, frozenset({"b", "a"}))
    found = again(lines[0]).request
    for each in fields(Request):
        was, now = getattr(request, each.name), getattr(found, each.name)
        if each.name == "keys":
            was, now = was[16].tolist(), now[16].tolist()
        elif each.name == "hashes":
            was, now = was.tolist(), now.tolist()
        assert was == now, each.name


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"k":"call"}',
        b'{"k":"what","now":1}',
        b"[1]",
        b'{"k":"call","now":1,"message":{"kind":"what"}}',
        b'{"k":"call","now":1,"message":{"kind":"tick","more":1}}',
        b'{"k":"call","now":1,"message":{"kind":"cache_keyed","worker":"w","events":'
        b'[{"kind":"removed","hashes":"$"}]}}',
    ],
)
def test_what_is_no_entry_is_refused(line: bytes) -> None:
    with pytest.raises(JournalError):
        decode(line)


def test_neither_tokens_nor_addresses_are_written() -> None:
    lines: list[bytes] = []
    plane = ControlPlane(ControlConfig())
    recorder = JournalRecorder(plane, lambda entry: lines.append(encode(entry)))
    recorder.observe(WorkerUp(Worker("w", "http://ann:secret@host:1")), 1)
    event = Stored((77,), None, tuple(range(987_600, 987_616)), 16)
    recorder.observe(CacheChanged("w", (event,)), 2)
    whole = b"".join(lines)
    assert b"9876" not in whole
    assert b"secret" not in whole
    assert b'"stored"' in whole


def events() -> st.SearchStrategy[Any]:
    """Wire and core events over few blocks, so that they meet."""
    name = st.integers(1, 6)

    def stored(names: list[int], parent: int | None, hidden: bool) -> Stored:
        tokens = () if hidden else tuple(t for n in names for t in (n, n + 1))
        return Stored(tuple(names), parent, tokens, 2)

    def words(names: list[int]) -> Any:
        return np.array([[n, n] for n in names], dtype=np.uint64).reshape(-1, 2)

    lists = st.lists(name, min_size=1, max_size=3, unique=True)
    return st.one_of(
        st.builds(stored, lists, st.none() | name, st.booleans()),
        st.builds(lambda n: Removed((n, b"x" * n)), name),
        st.just(Cleared()),
        st.builds(lambda n, p: BlockStored("r", 0, words(n), words(p)), lists,
                  st.lists(name, max_size=1)),
        st.builds(lambda n: BlockRemoved(words(n)), lists),
        st.just(AllBlocksCleared()),
    )  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("ab"), events()), max_size=30))
@settings(max_examples=examples(60))
def test_an_event_without_tokens_means_what_it_meant_with_them(told: list[Any]) -> None:
    plain, keyed = PrefixIndex(max_blocks=8, max_total=12), PrefixIndex(max_blocks=8, max_total=12)
    for worker, event in told:
        keyed.apply(worker, (keyed.keyed(worker, event),))
        plain.apply(worker, (event,))
        assert plain.cache(worker) == keyed.cache(worker)
        assert (plain.keys, plain.blocks) == (keyed.keys, keyed.blocks)
        for n in range(1, 7):
            for member in "ab":
                one = plain._caches.get(member)
                two = keyed._caches.get(member)
                assert (one and one.holdings.key(n)) == (two and two.holdings.key(n))


CONFIGS = [
    ControlConfig(policy="toll", max_inflight=2, max_queued=3),
    ControlConfig(policy="power-of-two", temperature=0.4, seed=3, max_inflight=2,
                  queue_timeout=SECOND // 2, max_queued=2),
    ControlConfig(policy="dynamo", controller={"controller": "bandit"}, admission={"order": "fair"},
                  max_inflight=3),
]  # fmt: skip


class Drive:
    """A driver that does what gateways do, at random, and looks at the fleet as they do."""

    def __init__(self, config: ControlConfig, seed: int) -> None:
        self.entries: list[bytes] = []
        self.plane = ControlPlane(config)
        self.told = JournalRecorder(self.plane, lambda entry: self.entries.append(encode(entry)))
        self.dice = np.random.default_rng(seed)
        self.now = SECOND
        self.up: set[str] = set()
        self.live: list[str] = []
        self.asked: dict[str, Request] = {}

    def step(self) -> None:
        self.now += int(self.dice.integers(1, SECOND // 8))
        if self.dice.random() < 0.3:
            self.plane.status(self.now)
        pick = self.dice.random()
        if pick < 0.35 or not self.live:
            self.submit(f"r{len(self.entries)}")
        elif pick < 0.75:
            self.go_on(self.live[int(self.dice.integers(len(self.live)))])
        elif pick < 0.85:
            self.turn(f"w{int(self.dice.integers(4))}")
        else:
            self.told.tick(self.now)

    def submit(self, name: str, exclude: frozenset[str] = frozenset()) -> None:
        keys = {16: self.dice.integers(1, 4, 3).cumsum().astype(np.uint64)}
        tenant = str(self.dice.choice(["ann", "bob"]))
        request = self.asked.get(name) or Request(
            name, 60, 20, arrival=self.now, tenant=tenant, keys=keys
        )
        self.asked[name] = request
        self.told.submit(request, self.now, exclude)
        if name not in self.live:
            self.live.append(name)

    def go_on(self, name: str) -> None:
        match int(self.dice.integers(5)):
            case 0:
                self.told.observe(PrefillDone(name), self.now)
            case 1:
                self.told.observe(FirstToken(name), self.now)
                report_tokens(self.told, [(name, 1)], self.now)
            case 2:
                report_tokens(self.told, [(name, int(self.dice.integers(1, 9)))], self.now)
            case 3:
                self.told.observe(Ended(name, FinishReason.STOP), self.now)
                self.live.remove(name)
            case 4:
                self.submit(name, frozenset(self.dice.choice(["w0", "w1", "w2"], 2).tolist()))

    def turn(self, name: str) -> None:
        if name in self.up and self.dice.random() < 0.4:
            self.up.discard(name)
            self.told.observe(WorkerDown(name), self.now)
        elif name in self.up:
            event = Stored(tuple(range(1, 4)), None, tuple(range(48)), 16)
            self.told.observe(CacheChanged(name, (event,)), self.now)
            self.told.observe(LoadReport(name, 1, int(self.dice.integers(3)), 0.5), self.now)
        else:
            self.up.add(name)
            role = Role.PREFILL if name == "w0" else Role.BOTH
            events = bool(self.dice.random() < 0.5)
            self.told.observe(WorkerUp(Worker(name, "", role, 16, 64, events=events)), self.now)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.policy)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=examples(12))
def test_a_fresh_plane_decides_as_the_recorded_one(config: ControlConfig, seed: int) -> None:
    drive = Drive(config, seed)
    for name in ("w1", "w2", "w0"):
        drive.turn(name)
    for _ in range(250):
        drive.step()
    fresh = ControlPlane(config)
    decided = 0
    for line in drive.entries:
        entry = decode(line)
        assert isinstance(entry, JournalEntry)
        assert replay_call(fresh, entry) == (entry.out, entry.error)
        decided += len(entry.out)
    assert decided


def test_looking_at_the_fleet_changes_no_estimate() -> None:
    planes = [ControlPlane(ControlConfig(policy="toll")) for _ in range(2)]
    for plane in planes:
        plane.observe(WorkerUp(Worker("w", "")), 1)
        assert isinstance(plane.submit(Request("r", 64, 9), 2), Route)
        plane.tracker.estimates(3)
    planes[0].status(SECOND // 200)
    planes[0].status(SECOND)
    looked, not_looked = (plane.tracker.estimates(SECOND // 150) for plane in planes)
    assert looked.arrivals.tolist() == not_looked.arrivals.tolist()


def test_an_error_is_written_and_comes_again_and_a_refusal_is_not() -> None:
    lines: list[bytes] = []
    plane = ControlPlane(ControlConfig())
    recorder = JournalRecorder(plane, lambda entry: lines.append(encode(entry)))
    with pytest.raises(ConfigError):
        recorder.submit(Request("r", 9, 9, overrides={"what": 1.0}), 1)
    assert not lines
    broken = WorkerUp(Worker("w", "", block_size="x"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x"):
        recorder.observe(broken, 2)
    assert b'"error":"ValueError"' in lines[0]


@pytest.mark.parametrize("policy", sorted(entry_points(group=GROUP).names))
def test_a_journal_has_all_parameters_of_its_policy(policy: str) -> None:
    plane = ControlPlane(ControlConfig(policy=policy))
    config = msgspec.json.decode(msgspec.json.encode(journal_config(plane)), type=ControlConfig)
    infinite = {k for k, v in params_of(plane.router.policy).items() if v == float("inf")}
    assert config.params.keys() == params_of(plane.router.policy).keys() - infinite
    again = ControlPlane(config)
    assert params_of(again.router.policy) == params_of(plane.router.policy)
