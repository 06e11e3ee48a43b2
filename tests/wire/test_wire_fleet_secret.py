"""The fleet secret: where it comes from, what is derived of it, and what it never shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pigou.config import ConfigError
from pigou.wire.fleet_secret import DESCRIPTOR, VARIABLE, FleetSecret

TEXT = "0123456789abcdef"


def test_it_is_read_from_the_environment_once() -> None:
    environment = {VARIABLE: TEXT, "other": "x"}
    found = FleetSecret.given(environment=environment)
    assert found is not None
    assert environment == {"other": "x"}
    assert found.token == FleetSecret(TEXT).token
    assert FleetSecret.given(environment=environment) is None


def test_it_is_read_from_a_pipe_which_is_then_closed() -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    environment = {DESCRIPTOR: str(reading)}
    found = FleetSecret.given(environment=environment)
    assert found is not None
    assert (found.token, environment) == (FleetSecret(TEXT).token, {})
    with pytest.raises(OSError, match="Bad file"):
        os.read(reading, 1)


def test_a_file_comes_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    environment = {VARIABLE: "another secret, as long"}
    found = FleetSecret.given(str(path), environment)
    assert found is not None
    assert (found.token, environment) == (FleetSecret(TEXT).token, {})


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, " " * 40])
def test_what_is_too_short_or_too_long_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand"):
        FleetSecret.read(str(path))
    with pytest.raises(ConfigError, match="PIGOU_FLEET_SECRET has"):
        FleetSecret.given(environment={VARIABLE: text})


def test_a_file_or_a_pipe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fleet_secret_file"):
        FleetSecret.read(str(tmp_path / "none"))
    for text in ("x", "-1", "99999"):
        with pytest.raises(ConfigError, match=DESCRIPTOR):
            FleetSecret.given(environment={DESCRIPTOR: text})


def test_keys_of_different_uses_and_secrets_differ_and_none_is_the_secret() -> None:
    keys = {FleetSecret(t).key(u) for t in (TEXT, TEXT + "x") for u in ("a", "b", "ab")}
    assert len(keys) == 6
    assert all(len(key) == 32 for key in keys)


def test_it_admits_its_token_and_itself_as_bearer_and_nothing_else() -> None:
    secret = FleetSecret(TEXT)
    for good in (f"Bearer {secret.token}", f"bearer {TEXT}", f"Bearer  {TEXT} "):
        assert secret.admits(good)
    for bad in (None, "", "Bearer", "Bearer ", TEXT, secret.token, f"Basic {TEXT}",
                f"Bearer {TEXT[:-1]}", f"Bearer {secret.token[:-1]}", "Bearer \udcff"):  # fmt: skip
        assert not secret.admits(bad)


def test_a_proof_is_of_one_nonce_and_one_secret() -> None:
    secret, other = FleetSecret(TEXT), FleetSecret.make()
    assert secret.proves("n", secret.proof("n"))
    assert not secret.proves("m", secret.proof("n"))
    assert not secret.proves("n", other.proof("n"))
    assert not secret.proves("n", "\udcff")


def test_printing_shows_nothing() -> None:
    assert TEXT not in repr(FleetSecret(TEXT)) + str(FleetSecret(TEXT))
