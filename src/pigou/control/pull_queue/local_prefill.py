"""Local prefill: when a prompt is computed where it is decoded, and not queued."""

from __future__ import annotations

import msgspec

from pigou.config import ConfigError


class LocalPrefillThresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The thresholds of Dynamo's first disaggregated router (ai-dynamo/dynamo PRs 183 and 303).

    A prompt is queued for a prefill worker where it is longer than `max_local_prefill_length`
    tokens, cached ones left out, and fewer than `max_prefill_queue_size` prompts wait.

    Without these, a price decides: the toll's candidate of local prefill, whose wait is compared
    with that of the queue, since queued prompts weigh on the prefill workers.
    """

    max_prefill_queue_size: int = 2
    max_local_prefill_length: int = 1000

    def __post_init__(self) -> None:
        """Refuse thresholds below 0."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def is_local(self, uncached: int, queued: int) -> bool:
        """Return whether a prompt is computed at its decode worker.

        Args:
            uncached: tokens of the prompt that the decode worker has not cached.
            queued: prompts that wait in the queue.
        """
        return uncached <= self.max_local_prefill_length or queued >= self.max_prefill_queue_size
