"""Sampling defaults of a model's generation_config.json, within what a request may ask for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.wire.sampling_params import Defaults
from pigou.worker.http.served_model import sampling_defaults


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, Defaults()),
        ({"temperature": 0.0, "do_sample": False}, Defaults(temperature=0.0)),
        ({"temperature": 0, "top_k": -1}, Defaults(temperature=0.0, top_k=-1)),
        ({"top_k": 50.0, "top_p": 1}, Defaults(top_k=50, top_p=1.0)),
        ({"json_close_after": 96}, Defaults(json_close_after=96)),
        ({"temperature": None, "top_p": 0.8, "min_p": 0.1}, Defaults(top_p=0.8, min_p=0.1)),
    ],
)
def test_values_within_range_hold(generation: dict[str, Any], expected: Defaults) -> None:
    assert sampling_defaults(generation) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.5), ("temperature", "0.7"), ("temperature", True),
        ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.2),
        ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("top_k", "50"), ("top_k", 1e12),
        ("min_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", -1.0),
        ("repetition_penalty", [1.1]), ("json_close_after", -1), ("json_close_after", 0.5),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_left_out_with_a_warning(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({name: value, "top_p" if name != "top_p" else "min_p": 0.5})
    assert name in caplog.text
    assert repr(value) in caplog.text
    assert getattr(sampling_defaults({name: value}), name) == getattr(Defaults(), name)


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "min_p", "other"]),
                       st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(),
                                 st.lists(st.integers())), max_size=5))  # fmt: skip
def test_nothing_that_a_file_says_fails_or_leaves_the_range(generation: dict[str, Any]) -> None:
    defaults = sampling_defaults(generation)
    assert 0 <= defaults.temperature <= 2
    assert 0 < defaults.top_p <= 1
    assert 0 <= defaults.min_p <= 1
    assert type(defaults.top_k) is int
    assert defaults.top_k >= -1
