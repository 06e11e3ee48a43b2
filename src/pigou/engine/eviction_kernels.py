"""Compiled kernel of eviction: what each row could give up. Arrays as in `step_kernels`."""

from __future__ import annotations

from pigou.compiled import bare_kernel_over
from pigou.kv.kernels import REFS
from pigou.request import Ints


@bare_kernel_over("engine", "kv")
def rooms(
    order: Ints,
    computed: Ints,
    length: Ints,
    dropped: Ints,
    tables: Ints,
    block_size: int,
    sinks: int,
    recent: int,
    least: int,
    meta: Ints,
    firsts: Ints,
    out: Ints,
) -> None:
    """Find how many blocks of entries each row of `order` could give up, 0 while it is a prompt.

    What others refer to stays, and so do the first `sinks` entries, the last `recent` ones, and
    `least` in all. Tables are searched from the end for the last block that others refer to.

    Args:
        order, computed, length, dropped, tables, block_size: the rows.
        sinks, recent, least: entries that stay.
        meta: the blocks.
        firsts: takes the first entry that may go, (n,).
        out: takes the number of blocks, (n,).
    """
    for i in range(order.shape[0]):
        row = order[i]
        firsts[i] = 0
        out[i] = 0
        count = computed[row] - dropped[row]
        if length[row] - computed[row] != 1 or count - max(sinks + recent, least) < block_size:
            continue
        shared = (count + block_size - 1) // block_size
        while shared > 0 and meta[tables[row, shared - 1], REFS] < 2:
            shared -= 1
        first = shared * block_size
        spare = min(count - max(first, sinks) - recent, count - least)
        firsts[i] = first
        out[i] = max(spare, 0) // block_size
