"""Hash slots find what they hold, however names crowd and go."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.compiled import inlined
from pigou.control.prefix_index.hash_slots import erase, find, insert, new_slots


@inlined  # not cached: nothing here would notice a change of the slots
def _change(names: np.ndarray, slots: np.ndarray, rows: np.ndarray, new: np.ndarray) -> int:
    """Give rows new names in turn, 0 for none; return how many rows were seen far off, or -1."""
    far = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if names[row] != 0:
            erase(names, slots, row)
        names[row] = new[i]
        if new[i] != 0:
            insert(slots, new[i], row)
        for held in range(1, names.shape[0]):
            if names[held] != 0 and find(names, slots, names[held]) != held:
                return -1
        filled = 0
        for slot in slots:
            filled += slot != 0
            far += (slot >> 29) // 7
        for name in names:
            filled -= name != 0
        if filled != 0:
            return -1
    return far


@pytest.mark.parametrize("per_row", [1, 2, 4])
def test_names_are_found_after_any_insertions_and_removals(per_row: int) -> None:
    draw = np.random.default_rng(per_row)
    names, slots = np.zeros(15, dtype=np.uint64), new_slots(14, per_row)
    rows = draw.integers(1, 15, 4000).astype(np.uint64)
    new = draw.integers(1, 2**64, 4000, dtype=np.uint64) * draw.integers(
        0, 2, 4000, dtype=np.uint64
    )
    far = _change(names, slots, rows, new)
    assert far > 0 if per_row == 1 else far >= 0
