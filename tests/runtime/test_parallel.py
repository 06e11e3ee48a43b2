"""Ranks: collectives of a worker's processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.lib.ranks import run_ranks

from pigou.runtime.parallel import Group


def _collectives(group: Group) -> dict[str, Any]:
    own = torch.full((2, 3), float(group.rank + 1))
    rows = torch.arange(group.size * 2.0).view(-1, 1) + 100 * group.rank
    sent = [2] * group.size
    return {
        "reduced": group.all_reduce(own.clone()).tolist(),
        "gathered": group.all_gather(own)[:, 0, 0].tolist(),
        "exchanged": group.all_to_all_single(rows, sent, sent)[:, 0].tolist(),
        "uneven": group.all_to_all_single(
            own.new_full((group.rank,), group.rank), [group.rank, *[0] * (group.size - 1)],
            list(range(group.size)) if group.rank == 0 else [0] * group.size,
        ).tolist(),
        "told": group.broadcast(own.clone(), 1)[0, 0].item(),
        "narrow": group.all_reduce(own.bfloat16()).tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_do_what_torch_says(size: int) -> None:
    results = run_ranks(size, _collectives)
    total = size * (size + 1) / 2
    for rank, result in enumerate(results):
        assert result["reduced"] == result["narrow"] == [[total] * 3] * 2
        assert result["gathered"] == [1.0 + r for r in range(size)]
        assert result["exchanged"] == [
            100.0 * source + 2 * rank + i for source in range(size) for i in range(2)
        ]
        assert result["told"] == 2.0
        assert result["uneven"] == ([float(r) for r in range(size) for _ in range(r)] if not rank
                                    else [])  # fmt: skip
