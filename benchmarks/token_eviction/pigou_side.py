"""Pigou's side: reads tasks with the real executor, its blocks handed out by the real pool.

When blocks go is the task's matter here, which entries go the executor's (`Compaction`).
"""

from __future__ import annotations

import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.token_eviction.budget import Budget
from benchmarks.token_eviction.table import TRAINED
from benchmarks.token_eviction.task import Meter, Outcome, Prepared, joined
from benchmarks.token_eviction.training import Training
from pigou.config import EvictionConfig
from pigou.engine.plan import Compaction, Plan, Started
from pigou.kv.block_pool import BlockPool
from pigou.request import Ints, SamplingParams, no_hashes
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.models.decoder import DecoderModel
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.token_eviction.policy import GROUP, CacheEntries
from pigou.runtime.token_eviction.predictor import RETURNS
from pigou_lab.token_eviction.baselines import Oracle

#: Tokens after a cut that the oracle knows.
HORIZON = 256
#: Order of the power mean for a predictor trained for a model: lower than where questions are
#: asked.
ORDER = 0.5
#: Behind a policy's name: what it keeps beside keys and values comes out of its budget too.
WITHIN = " (all bytes within)"
#: Behind the oracle's name: it knows the whole rest of the row.
REST = " (whole future)"
NAMES = ("full", "h2o", "streaming", "snapkv", "random", "paper-lossy", "pigou",
         "pigou" + WITHIN, "oracle")  # fmt: skip
_NO_PAIRS: Ints = np.empty((0, 2), dtype=np.int32)


class Tap:
    """A model that shows the logits of all the tokens that it computes.

    Attributes:
        open: whether logits are wanted.
        shown: logits of the last step, shape (tokens, vocab).
    """

    def __init__(self, inner: DecoderModel) -> None:
        self._inner = inner
        self.open = False
        self.shown = torch.empty(0)

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Compute as `DecoderModel.hidden`, and keep the logits when they are wanted."""
        if not self.open:
            return self._inner.hidden(tokens, attention, wanted)
        hidden = self._inner.hidden(tokens, attention, None)
        self.shown = self._inner.logits(hidden).float()
        return hidden if wanted is None else hidden[wanted]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class PigouSide:
    """Reads tasks under a policy of eviction."""

    def __init__(
        self, *, sinks: int, recent: int, rows: int, training: Training | None = None,
        kv_dtype: str = "auto",
    ) -> None:  # fmt: skip
        """Begin without a model.

        Args:
            sinks: first entries that are kept.
            recent: last entries that are kept.
            rows: computed at once.
            training: of predictors for models that have none; None: the generic one must do.
            kv_dtype: format of keys and values.
        """
        self._training, self._kv_dtype = training, kv_dtype
        self._config = EvictionConfig(sinks=sinks, recent=recent, least=max(1, sinks + recent))
        self._rows = rows
        self._models: dict[str, LoadedModel] = {}

    def names(self, prepared: Prepared) -> list[str]:
        """Return the names of all methods on a task, of policies those that are installed."""
        known = {"full", *entry_points(group=GROUP).names}
        # FIFO and LRU keep the same as a window of a prompt computed in one step.
        streams = [] if prepared.task.whole else ["fifo", "lru", "oracle" + REST]
        bare = not (Path(prepared.task.model) / RETURNS).exists()
        trained = ["pigou" + TRAINED] if self._training is not None and bare else []
        return [name for name in (*NAMES, *streams, *trained) if _policy(name) in known]

    def run(self, prepared: Prepared, name: str, most: Budget) -> Outcome:
        """Let a policy read a task.

        Args:
            name: of the policy; `full` for the full cache.
            most: entries that it may keep.
        """
        model = self._model(Path(prepared.task.model), trained=name.endswith(TRAINED))
        policy = _policy(name)
        config = None
        if policy != "full":
            params = {"order": ORDER} if name.endswith(TRAINED) else {}
            config = msgspec.structs.replace(self._config, policy=policy, params=params)
        rows = len(prepared.tokens)
        parts = []
        for at in range(0, rows, self._rows):
            here = slice(at, min(at + self._rows, rows))
            reading = Reading(model, prepared, here, config)
            horizon = prepared.task.length if name.endswith(REST) else HORIZON
            reading.tell(horizon)
            parts.append(reading.read(reading.fitting(most) if name.endswith(WITHIN) else most))
        return joined(parts)

    def _model(self, folder: Path, *, trained: bool) -> LoadedModel:
        """Load a model, once; with a predictor of its own, if that is wanted."""
        key = f"{folder}{TRAINED if trained else ''}"
        if key not in self._models:
            if trained:
                assert self._training is not None, "the method has no name without"
                folder = self._training.folder(folder)
            self._models[key] = load(folder, dtype="fp32", kv_dtype=self._kv_dtype)
        return self._models[key]


def _policy(name: str) -> str:
    """Return the name of a method's policy."""
    return name.removesuffix(WITHIN).removesuffix(REST).removesuffix(TRAINED)


class Reading:
    """Some rows of a task on their way through an executor."""

    def __init__(
        self, model: LoadedModel, prepared: Prepared, rows: slice, config: EvictionConfig | None
    ) -> None:
        """Put an executor together; no token has been computed.

        Args:
            config: of eviction; None for the full cache.
        """
        task = prepared.task
        self.prepared, self.rows = prepared, rows
        self.size = task.chunk
        self.tokens = np.array(prepared.tokens[rows])
        count, width = len(self.tokens), -(-task.length // self.size)
        self.pool = BlockPool(count * width)
        self.tables: Ints = np.zeros((count, width), dtype=np.int32)
        self.cache = model.cache(self.pool.blocks, self.size)
        self.executor = model.executor(self.cache, self.tables, task.length, config)
        self.tap = Tap(self.executor.model)
        self.executor.model = self.tap
        self.entries = 0
        self.cut = -1
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = task.whole or 2 * task.chunk
        for row, ids in enumerate(self.tokens):
            self.executor.add(str(row), ids, params, b"", resume=task.length - prompt)

    @property
    def side(self) -> int:
        """Bytes of a block that are kept beside keys and values."""
        evictor = self.executor.evictor
        return 0 if evictor is None else int(evictor.stats.block_bytes)

    def fitting(self, most: Budget) -> Budget:
        """Return what is left of a budget that has to hold the side data as well."""
        block = self.cache.layout.block_bytes
        blocks = most.most // self.size * block // (block + self.side)
        return Budget(most.share, blocks * self.size, most.after - most.most + blocks * self.size)

    def tell(self, horizon: int) -> None:
        """Tell an oracle what comes within a horizon."""
        evictor = self.executor.evictor
        if evictor is None or not isinstance(evictor.policy, Oracle):
            return
        known: dict[int, NDArray[np.float32]] = {}

        def score(entries: CacheEntries) -> NDArray[np.float32]:
            if self.cut not in known:
                known.clear()
                known[self.cut] = self.prepared.future(self.cut, horizon)[self.rows]
            future = known[self.cut][int(entries.request)]
            return np.take_along_axis(future, entries.positions.astype(np.int64), axis=-1)

        evictor.policy.scorer = score

    def read(self, most: Budget) -> Outcome:
        """Compute all rows, giving entries up as the task wants it."""
        task = self.prepared.task
        meter = Meter(self.prepared, self.rows)
        spent = 0.0
        for number, (first, end) in enumerate(task.spans()):
            self.cut = number - 1
            keep = self.entries if self.executor.evictor is None or not number else most.after
            began = time.perf_counter()
            self._compute(first, end, max(0, self.entries - keep))
            spent += time.perf_counter() - began
            self._show(meter, first, end)
        return meter.outcome(spent)

    def _compute(self, first: int, end: int, drop: int) -> None:
        """Give up entries of each row, then compute some tokens behind the others."""
        drop -= drop % self.size
        compactions = [self._compaction(row, drop) for row in range(len(self.tokens)) if drop]
        self.entries -= drop
        held, wanted = -(-self.entries // self.size), self.entries + end - first
        for table in self.tables:
            self.pool.allocate(table[held : -(-wanted // self.size)])
        count = len(self.tokens)
        self.tap.open = end > self.prepared.task.measured
        self.executor.execute(
            Plan(
                rows=np.arange(count, dtype=np.int32),
                starts=np.full(count, first, dtype=np.int32),
                counts=np.full(count, end - first, dtype=np.int32),
                kv_lens=np.full(count, self.entries, dtype=np.int32),
                samples=np.zeros(count, dtype=np.bool_),
                started=[Started(str(row), row, 0) for row in range(count)] if not first else [],
                compactions=compactions,
            )
        )
        self.entries = wanted

    def _compaction(self, row: int, drop: int) -> Compaction:
        """Let a row give up entries, and its last blocks."""
        table, blocks = self.tables[row], -(-self.entries // self.size)
        before = table[:blocks].copy()
        self.pool.release(table, blocks - drop // self.size, blocks, no_hashes())
        return Compaction(row, self.entries, 0, drop, _NO_PAIRS, before)

    def _show(self, meter: Meter, first: int, end: int) -> None:
        """Tell the meter what was computed, and what it stands on."""
        used = self.pool.blocks - self.pool.free
        meter.held(first, end, used * self.cache.layout.block_bytes, used * self.side)
        if not self.tap.open:
            return
        count = len(self.tokens)
        meter.logits(first, self.tap.shown.view(count, end - first, -1).numpy())
        evictor = self.executor.evictor
        if evictor is None:
            config = self.executor.model.config
            shape = (count, config.layers, config.kv_heads, self.entries)
            kept: Ints = np.broadcast_to(np.arange(self.entries, dtype=np.int32), shape)
        else:
            kept = np.stack([evictor.positions(table, self.entries) for table in self.tables])
        meter.kept(first, end, kept)
