"""Location: where an object storage is, how it is reached, and for how long it is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from pigou.runtime.kv_offload.store import StoreError


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """An object storage.

    Credentials come from the environment, as the provider's own tools find them
    (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, roles of the machine): never from here.
    """

    url: str  # `s3://bucket/prefix`, `gs://...`, `az://...`, `file:///directory`, `memory://`
    # of an S3-compatible server, like `http://127.0.0.1:9000`; empty for what the environment says
    # (`AWS_ENDPOINT_URL`), or Amazon's own. Only with `s3://`.
    endpoint: str = ""
    region: str = ""  # of an S3 bucket; empty for what the environment says
    timeout: float = 5.0  # seconds that a batch of blocks may take, and so any request of it
    connect_timeout: float = 2.0  # seconds for a connection
    retries: int = 2  # of a request that failed on the way or with a status of 500 and above
    requests: int = 16
    # objects whose headers are read when the store is asked for its entries, at most.
    look_up: int = 10_000

    def __post_init__(self) -> None:
        scheme = urlsplit(self.url).scheme
        if not scheme:
            raise ValueError(f"url is {self.url!r}; give one like s3://bucket/prefix")
        for name in ("endpoint", "region"):
            if getattr(self, name) and scheme != "s3":
                raise ValueError(f"{name} is for s3:// only; leave it out for {self.url}")
        for name in ("timeout", "connect_timeout", "requests", "look_up"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; it must not be negative")

    @classmethod
    def parse(cls, uri: str) -> BucketLocation:
        """Read `URL[?endpoint=URL][&region=NAME]`.

        Raises:
            ValueError: it is not written so.
        """
        url, _, query = uri.partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        if unknown := sorted(given.keys() - {"endpoint", "region"}):
            raise ValueError(f"{uri} has {unknown[0]!r} after '?'; give endpoint= or region=")
        return cls(url, **given)

    def open(self) -> ObjectStore:
        """Make a client; nothing is sent yet.

        Raises:
            StoreError: the url or what the environment says is of no use.
        """
        scheme = urlsplit(self.url).scheme
        try:
            if scheme == "file":
                return from_url(self.url, mkdir=True)
            if scheme == "memory":
                return from_url(self.url)
            return from_url(self.url, **self._options(), **self._s3())
        except (BaseError, ValueError) as error:
            raise StoreError(f"{self.url}: {first_line(error)}") from error

    def _options(self) -> dict[str, Any]:
        return {
            "client_options": {
                "timeout": timedelta(seconds=self.timeout),
                "connect_timeout": timedelta(seconds=self.connect_timeout),
                "allow_http": True,
            },
            "retry_config": {
                "max_retries": self.retries,
                "retry_timeout": timedelta(seconds=self.timeout),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        }

    def _s3(self) -> dict[str, Any]:
        given = {"endpoint": self.endpoint, "region": self.region}
        return {name: value for name, value in given.items() if value}


def first_line(error: BaseException) -> str:
    """What went wrong, without the client's inner life."""
    return (str(error).strip().split("\n", 1)[0] or type(error).__name__)[:600]
