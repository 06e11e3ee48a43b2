"""Tenures: equal digests exactly when every field is equal."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pigou.kv.hashing import chain
from pigou.kv.tenure import Tenure

#: Few characters, so that boundaries between fields move; one is a lone surrogate.
texts = st.text(alphabet="ab\0\ud800", max_size=3)
tenures = st.builds(
    Tenure,
    **{
        field.name: {
            "expiry": st.integers(0, 3),
            "permissions": st.frozensets(texts, max_size=3),
        }.get(field.name, texts)
        for field in fields(Tenure)
    },
)


@given(tenures, tenures)
@example(Tenure(tenant="ab"), Tenure(tenant="a", cache_salt="b"))
@example(Tenure(permissions=frozenset({"ab"})), Tenure(permissions=frozenset({"a", "b"})))
@example(Tenure(permissions=frozenset({""})), Tenure())
def test_the_encoding_is_injective(one: Tenure, other: Tenure) -> None:
    assert (one == other) == (one.encode() == other.encode())
    assert (one == other) == (one.digest() == other.digest())


@given(tenures)
def test_the_order_of_permissions_does_not_matter(tenure: Tenure) -> None:
    again = replace(tenure, permissions=frozenset(sorted(tenure.permissions, reverse=True)))
    assert again.digest() == tenure.digest()


def test_every_field_counts() -> None:
    base = Tenure()
    others = [
        replace(base, **{f.name: 1 if f.name == "expiry" else frozenset({"x"})
                         if f.name == "permissions" else "x"})
        for f in fields(Tenure)
    ]  # fmt: skip
    assert len({t.digest() for t in (base, *others)}) == len(others) + 1


def test_tenures_share_no_block() -> None:
    one, other = (chain([1] * 32, 16, Tenure(tenant=t).digest()) for t in "ab")
    assert not np.intersect1d(one, other).size


def test_a_digest_never_changes() -> None:
    """Caches outlive a process: the digest of a tenure is part of the format."""
    assert Tenure(tenant="t", model="m").digest().hex() == (
        "d534cee1b5c715ec112fd2f66bcc5070333ca130c2ccd61bae44a974bd59551d"
    )
