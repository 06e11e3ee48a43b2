"""`pigou fleet` and `pigou operator`: changes of a running fleet, and fleets in Kubernetes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pigou.config import ConfigError, RunError, is_http_url
from pigou.fleet.kubernetes.definitions import OperatorConfig, definitions_yaml
from pigou.logs import configure
from pigou.registry import require
from pigou.wire.errors import DECODING_ERRORS

fleet = typer.Typer(
    help="List and change the workers of a running gateway.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_TIMEOUT_S, _MAX_ANSWER_BYTES = 30.0, 2**23
#: Columns of the table, by the fields of `/workers`.
_COLUMNS = {
    "id": "id", "role": "role", "state": "state", "pool": "pool", "epoch": "epoch",
    "decode_requests": "streams", "prefill_requests": "prefills", "note": "note",
}  # fmt: skip

Url = Annotated[str, typer.Argument(help="URL of the gateway, as http://HOST:8000.")]
WorkerId = Annotated[str, typer.Argument(help="Worker id, as in `pigou fleet list`.")]
AdminKey = Annotated[
    str,
    typer.Option("--api-key", "--key", help="Administrator's API key, if the gateway has keys."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the gateway's reply as JSON.")]
LimitS = Annotated[
    float | None,
    typer.Option(
        "--limit",
        help="Seconds for its requests to finish; the others migrate. By default the gateway's "
        "--drain.",
    ),
]


@fleet.command("list")
def list_(url: Url, key: AdminKey = "", json: Json = False) -> None:
    """List the workers: role, state, pool, streams and prefills."""
    answer = ask(url, key, "GET", "/workers")
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
        return
    table = Table(*_COLUMNS.values())
    for row in answer["workers"]:
        table.add_row(*(str(row.get(name, "")) for name in _COLUMNS))
    Console(soft_wrap=True).print(table)


@fleet.command("add")
def add(
    url: Url,
    role: Annotated[
        Literal["prefill", "decode", "both"] | None,
        typer.Option(help="Role of the local workers to start."),
    ] = None,
    count: Annotated[int, typer.Option(help="Number of workers to start.")] = 1,
    model: Annotated[str, typer.Option(help="Model that they serve, in a fleet of several.")] = "",
    attach: Annotated[
        str, typer.Option(help="Running server to use, as in `pigou serve --attach`.")
    ] = "",
    key: AdminKey = "",
    json: Json = False,
) -> None:
    """Start local workers, or attach a server."""
    if (role is None) == (not attach):
        raise ConfigError("give --role or --attach, and only one of them")
    if attach and count != 1:
        raise ConfigError(f"--count is {count}, and --attach takes one server")
    if attach and model:
        raise ConfigError(f"--model is {model}, and a server that is attached says its own")
    body: dict[str, Any] = {"attach": attach} if attach else {"role": role, "count": count}
    body |= {"model": model} if model else {}
    _change(url, key, json, "/workers", body)


@fleet.command("drain")
def drain(
    url: Url, worker: WorkerId, limit_s: LimitS = None, key: AdminKey = "", json: Json = False
) -> None:
    """Drain a worker: it finishes its streams, then leaves the fleet."""
    _change(url, key, json, _path(worker, "/drain"), _limited(limit_s))


@fleet.command("flip")
def flip(
    url: Url,
    worker: WorkerId,
    role: Annotated[Literal["prefill", "decode", "both"], typer.Option(help="New role.")],
    limit_s: LimitS = None,
    key: AdminKey = "",
    json: Json = False,
) -> None:
    """Drain a worker, then let it serve in another role."""
    _change(url, key, json, _path(worker, "/flip"), {"role": role} | _limited(limit_s))


@fleet.command("restart")
def restart(
    url: Url, worker: WorkerId, limit_s: LimitS = None, key: AdminKey = "", json: Json = False
) -> None:
    """Drain a local worker, then restart it."""
    _change(url, key, json, _path(worker, "/restart"), _limited(limit_s))


@fleet.command("remove")
def remove(
    url: Url,
    worker: WorkerId,
    now: Annotated[
        bool, typer.Option("--now", help="Remove it at once; its streams migrate.")
    ] = False,
    key: AdminKey = "",
    json: Json = False,
) -> None:
    """Remove a worker after a drain, or at once."""
    path = _path(worker, "?now=true" if now else "")
    _change(url, key, json, path, None, method="DELETE")


def _path(worker: str, rest: str) -> str:
    return f"/workers/{quote(worker, safe='')}{rest}"


def _limited(limit_s: float | None) -> dict[str, Any]:
    return {} if limit_s is None else {"limit_s": limit_s}


def _change(url: str, key: str, json: bool, path: str, body: Any, method: str = "POST") -> None:
    answer = ask(url, key, method, path, body)
    if json:
        typer.echo(msgspec.json.encode(answer).decode())
    else:
        for row in answer["workers"]:
            typer.echo(f"{row['id']} is {row['state']}, role {row['role']}")
    if refused := answer.get("refused"):
        raise RunError(refused)


def ask(url: str, key: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Return what a gateway or a worker answers; raises ConfigError or RunError for an error."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    if not is_http_url(url):
        raise ConfigError(f"{url!r} is no URL; write for example http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    data = None
    if body is not None:
        headers["content-type"] = "application/json"
        data = msgspec.json.encode(body)
    try:
        with urlopen(
            Request(base + path, data, headers, method=method), timeout=_TIMEOUT_S
        ) as response:
            answer: dict[str, Any] = msgspec.json.decode(
                response.read(_MAX_ANSWER_BYTES), type=dict[str, Any]
            )
            return answer
    except HTTPError as error:
        message = _message(error.read(_MAX_ANSWER_BYTES)) or f"{base} answered {error.code}"
        raise (ConfigError if error.code == 400 else RunError)(message) from None
    except (URLError, HTTPException, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{base}: {getattr(error, 'reason', error)}") from None


def _message(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except DECODING_ERRORS:
        return ""
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def operator(config: OperatorConfig) -> None:
    """Keep the fleets of a Kubernetes cluster as their `PigouFleet` objects specify."""
    if config.definitions:
        typer.echo(definitions_yaml(), nl=False)
        return
    require("k8s", "the operator")
    from pigou.fleet.kubernetes.operator import FleetOperator

    configure(config.log_format, config.log_level, access=False)
    asyncio.run(FleetOperator(config).serve())
