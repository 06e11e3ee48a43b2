"""How a worker fails a request."""

from __future__ import annotations


class WorkerFailed(Exception):
    """A worker could not serve a request; another one may.

    Attributes:
        reason: one word for the metrics: connect, broke, down, garbage, refused, error, abort.
        workers: ids of those that are not to be asked again first.
        status: HTTP status that the worker answered with, 0 when it did not answer.
        body: what it answered, empty when nothing useful.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        workers: frozenset[str] = frozenset(),
        *,
        status: int = 0,
        body: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.workers = workers
        self.status = status
        self.body = body


class Rejected(Exception):
    """A worker refused a request for what is in it; every worker would.

    Attributes:
        status: HTTP status, 4xx.
        body: the worker's answer, JSON.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the worker answered {status}")
        self.status = status
        self.body = body
