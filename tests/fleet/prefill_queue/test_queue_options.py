"""Options of the prefill queue: who pulls, and from which queue."""

import pytest

from pigou.config import ConfigError
from pigou.fleet.config import WorkersConfig
from pigou.fleet.prefill_queue.messages import PullingConfig
from pigou.fleet.sources.local import WorkerTemplate
from pigou.request import Role

URL = "nats://h:4222/chat?lease_s=2"


def test_a_worker_that_decodes_pulls_nothing() -> None:
    with pytest.raises(ConfigError, match="role is decode"):
        PullingConfig(prefill_queue=URL).address("decode")
    assert PullingConfig(prefill_queue=URL).address("prefill").lease_s == 2


def test_of_a_local_fleet_the_prefill_workers_pull() -> None:
    template = WorkerTemplate.of(WorkersConfig(prefill_queue=URL))
    pulls = {role: URL in template.worker(role, 0, "cpu").arguments for role in Role}
    assert pulls == {Role.PREFILL: True, Role.DECODE: False, Role.BOTH: False}
