"""Opens the registry of a URL; only the backend that is named is loaded."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from pigou.config import ConfigError
from pigou.fleet.nats_address import public_address
from pigou.fleet.registry.record_store import RecordStore
from pigou.fleet.registry.registry import Registry
from pigou.imports import require
from pigou.wire.addresses import is_loopback
from pigou.wire.fleet_secret import FleetSecret

#: Forms of the URL, for messages.
FORMS = (
    "memory://NAME, file:///FOLDER, etcd://HOST:PORT/PREFIX, nats://HOST:PORT[/BUCKET] "
    "(or tls://), or k8s://NAMESPACE?selector=LABELS"
)
#: Scheme -> extra that its client is in.
_EXTRAS = {"etcd": "etcd", "nats": "nats", "tls": "nats"}


def open_registry(url: str, secret: FleetSecret | None = None) -> Registry:
    """Return the registry of a URL; nothing is connected yet.

    Args:
        url: in one of `FORMS`.
        secret: of the fleet, which signs entries; None takes unsigned ones.

    Raises:
        ConfigError: the URL is not understood, the extra of its backend is not installed, or
            other machines reach the registry and there is no secret.
    """
    store = open_store(url)
    parts = urlsplit(url)
    if secret is None and parts.scheme in _EXTRAS and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"registry is {public_address(url)!r}, which other machines reach, and there is no "
            "fleet secret, so that anybody could register a worker; give --fleet-secret-file "
            "FILE or PIGOU_FLEET_SECRET"
        )
    return Registry(store, secret)


def open_store(url: str) -> RecordStore:
    """Return the store of a URL. Raises ConfigError as `open_registry`."""
    parts = urlsplit(url)
    if parts.scheme in _EXTRAS:
        require(_EXTRAS[parts.scheme], f"registry {public_address(url)}")
    try:
        return _open(parts, url)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"registry is {public_address(url)!r}: {error}") from error


def _open(parts: SplitResult, url: str) -> RecordStore:
    if parts.scheme == "memory":
        from pigou.fleet.registry.memory_store import MemoryStore

        return MemoryStore.shared(parts.netloc)
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        from pigou.fleet.registry.file_store import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "etcd" and parts.hostname:
        from pigou.fleet.registry.etcd_store import EtcdStore

        return EtcdStore.of(parts)
    if parts.scheme in ("nats", "tls") and parts.hostname:
        from pigou.fleet.registry.nats_store import NatsStore

        return NatsStore.of(parts)
    if parts.scheme == "k8s" and parts.netloc:
        from pigou.fleet.registry.kubernetes_store import KubernetesStore

        return KubernetesStore.of(parts)
    raise ConfigError(f"registry is {public_address(url)!r}; give {FORMS}")
