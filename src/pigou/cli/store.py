"""`pigou store`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from pigou.cli.option_values import check_port
from pigou.config import check_fields, option
from pigou.kv.tier_config import StoreTier


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of `pigou store`."""

    tiers: Annotated[tuple[StoreTier, ...], option(
        "Tier, nearest first: NAME=SIZE[@PLACE][,policy=price], as host=8GiB or "
        "disk=1TiB@/DIR. Repeatable.", "Storage", name="tier", form="entries",
    )]  # fmt: skip
    quotas: Annotated[dict[str, int], option(
        "Quota of a cache salt: SALT=SIZE, as alice=20GiB. Repeatable.", "Storage", name="quota",
        form="sizes",
    )] = {}  # fmt: skip
    default_quota: Annotated[
        int, option("Quota of other salts, as 5GiB; 0 for none.", "Storage", form="size")
    ] = 0
    page: Annotated[int, option("Unit of storage, as 1MiB.", "Storage", form="size")] = 1 << 20
    max_value: Annotated[int, option("Largest value.", "Storage", form="size")] = 64 << 20
    host: Annotated[str, option("Address to listen on.", "Server")] = "127.0.0.1"
    port: Annotated[int, option("Port of the Redis protocol.", "Server")] = 6380
    metrics_port: Annotated[int, option("Port of /metrics and /health.", "Server")] = 6381
    password: Annotated[str, option("Password that clients give.", "Server")] = ""
    connections: Annotated[int, option("Most connections.", "Server")] = 256
    buffers: Annotated[
        int, option("Values in transfer, each up to --max-value; others wait.", "Server")
    ] = 8

    def __post_init__(self) -> None:
        check_fields(self, "page", "max_value", "connections", "buffers", ge=1)
        check_fields(self, "default_quota", ge=0)


def store(config: StoreConfig) -> None:
    """Keep KV of other engines: a server with eviction by price, and quotas."""
    from pigou.integrations.store_server import StoreServer, serve
    from pigou.runtime.stores.page_store import ValueStore

    for port in (config.port, config.metrics_port):
        check_port(config.host, port)
    values = ValueStore.open(
        config.tiers, config.page, config.max_value,
        quotas=config.quotas, default_quota=config.default_quota or None,
    )  # fmt: skip
    server = StoreServer(values, config.password, config.connections, config.buffers)
    try:
        asyncio.run(serve(server, values.store, config.host, (config.port, config.metrics_port)))
    except OSError as error:
        typer.echo(f"pigou store: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        values.store.close()
