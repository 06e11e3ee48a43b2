"""Parallelism of a worker: tensor-parallel attention, data-parallel ranks, expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from pigou.config import check_fields, option

_GROUP = "Parallelism"


class ParallelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parallelism besides `tp`; options have vLLM's names."""

    dp: Annotated[
        int,
        option(
            "Ranks of a worker with attention and KV of their own, TP GPUs each; limits of a step "
            "hold for each rank.", _GROUP, name="data_parallel_size",
        ),
    ] = 1  # fmt: skip
    ep: Annotated[
        bool,
        option("Whole experts on each GPU of a worker, instead of a part of each.", _GROUP,
               name="enable_expert_parallel"),
    ] = False  # fmt: skip
    redundant_experts: Annotated[
        int,
        option("Further copies of experts in each layer, over the GPUs of a worker.", _GROUP,
               name="num_redundant_experts"),
    ] = 0  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, "dp", ge=1)
        check_fields(self, "redundant_experts", ge=0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the `tp` x `dp` GPUs of a worker share a model."""

    tp: int = 1
    dp: int = 1
    ep: bool = False
    redundant_experts: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.tp * self.dp

    def expert_share(self, experts: int) -> float:
        """Return the fraction of a layer's experts that each GPU holds."""
        return (experts + self.redundant_experts) / experts / self.gpus


def parallel_config(value: ParallelConfig | int) -> ParallelConfig:
    """Return a number of GPUs as tensor parallelism."""
    return value if isinstance(value, ParallelConfig) else ParallelConfig(value)
