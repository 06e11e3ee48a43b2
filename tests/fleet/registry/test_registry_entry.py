"""Entries of the registry: what they hold, and who may write them."""

from __future__ import annotations

import msgspec
import pytest
from tests.fleet.registry.entries import entry

from pigou.fleet.registry.entry import EntryRefused, read_entry, write_entry
from pigou.wire.fleet_secret import FleetSecret

SECRET, OTHER = FleetSecret("a" * 32), FleetSecret("b" * 32)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_an_entry_is_read_as_it_was_written(secret: FleetSecret | None) -> None:
    assert read_entry(write_entry(entry(), secret), secret) == entry()


@pytest.mark.parametrize("writer", [None, OTHER])
def test_an_entry_that_the_fleet_did_not_sign_is_refused(writer: FleetSecret | None) -> None:
    with pytest.raises(EntryRefused, match="not signed"):
        read_entry(write_entry(entry(), writer), SECRET)


def test_a_signature_does_not_fit_another_entry() -> None:
    record = write_entry(entry(), SECRET)
    forged = record.replace(b"10.0.0.1", b"10.6.6.6")
    assert forged != record
    with pytest.raises(EntryRefused, match="not signed"):
        read_entry(forged, SECRET)


def test_fields_of_later_versions_are_no_error() -> None:
    body = msgspec.json.decode(write_entry(entry(), None))
    body["entry"]["colour"] = "red"
    assert read_entry(msgspec.json.encode(body), None) == entry()


@pytest.mark.parametrize(
    "record",
    [
        b"", b"{", b"[" * 10_000, b"\xff", b'{"entry": 1}', b'{"entry": {"worker": "w"}}',
        b'{"entry": {}, "mac": "\\ud800"}', b" " * 70_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", [None, SECRET])
def test_other_bytes_are_refused(record: bytes, secret: FleetSecret | None) -> None:
    with pytest.raises(EntryRefused):
        read_entry(record, secret)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", ""), ("worker", "../x"), ("worker", "a b"), ("incarnation", "short"),
        ("url", "ftp://h:1"), ("url", "http://"), ("url", "http://h:99999"), ("epoch", -1),
        ("ttl_s", 0), ("model", "m" * 600), ("role", "king"),
    ],
)  # fmt: skip
def test_what_names_no_worker_is_refused(field: str, value: object) -> None:
    body = msgspec.json.decode(write_entry(entry(), None))
    body["entry"][field] = value
    with pytest.raises(EntryRefused, match=field):
        read_entry(msgspec.json.encode(body), None)
