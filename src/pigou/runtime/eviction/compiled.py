"""`ReturnModel` as compiled kernels take it."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from pigou.request import Ints
from pigou.runtime.eviction import return_kernels as kernels
from pigou.runtime.eviction.policy import Floats, Judged, Row
from pigou.runtime.eviction.returns import SCALES, ReturnModel


class CompiledReturns:
    """Sums up and judges entries on the CPU, where they lie in the cache.

    To within rounding it is `ReturnModel` behind `unrotate`. Side data must be laid out as
    `Pigou.fields` has it.
    """

    def __init__(self, model: ReturnModel, turns: Tensor) -> None:
        """Lay out weights along the entries.

        Args:
            model: whose weights they are.
            turns: rotary table by position, of any amplitude.
        """
        amplitude = turns[0].square().sum() / (turns.shape[1] // 2)
        self._turns: Floats = turns.numpy()
        self._scale = float(amplitude.rsqrt())
        birth = (model.birth_in, model.birth_bias, model.birth_out)
        value = (model.value_in, model.value_bias, model.value_out)
        self._birth, self._value = _turned(*birth), _turned(*value)
        self._last: Floats = model.value_last[:, 0].contiguous().numpy()

    def bear(self, row: Row, line: int) -> None:
        """Sum up a row's new entries; results go to its side data, from `line` on."""
        where = (row.kv, row.numbers, row.numbers.view(np.int32), row.table, row.entries)
        kernels.bear(*where, row.stop, line, self._turns, self._scale, *self._birth)

    def judge(self, row: Row, order: Floats) -> Judged:
        """Judge a row's entries, at a power mean.

        Args:
            row: whose entries they are.
            order: of the power mean, shape (layers, kv_heads).
        """
        numbers = row.numbers
        scores: Floats = np.empty((numbers.shape[1] * numbers.shape[2], row.entries), np.float32)
        positions: Ints = np.empty(scores.shape, np.int32)
        fades = np.array([math.exp(-row.since / scale) for scale in SCALES], np.float32)
        where = (numbers, numbers.view(np.int32), row.table, row.entries, row.following)
        kernels.judge(*where, fades, *self._value, self._last, order.ravel(), scores, positions)
        return Judged(scores, positions)


def _turned(into: Tensor, bias: Tensor, out: Tensor) -> tuple[Floats, Floats, Floats]:
    """Turn a network's weights, whose hidden units become a multiple of what kernels take."""
    more = -into.shape[2] % kernels.UNITS
    wide = [np.pad(part.numpy(), ((0, 0), (0, 0), (0, more))) for part in (into, bias)]
    tall = np.pad(out.numpy(), ((0, 0), (0, more), (0, 0)))
    first, last = (np.ascontiguousarray(part.swapaxes(1, 2)) for part in (wide[0], tall))
    return first, np.ascontiguousarray(wide[1][:, 0]), last
