"""Configuration of an endpoint picker, and its certificate."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from pigou.config import ConfigError, check_fields, option
from pigou.small_file import read_bytes

_GROUP = "Endpoint picker"
#: Days that a self-signed certificate is valid.
_DAYS = 3650


class EppConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a picker listens, and how it picks."""

    pool: Annotated[
        str,
        option(
            "Endpoints to pick from: a YAML file that is watched, or an InferencePool as "
            "k8s://NAMESPACE/POOL[?events=PORT][&replay=PORT][&api=URL].",
            _GROUP,
        ),
    ] = ""
    listen_host: Annotated[
        str, option("Address for the proxy's gRPC streams.", _GROUP, name="host")
    ] = "127.0.0.1"
    listen_port: Annotated[
        int, option("Port for them; 0 picks a free one.", _GROUP, name="port")
    ] = 9002
    tls_cert: Annotated[
        str, option("PEM file of the certificate; by default a self-signed one is made.", _GROUP)
    ] = ""
    tls_key: Annotated[str, option("PEM file of the certificate's key.", _GROUP)] = ""
    plaintext: Annotated[bool, option("Serve gRPC without TLS.", _GROUP)] = False
    fallbacks: Annotated[
        int, option("Maximum of endpoints to try after the chosen one, cheapest first.", _GROUP)
    ] = 3
    objectives: Annotated[
        dict[str, float],
        option(
            "Priorities of inference objectives: NAME=priority[,NAME=priority]...; higher goes "
            "first, below 0 is shed in place of waiting, 0 for the others.",
            _GROUP,
            form="weights",
        ),
    ] = {}
    isolate_tenants: Annotated[
        bool,
        option(
            "Share no cached blocks between fairness ids: each gets its own cache_salt.", _GROUP
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields(self, "listen_port", ge=0, le=65535)
        check_fields(self, "fallbacks", ge=0, le=64)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together; give both, or neither")
        if self.plaintext and self.tls_cert:
            raise ConfigError("plaintext is given, and tls_cert; leave one of the two out")
        for name, priority in self.objectives.items():
            if not isinstance(priority, int) and priority != int(priority):
                raise ConfigError(f"objectives: {name} has {priority}; give a whole number")


def certificate(config: EppConfig) -> tuple[bytes, bytes]:
    """Return key and certificate, PEM: the given ones, or a new self-signed pair."""
    try:
        if config.tls_cert:
            return read_bytes(config.tls_key), read_bytes(config.tls_cert)
    except OSError as error:
        raise ConfigError(f"tls_cert or tls_key cannot be read: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        key, cert = Path(folder, "key.pem"), Path(folder, "cert.pem")
        command = [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-subj", "/CN=pigou-epp", "-days", str(_DAYS),
            "-keyout", str(key), "-out", str(cert),
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"no self-signed certificate could be made ({error}): install openssl, give "
                "tls_cert and tls_key, or plaintext"
            ) from None
        return read_bytes(key), read_bytes(cert)
