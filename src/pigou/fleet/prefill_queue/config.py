"""Which prefill queue the prefill workers of a fleet pull from: options of two commands."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option
from pigou.fleet.prefill_queue.messages import QueueAddress
from pigou.imports import require


class PullingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a worker pulls prompts from; without `prefill_queue` gateways send them."""

    prefill_queue: Annotated[
        str,
        option(
            "Queue that this prefill worker pulls prompts from: nats://HOST:PORT/NAME.",
            "KV transfer",
        ),
    ] = ""

    def address(self, role: str) -> QueueAddress:
        """Return the queue's address, for a worker of a role.

        Raises:
            ConfigError: the URL is not understood, or the role does not pull.
        """
        if role != "prefill":
            raise ConfigError(f"prefill_queue is given, and role is {role}; give it to prefill")
        return queue_address(self.prefill_queue)


def queue_address(url: str) -> QueueAddress:
    """Return the queue of an option's URL.

    Raises:
        ConfigError: it is not understood, or NATS's client is not installed.
    """
    require("nats", "--prefill-queue")
    return QueueAddress.parse(url)
