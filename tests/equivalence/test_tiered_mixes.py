"""Tiers change no token: whatever is mixed, and however late or badly their moves are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair import RECOMPUTE, SWAP, Pair, Reference, Side
from test_random_mixes import DOCUMENTS, act, actions, config, configs, submits
from tests.lib.examples import examples
from tiered import Pace, TieredSide

from pigou.config import EngineConfig
from pigou.engine.plan import Rates
from pigou.request import SamplingParams
from pigou.runtime.models.load import LoadedModel

paces = st.builds(
    Pace,
    host=st.sampled_from([1, 3, 6]),
    disk=st.sampled_from([1, 5, 16]),
    staging=st.sampled_from([0, 1, 3]),
    copies=st.sampled_from([1, 4, 9]),
    ready=st.sampled_from([1.0, 1.0, 0.6, 0.2]),
    fails=st.sampled_from([0.0, 0.0, 0.3]),
    seed=st.integers(0, 999),
)


@contextmanager
def tiered(
    model: LoadedModel, limits: EngineConfig, rates: Rates | None, pace: Pace
) -> Iterator[TieredSide]:
    with TemporaryDirectory() as folder:
        side = TieredSide(model, limits, rates, pace, Path(folder))
        yield side
        side.close()


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(
    prefill=configs,
    decode=configs,
    rates=st.sampled_from([None, SWAP, RECOMPUTE]),
    paces=st.tuples(paces, paces),
    crowd=st.lists(submits, min_size=5, max_size=9),
    script=st.lists(actions, min_size=4, max_size=24),
)
def test_any_mix_with_tiers_gives_the_tokens_of_one_engine_alone(
    model: LoadedModel, reference: Reference, prefill, decode, rates, paces, crowd, script
) -> None:
    limits = config(*prefill, size=4), config(*decode, size=4)
    with (
        tiered(model, limits[0], rates, paces[0]) as p,
        tiered(model, limits[1], rates, paces[1]) as d,
    ):
        pair = Pair(p, d)
        for action in [*crowd, *script]:
            act(pair, action)
        pair.run()
        for stream in pair.streams:
            reference.check(stream)
        for side in (p, d):
            assert side.core.free_blocks == side.config.blocks
            side.core.clear_cache()
            side.settle()
            assert [len(store.entries()) for store in side.stores] == [0, 0]


@pytest.mark.parametrize("pace", [Pace(host=24, disk=1), Pace(host=6, disk=40)], ids=repr)
def test_what_the_device_gave_away_comes_back_from_tiers(
    model: LoadedModel, reference: Reference, pace: Pace
) -> None:
    alike = config(18, 64, 1, 0, 4)
    asked = SamplingParams(max_tokens=4, temperature=0.0)
    with tiered(model, alike, None, pace) as d:
        pair = Pair(Side(model, alike, None), d)
        for document in (0, 1, 0):
            stream = pair.submit(tuple(DOCUMENTS[document][:44]), asked, remote=False)
            pair.run()
            reference.check(stream)
            d.core._state.prefix.clear()  # as if others had taken the device's blocks
        assert d.restored >= 3
        assert d.computed[stream.id] < 44
