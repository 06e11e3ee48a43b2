"""Files of TLS: whom a client trusts, and what it shows."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import msgspec

from pigou.config import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files; empty for none.

    Attributes:
        cert, key: certificate of the client, and its key.
    """

    ca: str = ""  # certificates that are trusted, in place of the system's
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, files: Mapping[str, str], what: str) -> TlsFiles:
        """Read the parameters of a URL.

        Args:
            files: paths by name.
            what: option that has the URL, for messages.

        Raises:
            ConfigError: a name is unknown, the key lacks, or a file cannot be read as such.
        """
        unknown = set(files) - set(cls.__struct_fields__)
        if unknown:
            names = ", ".join(cls.__struct_fields__)
            raise ConfigError(
                f"{what} has the parameter {min(unknown)!r}; of the connection there are {names}"
            )
        tls = cls(**files)
        if bool(tls.cert) != bool(tls.key):
            raise ConfigError(f"{what} has one of cert and key; give both, or none")
        try:
            tls.context()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{what}: ca, cert or key is no readable PEM file: {error}"
            ) from error
        return tls

    def context(self) -> ssl.SSLContext:
        """Return what checks servers by certificate and host name, and shows the client's."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context
