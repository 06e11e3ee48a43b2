"""Failures of workers, and the errors that clients get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pigou.control.messages import Shed
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.request import SECOND
from pigou.wire.errors import DECODING_ERRORS, NO_RETRY, REQUEST_FAILED, SUSPECT, APIError


class WorkerFailed(Exception):
    """A worker could not serve a request; another one may."""

    def __init__(
        self,
        reason: str,
        message: str,
        workers: frozenset[str] = frozenset(),
        *,
        status: int = 0,
        body: bytes = b"",
        fate: Callable[[], Awaitable[WorkerEnd]] | None = None,
    ) -> None:
        super().__init__(message)
        # one word for the metrics: connect, broke, down, drained, garbage, refused, error, abort
        self.reason = reason
        self.workers = workers  # ids of workers that a retry avoids at first
        self.status = status  # HTTP status that the worker answered with, 0 when it did not answer
        self.body = body
        self.fate = fate  # returns how the worker ended, if it did; None if unknown

    @property
    def may_be_death(self) -> bool:
        """True if the request was under way and the worker may have died."""
        died = self.reason in ("broke", "down", "error")
        return died or (self.reason == "refused" and self.status == 500)


class Rejected(APIError):
    """A worker rejected a request as invalid; every worker would."""

    def __init__(self, status: int, answer: bytes) -> None:
        """Pass on an answer of status 4xx, or 500 where its content made the engine fail."""
        super().__init__(status, f"the worker answered {status}", type=REQUEST_FAILED)
        self.answer = answer

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response beside its body."""
        return NO_RETRY

    def body(self) -> bytes:
        """Return the worker's JSON body."""
        return self.answer


def busy(shed: Shed) -> APIError:
    """Return the error for a shed request: 429 if its tenant's share is full, else 503."""
    return APIError(
        429 if shed.tenant else 503,
        f"The fleet is busy: {shed.reason}. Try again later.",
        retry_after=max(1, -(-shed.retry_after // SECOND)),
    )


def surrender(failure: WorkerFailed) -> APIError:
    """Return the error after the last failed attempt."""
    if failure.status == 503:
        message = "All workers that could serve this request are busy. Try again later."
        return APIError(503, message, retry_after=1)
    return APIError(502, f"No worker could finish this request; the last failure: {failure}.")


def unknown_model(name: str | None, listed: str = "") -> APIError:
    """Return the error for an unknown model; `listed` are the served names."""
    others = f" Valid aliases: {listed}." if listed else ""
    return APIError(
        404, f"The model `{str(name)[:80]}` does not exist.{others}", "model", final=True
    )


def suspect(wire_id: str, deaths: Sequence[str]) -> APIError:
    """Return the error for a request under which these workers died."""
    return APIError(
        502,
        f"Request {wire_id} was under way when {len(deaths)} workers ended "
        f"({', '.join(deaths)}); it may be what ends them, and is not sent again. The gateway's "
        "log says more.",
        type=SUSPECT,
        final=True,
    )


class _Body(msgspec.Struct):
    type: str = ""


class _Failure(msgspec.Struct):
    error: _Body


def is_request_failure(body: bytes) -> bool:
    """True if an error body reports a failure of this request alone."""
    try:
        return msgspec.json.decode(body, type=_Failure).error.type == REQUEST_FAILED
    except DECODING_ERRORS:
        return False
