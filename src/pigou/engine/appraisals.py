"""What the entries of running rows are worth, as the executor told, and the price of a block."""

from __future__ import annotations

import numpy as np

from pigou.config import EvictionConfig
from pigou.kv.portfolio import Portfolio
from pigou.kv.price import Floats
from pigou.request import Ints


class Appraisals:
    """Curves of rows, each good until it is used.

    Attributes:
        config: who gives up what.
        portfolio: the price of a block.
        losses: by row, return lost with each further block given up; None for no curve.
        gains: by row, return that comes back with each further block computed again.
        at: tokens computed when the row was appraised, -1 for never, shape (max_seqs,).
        offered: blocks of the row that were offered to the tiers before, shape (max_seqs,).
        wanted: blocks that the plan under way lacked before rows gave some up.
    """

    def __init__(self, config: EvictionConfig, blocks: int, max_seqs: int) -> None:
        self.config = config
        self.portfolio = Portfolio(blocks, config.rate, config.by_price)
        self.losses: list[Floats | None] = [None] * max_seqs
        self.gains: list[Floats | None] = [None] * max_seqs
        self.at: Ints = np.full(max_seqs, -1, dtype=np.int32)
        self.offered: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.wanted = 0
        #: For use by kernels, (max_seqs,) each.
        self.firsts: Ints = np.zeros(max_seqs, dtype=np.int32)
        self.rooms: Ints = np.zeros(max_seqs, dtype=np.int32)

    def keep(self, row: int, computed: int, losses: Floats, gains: Floats | None) -> None:
        """Note a row's curves, of when so many of its tokens were computed."""
        self.losses[row] = losses
        self.gains[row] = gains
        self.at[row] = computed

    def spend(self, row: int) -> None:
        """Forget a row's curves: its entries have moved."""
        self.losses[row] = None
        self.gains[row] = None
        self.at[row] = -1

    def clear(self, row: int) -> None:
        """Forget a row, which nobody has any more."""
        self.spend(row)
        self.offered[row] = 0
