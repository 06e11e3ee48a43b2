"""Quotas of KV memory reach workers under the tenants' marks, and only there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pigou.background import Background
from pigou.config import ConfigError, KVQuota
from pigou.gateway.auth.keys import Key, KeyLimits, kv_quotas
from pigou.gateway.engine_limits import EngineLimiter, _ask
from pigou.request import EngineLimits, Role, Worker
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import tenant_mark


class Upstream:
    """A worker that answers with what it was asked."""

    def __init__(self, knows_secret: bool) -> None:
        self.worker = Worker("w", "http://w", Role.PREFILL)
        self.knows_secret, self.asked = knows_secret, []
        self.engine = type("Engine", (), {"stock": False})

    async def whole(self, path: str, body: Any, *_: Any, **__: Any) -> bytes:
        self.asked.append((path, body))
        return msgspec.json.encode(body)


def key(tenant: str, kv: KVQuota | None) -> Key:
    return Key(tenant, tenant.encode(), limits=KeyLimits(kv=kv))


def test_options_and_keys_give_quotas_by_marks() -> None:
    quota = KVQuota(floor=0.2, ceiling=0.5)
    keys = [key("acme", quota), key("acme", quota), key("b", None)]
    assert kv_quotas(["*=0:0.4", "b=0.1:1"], keys) == {
        "*": KVQuota(ceiling=0.4), tenant_mark("b"): KVQuota(floor=0.1),
        tenant_mark("acme"): quota,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "keys", "why"),
    [
        (["acme"], [], "FLOOR:CEILING"),
        (["acme=x:1"], [], "FLOOR:CEILING"),
        (["acme=0:2"], [], "FLOOR:CEILING"),
        (["acme=0:1", "acme=0:1"], [], "once"),
        (["*=0.1:1"], [], "named tenants"),
        (["a=0.6:1", "b=0.6:1"], [], "1.2 together"),
        (["a=0.6:1"], [key("a", KVQuota())], "two KV quotas"),
        (["typo=0.2:1"], [key("a", None)], "tenant 'typo', which has no key.* \\(a\\)"),
        (["a=0.2:1"], [], "tenant 'a', which has no key"),
    ],
)
def test_quotas_that_cannot_hold_are_refused(options: list[str], keys: list[Key], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        kv_quotas(options, keys)


async def test_a_worker_is_told_quotas_whatever_its_role() -> None:
    limiter = EngineLimiter(Background(), lambda *_: None)
    limiter.kv_quotas = {tenant_mark("acme"): KVQuota(floor=0.5)}
    upstream: Any = Upstream(knows_secret=True)
    limiter._upstreams["w"] = upstream, 0
    wanted = limiter._wanted("w")
    assert wanted == EngineLimits(kv_quotas=limiter.kv_quotas)
    assert await _ask(upstream, wanted) == wanted
    assert upstream.asked[0][0] == "/limits"


def test_the_table_and_its_metrics_count_quotas() -> None:
    limiter = EngineLimiter(Background(), lambda *_: None)
    limiter.in_force["w"] = EngineLimits(8, kv_quotas={"mark": KVQuota(floor=0.5)})
    view = limiter.view("w")
    assert view == {"max_seqs": 8, "max_batched_tokens": None, "kv_quotas": 1, "refused": None}


async def test_a_worker_that_knows_no_tenants_is_not_told_quotas() -> None:
    upstream: Any = Upstream(knows_secret=False)
    with pytest.raises(APIError, match="fleet secret"):
        await _ask(upstream, EngineLimits(kv_quotas={"a": KVQuota()}))
    assert not upstream.asked
