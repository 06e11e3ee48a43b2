"""The id that a client gives its request: `X-Request-Id`, or the field `request_id`."""

from __future__ import annotations

import re
import secrets

from pigou.wire.errors import bad_request

#: Header of a request that carries its id, and of the reply that tells it again.
HEADER = "X-Request-Id"
_ID = re.compile(r"[\x21-\x7e]{1,256}")


def request_id(header: str | None, field: str | None) -> str:
    """Return a request's id, a new one where the client gave none.

    Args:
        header: the client's `X-Request-Id`, which goes first.
        field: `request_id` of its body.

    Raises:
        APIError: 400, it is empty, too long, or has other characters than printable ASCII.
    """
    given = header or field
    if given is None:
        return secrets.token_hex(8)
    if not _ID.fullmatch(given):
        raise bad_request(
            f"The request id {given[:60]!r} must have 1 to 256 printable ASCII characters, and no "
            "spaces.",
            "request_id",
        )
    return given


def echo(header: str | None) -> dict[str, str]:
    """Return the headers of a reply that tell the client's id again; none for what is no id."""
    return {HEADER: header} if header is not None and _ID.fullmatch(header) else {}
