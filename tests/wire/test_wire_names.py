"""Names that two processes make by themselves are equal where they must be, and only there."""

from __future__ import annotations

import itertools

from pigou.wire.fleet_secret import FleetSecret
from pigou.wire.names import PullPool, deployment_version, token, worker_name

ONE, OTHER = FleetSecret("one secret of a fleet"), FleetSecret("the secret of another fleet")


def test_a_version_is_the_given_one_else_the_weights() -> None:
    assert deployment_version({"deployment_version": "v1", "release": "abc"}) == "v1"
    assert deployment_version({"deployment_version": "", "release": "abc"}) == "abc"
    assert deployment_version({"deployment_version": 7, "release": "x" * 600}) == ""


def test_pools_differ_in_queue_model_version_and_secret_and_are_valid_names() -> None:
    parts = itertools.product(("q", "r"), ("m", "m/é.*", "m" * 512), ("", "v", "v.>"),
                              (None, ONE, OTHER))  # fmt: skip
    pools = [PullPool.of(*values) for values in parts]
    assert len(set(pools)) == len(pools)
    for pool in pools:
        assert len(pool.consumer) < 64
        assert pool.consumer.isidentifier()
        assert pool.prompt("g.*", "r >", 3).count(".") == 5
    assert PullPool.of("q", "m", "v", FleetSecret("one secret of a fleet")) in pools


def test_a_worker_is_known_among_gateways_by_its_process_else_by_its_address() -> None:
    assert worker_name("abc", "http://127.0.0.1:1", "h1") == "abc"
    assert worker_name("", "http://10.0.0.1:1", "h1") == "http://10.0.0.1:1"
    assert worker_name("", "http://localhost:1", "h1") == "h1/http://localhost:1"


def test_any_text_is_one_token_of_a_subject_and_no_two_are_the_same() -> None:
    names = ["a.b", "a_b", "a b", ">", "*", "é", "a_2e_b"]
    tokens = {token(name) for name in names}
    assert len(tokens) == len(names)
    assert not any(set(made) & set(".*> ") for made in tokens)
