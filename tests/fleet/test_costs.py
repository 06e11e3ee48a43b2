from __future__ import annotations

import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.control.plane import ControlPlane
from pigou.cost.cost_meter import MeteredControlPlane
from pigou.fleet.costs import make_plane, read_model, read_worker_gpus
from pigou.gateway.config import GatewayConfig
from pigou.request import Role, Worker


def test_gpus_of_workers_are_of_all_roles_or_of_those_that_are_named() -> None:
    assert read_worker_gpus("H100 SXM:4") == dict.fromkeys(Role, ("H100", 4))
    assert read_worker_gpus("prefill=h100,decode=H200:8") == {
        Role.PREFILL: ("H100", 1), Role.DECODE: ("H200", 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "''"), ("H100:0", "H100:0"), ("X9", "X9"), ("decode=H100,decode=H200", "decode")],
)
def test_gpus_that_are_not_understood_are_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_worker_gpus(text)


def test_costs_are_metered_with_prices_alone() -> None:
    assert type(make_plane(ControlConfig(), GatewayConfig())) is ControlPlane
    priced = GatewayConfig(prices="H100=3.6", gpu="H100:2", priced_model="llama-3.1-8b")
    plane = make_plane(ControlConfig(), priced)
    assert isinstance(plane, MeteredControlPlane)
    rate = plane.cost_meter.rate(Worker("w", ""))
    assert rate.usd_per_s == pytest.approx(2 * 3.6 / 3600)
    assert rate.kv_bytes == 131_072


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu": "H100"}, "no prices"), ({"priced_model": "llama-3.1-8b"}, "no prices"),
        ({"prices": "default"}, "gpu is not"), ({"prices": "x", "gpu": "H100"}, "'x'"),
        ({"prices": "default", "gpu": "H100", "priced_model": "nobody"}, "nobody"),
    ],
)  # fmt: skip
def test_an_option_is_honoured_or_refused(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_plane(ControlConfig(), GatewayConfig(**options))


def test_a_model_that_cannot_be_read_is_not_known() -> None:
    assert read_model("bundled") is not None
    assert read_model("nobody/knows") is None
    assert read_model("") is None
