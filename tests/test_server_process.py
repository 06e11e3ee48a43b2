"""Servers that tests run: they start, are killed, and start again on the same port and data."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lib.server_process import ServerProcess, etcd_server, nats_server


@pytest.mark.parametrize("make", [nats_server, etcd_server])
def test_a_server_starts_again_on_its_port_after_a_kill(
    make: Callable[[Path], ServerProcess], tmp_path: Path
) -> None:
    server = make(tmp_path)
    with server:
        server.kill()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0
        server.start()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60.0):
            pass
