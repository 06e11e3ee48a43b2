"""Connections to NATS servers that ask for TLS, certificates and logins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.lib.certificates import Certificates
from tests.lib.server_process import ServerProcess, nats_server

from pigou.config import ConfigError
from pigou.fleet.nats_connection import NatsAddress, connect_nats
from pigou.fleet.peers.bus import BusError, NatsBus, PeersConfig
from pigou.fleet.prefill_queue.broker import BrokerUnavailable, PrefillBroker
from pigou.fleet.prefill_queue.messages import QueueAddress
from pigou.fleet.registry.record_store import RegistryUnavailable
from pigou.fleet.registry.registry import open_store

pytest.importorskip("nats")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, own: Certificates) -> Iterator[ServerProcess]:
    """A server that asks for a certificate of the same authority, and for a password."""
    options = ("--tls", "--tlscert", str(own.cert), "--tlskey", str(own.key), "--tlsverify",
               "--tlscacert", str(own.ca), "--user", "me", "--pass", "a word")  # fmt: skip
    with nats_server(tmp_path_factory.mktemp("nats"), options) as server:
        yield server


def url(server: ServerProcess, files: str, user: str = "me:a%20word@", path: str = "") -> str:
    return f"tls://{user}127.0.0.1:{server.port}{path}?{files}"


def files_of(own: Certificates, *names: str) -> str:
    return "&".join(f"{name}={getattr(own, name)}" for name in names)


async def until_connected(connect: Callable[[], Awaitable[None]]) -> None:
    """Connect as their owners do, who try again: a busy machine may take 2 s for a handshake."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await connect()
            except (BusError, BrokerUnavailable):
                await asyncio.sleep(0.1)


def test_registry_bus_and_queue_connect_by_tls_with_certificate_and_password(
    secured: ServerProcess, own: Certificates
) -> None:
    files = files_of(own, "ca", "cert", "key")

    async def run() -> None:
        heard: list[bytes] = []
        buses = [
            NatsBus(PeersConfig(peers=url(secured, files)).address(), "test") for _ in range(2)
        ]
        for bus in buses:
            await until_connected(lambda bus=bus: bus.connect(heard.append, lambda: None))
        async with asyncio.timeout(60):
            while not heard:  # a bus that connects anew loses what is sent meanwhile
                await buses[0].publish("g.1", b"hello")
                await asyncio.sleep(0.1)
        assert set(heard) == {b"hello"}
        for bus in buses:
            await bus.close()
        broker = PrefillBroker(QueueAddress.parse(url(secured, files, path="/q")))
        await until_connected(broker.connect)
        assert not await broker.stored(">")
        await broker.close()
        store = open_store(url(secured, files, path="/fleet"))
        await store.put("w0", b"here", 5.0, None)
        assert set(await store.records()) == {"w0"}
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("names", "user"),
    [(("ca",), "me:a%20word@"), (("cert", "key"), "me:a%20word@"),
     (("ca", "cert", "key"), "me:wrong@"), (("ca", "cert", "key"), "")],
    ids=["no certificate", "an unknown authority", "a wrong password", "no password"],
)  # fmt: skip
def test_who_is_not_trusted_is_told_so_and_does_not_wait(
    secured: ServerProcess, own: Certificates, names: tuple[str, ...], user: str
) -> None:
    files = files_of(own, *names)

    async def run() -> None:
        bus = NatsBus(PeersConfig(peers=url(secured, files, user)).address(), "test")
        broker = PrefillBroker(QueueAddress.parse(url(secured, files, user, "/q")))
        store = open_store(url(secured, files, user, "/fleet"))
        async with asyncio.timeout(60):
            with pytest.raises(BusError):
                await bus.connect(print, lambda: None)
            with pytest.raises(BrokerUnavailable):
                await broker.connect()
            with pytest.raises(RegistryUnavailable):
                await store.records()

    asyncio.run(run())


def test_a_server_without_tls_is_told_no_password(tmp_path: Path) -> None:
    with nats_server(tmp_path, ("--user", "me", "--pass", "word", "-DV")) as server:
        address = NatsAddress.parse([f"tls://me:word@127.0.0.1:{server.port}"], "peers")
        with pytest.raises(Exception, match="secure connection"):
            asyncio.run(connect_nats(address, 0.2))
        log = (tmp_path / "nats-server.log").read_text()
    assert "CONNECT" not in log


@pytest.mark.parametrize("error", [b"INFO\r\n", b"-ERR 'maximum connections exceeded'\r\n"])
def test_a_client_that_cannot_connect_again_is_closed_or_goes_on(error: bytes) -> None:
    """nats-py's own task ended at the first, and the client was neither connected nor closed."""

    async def run() -> None:
        answers = [b'INFO {"max_payload": 1000}\r\n', error, b'INFO {"max_payload": 1000}\r\n']

        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answers.pop(0) if answers else b"")
            with suppress(OSError):
                while (line := await reader.readline()) and line != b"PING\r\n":
                    pass
                writer.write(b"PONG\r\n")
                await writer.drain()
                if len(answers) > 1:
                    await asyncio.sleep(0.05)
                    writer.close()
                await reader.read()

        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await connect_nats(NatsAddress.parse([f"nats://127.0.0.1:{port}"], "peers"), 0.05)
        async with asyncio.timeout(60):
            while len(answers) > 1 or not (client.is_closed or client.is_connected):
                await asyncio.sleep(0.01)
        await client.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nats://h?ca=x", "write tls://"),
        ("tls://h?ca=/nowhere/ca.pem", "no readable PEM"),
        ("tls://h?cert=x", "give both"),
        ("tls://h?creds=x", "parameter 'creds'"),
        ("tls://h,nats://i", "for all servers"),
        ("nats://a:b@h,nats://c:d@i", "several logins"),
    ],
)
def test_what_cannot_be_honoured_is_refused(text: str, message: str, own: Certificates) -> None:
    text = text.replace("ca=x", f"ca={own.ca}")
    with pytest.raises(ConfigError, match=message):
        PeersConfig(peers=text)
    first = text.partition(",")[0]
    if first == text:
        server, _, query = text.partition("?")
        for parse in (QueueAddress.parse, open_store):
            with pytest.raises(ConfigError):
                parse(f"{server}/name?{query}")
