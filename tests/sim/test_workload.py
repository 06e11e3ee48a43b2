"""Block hashes of workloads."""

from __future__ import annotations

import numpy as np

from pigou.sim.workload import RequestSpec, block_hashes


def test_prompts_share_blocks_as_far_as_their_ids_are_equal() -> None:
    def hashes(ids: tuple[int, ...], tokens: int, number: int = 0, scope: int = 0) -> np.ndarray:
        return block_hashes(RequestSpec(tokens, 1, ids, scope, 512.0), number, 16)

    one, two = hashes((1, 2, 3), 1300), hashes((1, 2, 9), 1400)
    same = (one[: len(two)] == two[: len(one)]).all(axis=1)
    assert same.sum() == 64
    assert same[:64].all()
    # The same id behind other ids, or in another scope, is another block.
    assert not (hashes((7, 2), 1024)[32:] == one[32:64]).any()
    assert not (hashes((1,), 512, scope=1) == one[:32]).any()
    alone = block_hashes(RequestSpec(100, 1), 1, 16)
    assert alone.shape == (6, 2)
    assert not (alone == block_hashes(RequestSpec(100, 1), 2, 16)).any()
    assert len(np.unique(np.concatenate([one, two[64:], alone])[:, 1])) == 81 + 23 + 6
