"""Tenures: equal digests exactly when every field is equal, and void after their expiry."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pigou.kv.hashing import chain
from pigou.kv.tenure import Purpose, Tenure, Tenured, salt_expiry
from pigou.request import NEVER, SECOND

#: Few characters, so that boundaries between fields move; one is a lone surrogate.
texts = st.text(alphabet="ab\0\ud800", max_size=3)
sets = st.frozensets(texts, max_size=3)
tenures = st.builds(
    Tenure,
    **{
        field.name: {
            "expiry": st.integers(0, 3),
            "permissions": sets,
            "tools": sets,
            "purpose": st.sampled_from(Purpose),
        }.get(field.name, texts)
        for field in fields(Tenure)
    },
)
OTHER: dict[str, Any] = {
    "expiry": 1,
    "permissions": frozenset("x"),
    "tools": frozenset("x"),
    "purpose": Purpose.ANSWER,
}


@given(tenures, tenures)
@example(Tenure(tenant="ab"), Tenure(tenant="a", cache_salt="b"))
@example(Tenure(permissions=frozenset({"ab"})), Tenure(permissions=frozenset({"a", "b"})))
@example(Tenure(permissions=frozenset({""})), Tenure())
@example(Tenure(permissions=frozenset("a")), Tenure(tools=frozenset("a")))
def test_the_encoding_is_injective(one: Tenure, other: Tenure) -> None:
    assert (one == other) == (one.encode() == other.encode())
    assert (one == other) == (one.digest() == other.digest())
    assert (one == other) == (one.salt() == other.salt())


@given(tenures)
def test_the_order_of_a_set_does_not_matter(tenure: Tenure) -> None:
    names = sorted(tenure.permissions, reverse=True)
    again = replace(tenure, permissions=frozenset(names), tools=frozenset([*tenure.tools]))
    assert again.digest() == tenure.digest()


def test_every_field_counts() -> None:
    base = Tenure()
    others = [replace(base, **{f.name: OTHER.get(f.name, "x")}) for f in fields(Tenure)]
    assert len({t.digest() for t in (base, *others)}) == len(others) + 1


@pytest.mark.parametrize("value", [None, 1.5, ["a"], {"a"}, b"a"])
def test_a_value_of_another_kind_has_no_encoding(value: Any) -> None:
    with pytest.raises(TypeError, match="principal"):
        Tenure(principal=value).digest()


def test_tenures_share_no_block() -> None:
    one, other = (chain([1] * 32, 16, Tenure(tenant=t).digest()) for t in "ab")
    assert not np.intersect1d(one, other).size


def test_a_digest_never_changes() -> None:
    """Caches outlive a process: the digest of a tenure is part of the format."""
    assert Tenure(tenant="t", model="m").digest().hex() == (
        "b33834c86ff4b47d71f4003b8fa298273e799cd328acefd23d311d2897cf3d01"
    )


@given(tenures)
def test_a_salt_tells_the_expiry_and_nothing_else(tenure: Tenure) -> None:
    assert salt_expiry(replace(tenure, expiry=NEVER).salt()) == NEVER
    told = replace(tenure, expiry=tenure.expiry + 1)
    assert salt_expiry(told.salt()) == told.expiry
    assert len(told.salt()) <= 128
    assert not set(told.salt()) & set("@/\\\0")


@pytest.mark.parametrize("salt", ["", "acme", "tenure1", "tenure2:00", "Tenure1:" + "0" * 64])
def test_a_salt_of_somebody_elses_never_expires(salt: str) -> None:
    assert salt_expiry(salt) == NEVER


@pytest.mark.parametrize(
    "rest", ["", "00", "G" * 64, "A" * 64, "0" * 65, "0" * 64 + ":", "0" * 64 + ":0",
             "0" * 64 + ":+1", "0" * 64 + ":1_0", "0" * 64 + ":١", "0" * 64 + ":1\n",
             "0" * 64 + f":{NEVER + 1}"],
)  # fmt: skip
def test_what_only_looks_like_a_tenures_salt_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="tenure1"):
        salt_expiry("tenure1:" + rest)


@given(tenures, st.integers(1, 10**6 * SECOND), st.integers(0, 2**62))
def test_an_epoch_ends_within_its_length(tenure: Tenure, ttl: int, now: int) -> None:
    until = tenure.lasting(ttl, now)
    assert now < until.expiry <= now + ttl
    assert not until.expired(now)
    assert until.expired(until.expiry)
    begin = until.expiry - ttl
    assert tenure.lasting(ttl, max(0, begin)) == until  # equal within the epoch
    assert tenure.lasting(ttl, until.expiry - 1) == until
    assert tenure.lasting(ttl, until.expiry).expiry == until.expiry + ttl


def test_epochs_of_different_tenures_do_not_all_end_at_once() -> None:
    ends = {Tenure(principal=str(i)).lasting(3600 * SECOND, 2**60).expiry for i in range(100)}
    assert len(ends) == 100


@given(tenures, tenures, st.integers(0, 4))
@example(Tenure(), Tenure(), 0)
def test_an_artifact_is_had_under_its_tenure_alone(one: Tenure, other: Tenure, now: int) -> None:
    sealed = Tenured.wrap("42", one, b"question")
    assert sealed.open(one, now) == (None if one.expiry <= now else "42")
    if one != other:
        assert sealed.open(other, now) is None
        assert sealed.key != other.key(b"question")
    assert "42" not in repr(replace(sealed, key=b"", tenure=Tenure()))


def test_keys_are_of_tenure_and_content() -> None:
    tenure = Tenure(tenant="t", purpose=Purpose.TOOL)
    assert tenure.key(b"a") == Tenured.wrap(1, tenure, b"a").key != tenure.key(b"b")
    assert len({replace(tenure, purpose=each).key(b"a") for each in Purpose}) == len(Purpose)
