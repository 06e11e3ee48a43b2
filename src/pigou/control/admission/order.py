"""The protocol of orders, and how they are found by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from pigou.config import ConfigError, named
from pigou.control.admission.waiting import Waiting
from pigou.request import Request

GROUP = "pigou.admission"
#: The key of `ControlConfig.admission` that names the order; the others are its parameters.
NAME = "order"


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of an order without parameters."""


class Order(Protocol):
    """Who of the waiting requests goes next.

    Every request goes through it, also one that finds room at once: `add`, `first`, `taken`.

    Attributes:
        params: parameters, a frozen `msgspec.Struct`; the class is called with one.
        holds_back: whether the order is void unless next to nothing waits inside the workers.
        reserve: share of each worker that is closed to tenants above their part of the fleet.
        refuses_late: whether a newcomer is refused whose deadline cannot be met any more.
    """

    Params: ClassVar[type[msgspec.Struct]]
    holds_back: ClassVar[bool]
    refuses_late: ClassVar[bool]

    @property
    def reserve(self) -> float:
        """As the parameters have it."""
        ...

    def add(self, waiting: Waiting) -> None:
        """A request begins to wait."""
        ...

    def remove(self, waiting: Waiting) -> None:
        """A request waits no more, and was not served."""
        ...

    def first(self, now: int) -> Waiting | None:
        """Return who goes next, and stays until it is removed or taken; None when nobody waits."""
        ...

    def last(self, waiting: Waiting, most: int, own: bool) -> list[Waiting]:
        """Return those that may be shed so that a newcomer can wait, the least urgent first.

        All of them are less urgent than the newcomer. An order without this method sheds nobody.

        Args:
            waiting: the newcomer, which was not added.
            most: requests to return at most.
            own: only those of its own tenant.
        """
        ...

    def taken(self, waiting: Waiting, uncached: int) -> None:
        """A request was sent to a worker that has `uncached` tokens of its prompt to compute."""
        ...

    def served(self, request: Request, tokens: int) -> None:
        """So many output tokens of a routed request came."""
        ...

    def behind(self, waiting: Waiting) -> bool:
        """Whether its tenant had so much less than others that it is above its part in nothing."""
        ...

    def priority(self, waiting: Waiting, above: bool) -> int | None:
        """Return the priority that workers are sent, None for the client's own.

        `above`: its tenant has more than its part of the fleet.
        """
        ...


def load(chosen: Mapping[str, Any]) -> Order:
    """Return a new order, by its name in the entry point group `pigou.admission`.

    Args:
        chosen: `order` is its name, the rest its parameters.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), or it
            has no such parameter.
    """
    values = dict(chosen)
    name = values.pop(NAME, None)
    kind = named(GROUP, name, "admission order")
    try:
        params = msgspec.convert(values, kind.Params, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.Params.__struct_fields__) or "none"
        raise ConfigError(
            f"admission order {name!r}: {_lower(str(error))}; its parameters: {known}"
        ) from None
    order: Order = kind(params)
    return order


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
