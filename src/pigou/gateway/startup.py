"""The time until a fleet can serve: what clients are told meanwhile, and how far it is."""

from __future__ import annotations

from collections.abc import Callable

from pigou.wire.errors import APIError

#: Seconds after which a client may try again.
RETRY_AFTER = 2

#: Takes the name of a part (a worker, or the gateway) and its stage.
StageListener = Callable[[str, str], None]


class Startup:
    """Knows the stage of each part of a fleet that starts.

    Attributes:
        active: whether the fleet is still starting.
        stages: the last stage of each part, by its name.
    """

    def __init__(self, listener: StageListener | None = None) -> None:
        """Not starting yet; `listener` gets each stage."""
        self.active = False
        self.stages: dict[str, str] = {}
        self._listener = listener

    def report(self, part: str, stage: str) -> None:
        """A part came to another stage."""
        if self.stages.get(part) == stage:
            return
        self.stages[part] = stage
        if self.active and self._listener is not None:
            self._listener(part, stage)

    def check(self, can_serve: bool) -> None:
        """Refuse a request that would have to wait for the start.

        Args:
            can_serve: whether a worker that decodes is up.

        Raises:
            APIError: 503, with the stages and a Retry-After.
        """
        if not self.active or can_serve:
            return
        stages = "; ".join(f"{part}: {stage}" for part, stage in self.stages.items())
        raise APIError(
            503,
            f"The fleet is starting ({stages or 'no worker has begun'}); send the request again "
            f"in {RETRY_AFTER} seconds.",
            retry_after=RETRY_AFTER,
        )
