"""API keys: stored as hashes, compared in constant time, one tenant each."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from pigou.config import ConfigError, KVQuota, check_bounds
from pigou.control.admission.budgets import PERIODS
from pigou.gateway.auth.tenure import OPEN_POLICY, KeyPolicy, TenureChoices, TenureDefaults
from pigou.kv.quotas import EACH_OTHER, check_quotas, read_quotas
from pigou.request import SECOND
from pigou.small_file import read_text
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import tenant_mark

_RETRY_AFTER_S = 1
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Files in which each key says what its requests may do; others have a line for each key.
_STRUCTURED = (".yaml", ".yml", ".json")
#: End of the line of an administrator's key.
_ADMIN = ":admin"


class KeyBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be used in a period; 0 for no limit."""

    requests: int = 0  # in a session: steps of an agent's loop
    tokens: int = 0  # prompt and output
    seconds: float = 0.0  # on workers, summed over sequences
    price: float = 0.0  # dollars of the bill


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a key; 0 for none. A sequence is one choice (`n`) of one prompt."""

    sequences: int = 0  # most of them at the workers at once; further ones wait
    # most of them that wait, those of a request that has just come included; beyond, a request is
    # answered 429.
    queued: int = 0
    queued_tokens: int = 0  # the same for the tokens that they ask for, prompt and `max_tokens`
    minute: KeyBudget = KeyBudget()
    day: KeyBudget = KeyBudget()
    session: KeyBudget = KeyBudget()  # budget of each agent session
    kv: KVQuota | None = None  # the tenant's shares of each worker's KV memory; None for no own

    def check(self, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for a negative limit."""
        flat = {
            f"{name}.{unit}": limit
            for name in PERIODS
            for unit, limit in msgspec.structs.asdict(getattr(self, name)).items()
        }
        flat |= {name: getattr(self, name) for name in ("sequences", "queued", "queued_tokens")}
        for name, value in flat.items():
            check_bounds(f"{where}: limits.{name}", value, ge=0, unit=", which is no limit")

    @property
    def has_budgets(self) -> bool:
        """True with a budget of any period."""
        return any(getattr(self, period) != KeyBudget() for period in PERIODS)


class KeyLoad:
    """Running and waiting sequences of one key, within its limits."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.waiting = self.tokens = 0  # sequences that wait, and their tokens
        self.slots = asyncio.Semaphore(limits.sequences or sys.maxsize)  # for running sequences

    def check(self, name: str, now: int, more: int) -> None:
        """Raise `APIError` 429 if `more` is over a limit."""
        limit = getattr(self.limits, name)
        if not limit or now + more <= limit:
            return
        what = "sequences" if name == "queued" else "tokens"
        remedy = "wait for those under way" if more <= limit else "send fewer in one request"
        raise APIError(
            429,
            f"limits.{name} of this API key is {limit}: {now} {what} wait, and this request (its "
            f"prompts times n, and max_tokens) asks for {more} more; {remedy}.",
            "n" if name == "queued" else "max_tokens",
            retry_after=_RETRY_AFTER_S,
        )


class RequestQuota:
    """A request's share of its key's limits."""

    def __init__(self, load: KeyLoad, sequences: int, tokens: int) -> None:
        self._load = load
        self._tokens = tokens
        self._waiting = 0
        self._running: set[str] = set()
        self._began: dict[str, int] = {}  # when a sequence reached a worker
        self.bill: Callable[[str], Callable[[], float]] = lambda _: float
        self.bills: list[Callable[[], float]] = []  # bills of sequences that reached a worker
        self.worker_s = 0.0  # seconds of ended sequences on workers
        self._count(sequences)

    async def take(self, call: str, timeout_s: float | None) -> None:
        """Wait until a sequence may run, unless it already has; raise `APIError` 429."""
        if call in self._running:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._load.slots.acquire()
        except TimeoutError:
            max_running = self._load.limits.sequences
            raise APIError(
                429,
                f"limits.sequences of this API key is {max_running}: all run, and this request "
                f"waited {timeout_s:g} s for one of them to end; send fewer at once.",
                retry_after=_RETRY_AFTER_S,
            ) from None
        self._running.add(call)

    def sent(self, call: str) -> None:
        """Record that a sequence reached a worker."""
        if self._waiting:
            self._count(-1)
        if call not in self._began:
            self._began[call] = time.monotonic_ns()
            self.bills.append(self.bill(call))

    def ended(self, call: str) -> None:
        """Record the end of a sequence."""
        if call in self._began:
            self.worker_s += (time.monotonic_ns() - self._began.pop(call)) / SECOND
        if call in self._running:
            self._running.discard(call)
            self._load.slots.release()

    def close(self) -> None:
        """Release the request and all its sequences."""
        self._count(-self._waiting)
        for call in [*self._running, *self._began]:
            self.ended(call)

    def _count(self, sequences: int) -> None:
        self._waiting += sequences
        self._load.waiting += sequences
        self._load.tokens += sequences * self._tokens


class KeyLoads:
    """The load of each key, or payer."""

    def __init__(self) -> None:
        self._loads: dict[bytes, KeyLoad] = {}

    @contextmanager
    def accepted(self, key: Key, sequences: int, tokens: int) -> Iterator[RequestQuota]:
        """Hold `sequences` of `tokens` each as under way (context); raise `APIError` 429."""
        load = self._loads.get(key.purse)
        if load is None or load.limits != key.limits:
            load = self._loads[key.purse] = KeyLoad(key.limits)
        load.check("queued", load.waiting, sequences)
        load.check("queued_tokens", load.tokens, sequences * tokens)
        quota = RequestQuota(load, sequences, tokens)
        try:
            yield quota
        finally:
            quota.close()


NO_LIMITS = KeyLimits()
#: Share of a request that was not accepted yet.
NO_QUOTA = RequestQuota(KeyLoad(NO_LIMITS), 0, 0)


@dataclass(frozen=True, slots=True)
class Key:
    """SHA-256 of a key (32 bytes), its tenant and rights; `admin` keys see all tenants."""

    tenant: str
    digest: bytes
    policy: KeyPolicy = OPEN_POLICY
    admin: bool = False
    limits: KeyLimits = NO_LIMITS
    payer: str = ""  # account of its weight and limits; empty for its tenant's weight, own limits

    @property
    def purse(self) -> bytes:
        """What its limits are counted by: the payer, or else the key."""
        return self.payer.encode() or self.digest


#: Key of every request if the gateway has no keys.
NO_KEY = Key("", b"", admin=True)
_current: ContextVar[Key] = ContextVar("key", default=NO_KEY)


def current_key() -> Key:
    """Return the current task's key; `NO_KEY` without keys."""
    return _current.get()


def use_key(key: Key) -> None:
    """Set the current task's key."""
    _current.set(key)


def kv_quotas(options: Iterable[str], keys: Iterable[Key]) -> dict[str, KVQuota]:
    """Return quotas by the tenants' marks, of `TENANT=FLOOR:CEILING` and keys' own.

    Raises ConfigError.
    """
    quotas = read_quotas(options)
    for key in keys:
        own, tenant = key.limits.kv, key.tenant
        if own is not None and quotas.setdefault(tenant, own) != own:
            raise ConfigError(f"tenant {tenant!r} has two KV quotas; give all its keys the same")
    check_quotas(quotas)
    check_known("kv_quotas", quotas, keys)
    unmarked = "", EACH_OTHER
    return {t if t in unmarked else tenant_mark(t): quota for t, quota in quotas.items()}


def check_known(where: str, quotas: Mapping[str, KVQuota], keys: Iterable[Key]) -> None:
    """Raise a ConfigError for a quota of a tenant without a key; `""` is all without keys."""
    tenants = {key.tenant for key in keys} or {""}
    for unknown in sorted(quotas.keys() - tenants - {EACH_OTHER}):
        raise ConfigError(
            f"{where} has tenant {unknown!r}, which has no key; give * or a tenant of "
            f"--api-keys-file ({', '.join(sorted(tenants)) or 'none'})"
        )


def unauthorized() -> APIError:
    """Return the error for a missing or unknown key."""
    return APIError(
        401,
        "The request has no API key that this gateway knows: send one as the header "
        "`Authorization: Bearer KEY`.",
        "authorization",
    )


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenant: str
    sha256: str
    tenure: TenureDefaults = TenureDefaults()
    may: TenureChoices = TenureChoices()
    admin: bool = False
    limits: KeyLimits = NO_LIMITS
    payer: str = ""


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    keys: list[_KeyEntry]


class Keys:
    """All accepted keys."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a key file; raises ConfigError if unreadable, malformed, empty, or with duplicates.

        `.yaml` and `.json` have `keys`: a list of `tenant`, `sha256`, `tenure`, `may`, `admin`,
        `limits` and `payer`. Other files have lines `TENANT:SHA256_HEX[:admin]` and # comments.
        """
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file {path}: {error}") from error
        keys = _entries(text, path) if path.suffix in _STRUCTURED else _lines(text, path)
        if not keys:
            raise ConfigError(f"api_keys_file {path} has no keys; `pigou key TENANT` makes one")
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError(f"api_keys_file {path} has a key twice; keep one of its entries")
        return cls(_of_payers(keys, path))

    def find(self, authorization: str | None) -> Key | None:
        """Return the key of an `Authorization:

        Bearer KEY` header, in constant time; None if wrong.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        digest = sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        match = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match if scheme.lower() == "bearer" else None


def make_key(tenant: str, *, admin: bool = False, payer: str = "") -> tuple[str, str]:
    """Return a new random key, and its line for the keys file; raise `ConfigError`.

    A line has no payer: its name is checked for an entry of a structured file.
    """
    _check_tenant(tenant, "tenant")
    if payer:
        _check_tenant(payer, "payer", "payer")
    secret = f"pigou-{secrets.token_urlsafe(32)}"
    return secret, f"{tenant}:{sha256(secret.encode()).hexdigest()}{_ADMIN * admin}"


def _lines(text: str, path: Path) -> list[Key]:
    return [
        _parse(line.strip(), f"{path}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    ]


def _parse(line: str, where: str) -> Key:
    admin = line.endswith(_ADMIN)
    tenant, _, digest = line.removesuffix(_ADMIN).rpartition(":")
    _check_tenant(tenant, where)
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{where}: not TENANT:SHA256_HEX or TENANT:SHA256_HEX:admin; `pigou key TENANT` "
            "makes such a line"
        )
    return Key(tenant, bytes.fromhex(digest), admin=admin)


def _entries(text: str, path: Path) -> list[Key]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        entries = decode(text, type=_KeysFile).keys
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"api_keys_file {path}: {error}") from error
    return [_key(entry, f"{path}, keys[{number}]") for number, entry in enumerate(entries)]


def _key(entry: _KeyEntry, where: str) -> Key:
    _check_tenant(entry.tenant, where)
    if not _DIGEST.fullmatch(entry.sha256):
        raise ConfigError(
            f"{where}: sha256 is {entry.sha256!r}; it must be the 64 hexadecimal digits after the "
            "colon of what `pigou key TENANT` prints"
        )
    policy = KeyPolicy(tenure=entry.tenure, may=entry.may)
    policy.check(where)
    entry.limits.check(where)
    if entry.payer:
        _check_tenant(entry.payer, where, "payer")
    digest = bytes.fromhex(entry.sha256)
    return Key(entry.tenant, digest, policy, entry.admin, entry.limits, entry.payer)


def _of_payers(keys: Sequence[Key], path: Path) -> list[Key]:
    """Give all keys of a payer the limits that one of them names."""
    limits: dict[str, KeyLimits] = {}
    for key in keys:
        named = key.payer and key.limits != NO_LIMITS
        if named and limits.setdefault(key.payer, key.limits) != key.limits:
            raise ConfigError(
                f"api_keys_file {path}: keys of payer {key.payer!r} have different limits, "
                "which they share; give them once"
            )
    return [replace(key, limits=limits.get(key.payer, key.limits)) for key in keys]


def _check_tenant(tenant: str, where: str, what: str = "tenant") -> None:
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{where}: the {what} {tenant!r} must have 1 to 32 letters, digits, '_' or '-'"
        )
