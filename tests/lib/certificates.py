"""Certificates for servers on loopback, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


class Certificates:
    """An authority and a certificate of it for 127.0.0.1, for server and client; PEM files."""

    def __init__(self, folder: Path) -> None:
        """Make them in a folder; skip the test where there is no `openssl`."""
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command")
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.cert, self.key = (folder / f"{name}.pem" for name in ("ca", "cert", "key"))
        ca_key, request, names = (folder / name for name in ("ca.key", "request", "names"))
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl(*new, "-x509", "-subj", "/CN=a test's authority", "-days", "2", "-keyout", ca_key,
                 "-out", self.ca)  # fmt: skip
        _openssl(*new, "-subj", "/CN=a test's server", "-keyout", self.key, "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", ca_key, "-days", "2",
                 "-CAcreateserial", "-extfile", names, "-out", self.cert)  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
