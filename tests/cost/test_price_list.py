from __future__ import annotations

import pytest

from pigou.config import ConfigError
from pigou.cost.price_list import PriceList
from pigou.sim.cost import price_list


def test_given_prices_replace_defaults_by_any_name_of_a_gpu() -> None:
    prices = price_list("H100 SXM=2.0,dram=1")
    assert prices.gpu("H100") == 2.0
    assert prices.storage["dram"] == 1.0
    assert prices.gpu("H200") == PriceList().gpu("H200")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("H100", "H100"), ("H100=x", "H100=x"), ("H100=-1", "H100=-1"), ("H100=inf", "H100=inf"),
        ("H1000=2", "H1000"), ("H100=2,H100 SXM=3", "twice"), ("tape=1", "tape"),
    ],
)  # fmt: skip
def test_what_is_no_price_is_refused_by_its_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        price_list(text)


def test_a_gigabyte_of_a_tier_costs_its_price_in_a_month() -> None:
    prices = PriceList(storage={"dram": 3.0, "nvme": 0.1, "object": 0.02})
    month_s = 730 * 3600
    usd = prices.tier_usd_per_s({"host": 1e9, "disk": 1e9, "bucket": 1e9}) * month_s
    assert usd == pytest.approx(3.12)
