"""Configuration of the prefill queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.registry import read_struct

#: Order of claims: by price, or first in, first out.
ClaimOrder = Literal["price", "fifo"]
#: Rule for prefill at the decode worker: the routing policy's price, or Dynamo's thresholds.
LocalPrefill = Literal["price", "thresholds"]
#: How prompts get to prefill workers.
PUSH, PULL = "push", "pull"


class PullQueueConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and order of a prefill queue."""

    # `price` takes the prompt whose claim is worth most; `fifo` the head.
    order: ClaimOrder = "price"
    # uncached tokens that end a claim: the smallest batch that saturates a worker. 1 takes one
    # prompt at a time, as Dynamo's first design.
    batch_tokens: int = 512
    batch_wait_ms: float = 2.0  # wait of a worker to fill its batch
    max_bypass: int = 8  # times that a prompt can be overtaken
    # age of a prompt in seconds at which nobody goes before it any more, and no worker leaves it to
    # another one.
    max_bypass_s: float = 2.0
    window: int = 16  # prompts priced at the head of the queue
    toll: float = 1.0  # weight of a claim's cost to later prompts
    # weight of T^2 / (2 M) beside a prompt's time T to its end, M the mean of T.
    urgency: float = 2.0
    # a claim that is neither acked nor extended for so long is delivered again.
    lease_s: float = 30.0
    max_deliveries: int = 3  # beyond these a prompt is a dead letter
    duplicate_window_s: float = 120.0  # deduplication window
    # rule for local prefill: the price of the routing policy's local candidate beside the queue's
    # wait, or the thresholds of Dynamo's first disaggregated router (ai-dynamo/dynamo PRs 183 and
    # 303), which follow.
    local: LocalPrefill = "price"
    max_prefill_queue_size: int = 2  # queue length from which prompts stay local
    # tokens of a prompt, those left out that its decode worker has cached, up to which it stays.
    max_local_prefill_length: int = 1000

    def __post_init__(self) -> None:
        check_fields(self, "batch_tokens", "window", "max_deliveries", ge=1)
        check_fields(
            self, "max_bypass", "max_prefill_queue_size", "max_local_prefill_length",
            "batch_wait_ms", "max_bypass_s", "toll", "urgency", "duplicate_window_s", ge=0,
        )  # fmt: skip
        check_bounds("lease_s", self.lease_s, gt=0)

    def is_local(self, uncached: int, queued: int) -> bool:
        """True if a prompt routed to a prefill worker stays at its decode worker."""
        if self.local == "price":  # the routing policy has decided
            return False
        return uncached <= self.max_local_prefill_length or queued >= self.max_prefill_queue_size


def pull_queue_config(values: Mapping[str, Any]) -> PullQueueConfig | None:
    """Return the configuration of `pull`, None for `push`; raises ConfigError for others."""
    fields = dict(values)
    mode = fields.pop("mode", PUSH)
    if mode not in (PUSH, PULL):
        raise ConfigError(f"prefill_queue is {mode!r}; give {PUSH}, or {PULL}[,parameter=value]...")
    if mode == PUSH:
        if fields:
            raise ConfigError(f"prefill_queue is {PUSH}, which has no {', '.join(fields)}")
        return None
    return read_struct("prefill_queue", PullQueueConfig, fields)
