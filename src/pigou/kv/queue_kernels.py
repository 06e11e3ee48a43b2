"""A compiled kernel over the free queue of a pool, whose arrays `pigou.kv.kernels` describes."""

from __future__ import annotations

from pigou.compiled import bare_kernel
from pigou.kv.kernels import CHILD, ELDER, FREE, PREV, REFS, YOUNGER, Counts, link_after
from pigou.request import Ints


@bare_kernel
def yield_up(meta: Ints, counts: Counts, table: Ints) -> int:
    """Refer no longer to the cached blocks of a chain; return how many became free.

    Its tail is handed out next: the blocks that nobody else refers to, and on which nothing is
    cached but the chain itself. What is before them joins the end of the queue.
    """
    freed = 0
    queue = meta.shape[0] - 1
    first = table.shape[0]
    while first > 0:
        block = table[first - 1]
        child = meta[block, CHILD]
        alone = child < 0
        if first < table.shape[0] and child == table[first]:
            alone = meta[child, ELDER] < 0 and meta[child, YOUNGER] < 0
        if meta[block, REFS] != 1 or not alone:
            break
        first -= 1
    for i in range(first - 1, -1, -1):
        block = table[i]
        meta[block, REFS] -= 1
        if meta[block, REFS] == 0:
            freed += 1
            link_after(meta, meta[queue, PREV], block)
    for i in range(first, table.shape[0]):  # so that the last one is the first
        meta[table[i], REFS] = 0
        freed += 1
        link_after(meta, queue, table[i])
    counts[FREE] += freed
    return freed
