"""Degraded modes: when a gateway answers with less, by queue wait and shed share.

A mode begins once a pressure is at its `enter` threshold, and ends once all are at most at their
`leave` thresholds for `hold_s`. Between the thresholds it stays as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.request import SECOND

#: Modes: answer from the cache, ask a smaller model, or shorten answers.
Mode = Literal["cached", "model", "max_tokens"]
#: Seconds of decisions that the shed share is of.
SHED_WINDOW_S = 10
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class DegradedMode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mode as `--degrade MODE[,key=value]...` gives it."""

    name: Mode
    wait_s: float = 0.0  # queue wait from which it is on; 0 for none
    leave_wait_s: float = -1.0  # at most this, and it ends; by default half of `wait_s`
    shed: _Share | None = None  # share of requests shed from which it is on
    leave_shed: float = 0.0  # at most this, and it ends
    hold_s: float = 10.0  # for this time below, before it ends
    limit: int = 0  # most output tokens; of `max_tokens`
    to: str = ""  # model that answers instead; of `model`
    classes: str = ""  # workload classes that it is for, NAME+NAME; "" for all requests

    def __post_init__(self) -> None:
        what = f"degrade: {self.name}"
        check_bounds(f"{what}: wait_s", self.wait_s, ge=0)
        check_bounds(f"{what}: hold_s", self.hold_s, ge=0)
        if not self.wait_s and self.shed is None:
            raise ConfigError(f"{what} has neither wait_s nor shed; give wait_s=2 or shed=0.05")
        if self.wait_s and self.leave_wait >= self.wait_s:
            raise ConfigError(
                f"{what}: leave_wait_s is {self.leave_wait_s}; it must be below wait_s"
            )
        if self.shed is not None and not 0 <= self.leave_shed < self.shed:
            raise ConfigError(f"{what}: leave_shed is {self.leave_shed}; it must be below shed")
        for key, mode in (("limit", "max_tokens"), ("to", "model")):
            if bool(getattr(self, key)) != (self.name == mode) or self.limit < 0:
                value = getattr(self, key)
                raise ConfigError(
                    f"{what}: {key} is {value!r}; {mode} needs one, and no other mode takes it"
                )

    @property
    def leave_wait(self) -> float:
        """Seconds of queue wait at which it ends."""
        return self.wait_s / 2 if self.leave_wait_s < 0 else self.leave_wait_s

    def begins(self, wait_s: float, shed: float) -> bool:
        """True if a pressure is at its threshold."""
        is_long = self.wait_s > 0 and wait_s >= self.wait_s
        return is_long or (self.shed is not None and shed >= self.shed)

    def may_end(self, wait_s: float, shed: float) -> bool:
        """True if all pressures are low enough."""
        is_long = self.wait_s > 0 and wait_s > self.leave_wait
        return not is_long and (self.shed is None or shed <= self.leave_shed)

    def serves(self, workload: str) -> bool:
        """True if the mode is for a request's class."""
        return not self.classes or workload in self.classes.split("+")


class ShedMeter:
    """Share of decisions in the last `SHED_WINDOW_S` seconds that refused a request."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, list[int]] = OrderedDict()  # decided and shed, by second

    def decided(self, now: int, *, shed: bool) -> None:
        """Count a decision at `now` (ns)."""
        slot = self._slots.setdefault(now // SECOND, [0, 0])
        slot[0] += 1
        slot[1] += shed

    def share(self, now: int) -> float:
        """Return the share at `now` (ns); 0 without decisions."""
        while self._slots and next(iter(self._slots)) <= now // SECOND - SHED_WINDOW_S:
            self._slots.popitem(last=False)
        decided = sum(slot[0] for slot in self._slots.values())
        return sum(slot[1] for slot in self._slots.values()) / decided if decided else 0.0


class Degradation:
    """Which modes are on; update it several times a second."""

    def __init__(self, modes: Sequence[DegradedMode] = ()) -> None:
        if len({mode.name for mode in modes}) < len(modes):
            raise ConfigError("degrade has a mode twice; give each once")
        self.modes = {mode.name: mode for mode in modes}
        self.meter = ShedMeter()
        self._on: dict[Mode, int] = {}  # since when the pressure was last too high

    def update(self, now: int, wait_s: float) -> None:
        """Take the wait of the oldest queued request at `now` (ns)."""
        shed = self.meter.share(now)
        for name, mode in self.modes.items():
            if mode.begins(wait_s, shed) or (name in self._on and not mode.may_end(wait_s, shed)):
                self._on[name] = now
            elif name in self._on and now - self._on[name] >= mode.hold_s * SECOND:
                del self._on[name]

    def is_on(self, name: Mode) -> bool:
        """True if a mode is on."""
        return name in self._on

    def active(self, name: Mode, workload: str = "") -> DegradedMode | None:
        """Return a mode if it is on for a request's class; None if not."""
        mode = self.modes.get(name)
        return mode if mode is not None and name in self._on and mode.serves(workload) else None
