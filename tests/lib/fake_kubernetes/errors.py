"""What an API server answers when it refuses."""

from __future__ import annotations

from typing import Any

_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    405: "MethodNotAllowed", 409: "Conflict", 410: "Expired", 415: "UnsupportedMediaType",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable",
}  # fmt: skip


class ApiError(Exception):
    """A refusal: HTTP code, reason and message."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason or _REASONS[code]

    def status(self) -> dict[str, Any]:
        """Return the `Status` object of the answer's body."""
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": str(self), "reason": self.reason, "code": self.code,
        }  # fmt: skip
