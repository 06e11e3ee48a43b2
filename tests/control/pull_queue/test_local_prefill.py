"""Dynamo's thresholds of local prefill."""

import pytest

from pigou.config import ConfigError
from pigou.control.pull_queue.local_prefill import LocalPrefillThresholds


@pytest.mark.parametrize(
    ("uncached", "queued", "local"),
    [(1000, 0, True), (1001, 0, False), (1001, 1, False), (1001, 2, True), (9000, 3, True)],
)
def test_short_prompts_and_long_queues_stay_local(uncached: int, queued: int, local: bool) -> None:
    assert LocalPrefillThresholds().is_local(uncached, queued) is local


def test_a_threshold_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_prefill_queue_size"):
        LocalPrefillThresholds(max_prefill_queue_size=-1)
