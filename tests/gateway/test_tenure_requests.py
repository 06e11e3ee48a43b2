"""Pairs of whole requests: one salt exactly where key, headers and body say the same."""

from __future__ import annotations

import pytest
from tests.gateway.tenure_requests import pairs

from pigou.config import ControlConfig
from pigou.control.journal import JournalRecorder, encode
from pigou.control.plane import ControlPlane
from pigou.gateway.auth.tenure import (
    OPEN_POLICY,
    SETS,
    TEXTS,
    header,
    read_tenure_headers,
)
from pigou.gateway.request import GatewayRun
from pigou.gateway.request_parsing import ServerScope, read
from pigou.kv.tenure import salt_expiry
from pigou.request import SECOND
from pigou.wire.errors import APIError

NOW = 1_800_000_000 * SECOND


def judge(seed: int, count: int) -> tuple[int, int]:
    """Return how many pairs were equal, and how many requests were refused."""
    equal = refused = 0
    for pair in pairs(seed, count, NOW):
        try:
            salts = [each.salt(NOW) for each in pair]
        except APIError:
            refused += 1
            continue
        said = [each.said() for each in pair]
        assert (salts[0] == salts[1]) == (said[0] == said[1]), pair
        assert [salt == "" for salt in salts] == [each == () for each in said]
        equal += said[0] == said[1]
    return equal, refused


def test_two_requests_have_one_salt_exactly_where_they_say_the_same() -> None:
    equal, refused = judge(1, 3_000)
    assert equal > 300
    assert refused < 1_800


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_pairs_of_requests_have_one_salt_where_they_say_the_same() -> None:
    equal, refused = judge(2, 100_000)
    assert equal > 10_000
    assert refused < 60_000


def test_the_journal_has_nothing_of_a_tenure_but_its_tenant() -> None:
    secrets = {field: f"secret-{field}" for field in (*TEXTS, *SETS)}
    secrets["expiry"] = str(NOW // SECOND + 123_456)
    named = {header(field): value for field, value in secrets.items()}
    tenure = OPEN_POLICY.apply("acme", read_tenure_headers(named), NOW)
    asked = b'{"prompt": "secret-prompt", "cache_salt": "secret-salt"}'
    call = read(asked, chat=False, strict=True, tenure=tenure, scope=ServerScope("m", "secret-r"))
    assert salt_expiry(call.salt) == tenure.expiry
    lines: list[bytes] = []
    recorder = JournalRecorder(
        ControlPlane(ControlConfig()), lambda entry: lines.append(encode(entry))
    )
    recorder.submit(GatewayRun.of(call).request(), 0)
    line = lines[0].decode()
    assert '"tenant":"acme"' in line
    for told in ("secret", "123456", call.salt, call.salt.split(":")[1], str(tenure.expiry)):
        assert told not in line
