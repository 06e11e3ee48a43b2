"""The recorder: a ControlPlane whose calls are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pigou.config import ConfigError
from pigou.control.journal import Cache, Entry, Tick, observed, shown, submitted, told
from pigou.control.messages import Action, CacheChanged, Decision, Observation
from pigou.control.plane import ControlPlane
from pigou.request import Request

_T = TypeVar("_T")


class Driven(Protocol):
    """What drives a ControlPlane calls of it."""

    def submit(self, request: Request, now: int, exclude: frozenset[str] = ...) -> Decision:
        """As `ControlPlane.submit`."""
        ...

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """As `ControlPlane.observe`."""
        ...

    def tick(self, now: int) -> Sequence[Action]:
        """As `ControlPlane.tick`."""
        ...


class Recorder:
    """Makes each call, and then gives its entry to `write`, also when it raised."""

    def __init__(self, plane: ControlPlane, write: Callable[[Entry], None]) -> None:
        self._plane = plane
        self._write = write

    def submit(self, request: Request, now: int, exclude: frozenset[str] = frozenset()) -> Decision:
        """As `ControlPlane.submit`; what is refused at once changes nothing, and is not written."""
        entry = submitted(request, now, exclude)
        decision = self._made(entry, lambda: self._plane.submit(request, now, exclude))
        entry.out = shown([decision])
        self._write(entry)
        return decision

    def observe(self, observation: Observation, now: int) -> Sequence[Decision]:
        """As `ControlPlane.observe`; of KV events the keys are written, not the tokens."""
        if isinstance(observation, CacheChanged):
            return self._cache(observation, now)
        entry = observed(observation, now)
        decisions = self._made(entry, lambda: self._plane.observe(observation, now))
        entry.out = shown(decisions)
        self._write(entry)
        return decisions

    def tick(self, now: int) -> Sequence[Action]:
        """As `ControlPlane.tick`."""
        entry = Tick(now=now)
        actions = self._made(entry, lambda: self._plane.tick(now))
        entry.out = shown(actions)
        self._write(entry)
        return actions

    def _cache(self, changed: CacheChanged, now: int) -> Sequence[Decision]:
        """Apply events one by one: what the next one's key is depends on those before."""
        entry = Cache(now=now, worker=changed.worker, events=[])

        def apply() -> list[Decision]:
            found = [*self._plane.observe(CacheChanged(changed.worker, ()), now)]
            for event in changed.events:
                keyed = self._plane.index.keyed(changed.worker, event)
                entry.events.append(told(keyed))
                found += self._plane.observe(CacheChanged(changed.worker, (keyed,)), now)
            return found

        decisions = self._made(entry, apply)
        entry.out = shown(decisions)
        self._write(entry)
        return decisions

    def _made(self, entry: Entry, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except ConfigError:
            raise
        except Exception as error:
            entry.error = type(error).__name__
            self._write(entry)
            raise
