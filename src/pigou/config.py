"""Configuration of the cores: checked values, unknown keys refused."""

from __future__ import annotations

from typing import Literal

import msgspec

QueueOrder = Literal["fcfs", "priority", "edf"]


class ConfigError(ValueError):
    """A configuration value that cannot be honoured; names the field, the value, the remedy."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and policies of one EngineCore.

    Attributes:
        blocks: KV blocks on the device.
        block_size: tokens in a block.
        host_blocks: blocks of host memory that preempted requests may be swapped to.
        max_seqs: most sequences that run at once.
        max_batched_tokens: most tokens computed in one step (the token budget).
        max_model_len: most tokens, prompt and output, of one sequence.
        order: who is admitted first, and who is preempted last.
        prefix_caching: keep finished blocks for requests with the same prefix.
        max_repeat: most steps that one plan may hold.
        max_waiting: most requests that may wait; 0 for no limit.
    """

    blocks: int
    block_size: int = 16
    host_blocks: int = 0
    max_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int = 2048
    order: QueueOrder = "fcfs"
    prefix_caching: bool = True
    max_repeat: int = 1
    max_waiting: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no engine could work with."""
        for name in ("blocks", "block_size", "max_seqs", "max_batched_tokens", "max_model_len"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_repeat", self.max_repeat, 1)
        _at_least("host_blocks", self.host_blocks, 0)
        _at_least("max_waiting", self.max_waiting, 0)


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and policies of one ControlPlane.

    Attributes:
        policy: name of the routing policy, as registered under `pigou.routing`.
        max_queued: most requests that wait for a worker; one more is shed (503).
        max_inflight: most requests that one decode worker is given at once; 0 asks the worker's
            own `max_seqs`, and means no limit when it did not say.
        queue_timeout: nanoseconds that a request waits before it is shed.
        seed: of the generator that breaks ties.
    """

    policy: str = "least-loaded"
    max_queued: int = 1024
    max_inflight: int = 0
    queue_timeout: int = 60_000_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no control plane could work with."""
        for name in ("max_queued", "max_inflight", "queue_timeout", "seed"):
            _at_least(name, getattr(self, name), 0)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")
