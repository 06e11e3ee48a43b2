"""Tiny models driven by hand-made plans, beside plain attention over all tokens, some masked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pigou.config import EvictionConfig
from pigou.engine.plan import Compaction, Plan, Started
from pigou.request import Ints, SamplingParams
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.executor import TorchExecutor
from pigou.runtime.models.load import LoadedModel
from pigou.runtime.models.rotary_embedding import rotary_table, rotate
from pigou.runtime.token_eviction.entry_stats import EntryStats
from pigou.runtime.token_eviction.evictor import Evictor

ROWS, WIDE, SIZE = 4, 16, 16
#: Layer, KV head, entries: which tokens a query may see besides later ones.
Kept = list[list[set[int]]]


#: Most that logits may differ.
TOLERANCE = 1e-5
#: Of the largest logit, where that is more (the bundled model's are about 12): without any
#: compaction, kernels and plain attention differ by 0.6e-6 of it.
ROUNDING = 2e-6


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits are equal but for rounding."""
    error = float((ours - theirs).abs().max())
    return error <= max(TOLERANCE, ROUNDING * float(theirs.abs().max()))


def no_pairs() -> Ints:
    return np.empty((0, 2), dtype=np.int32)


def pairs(*moves: tuple[int, int]) -> Ints:
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


@dataclass
class Bench:
    """An executor with its own block tables, told what to do row by row.

    Attributes:
        executor: that computes.
        tables: its block tables.
        computed: tokens of each row that were computed.
        entries: of each row.
        logits: of each row's last computed token.
    """

    executor: TorchExecutor
    tables: Ints
    computed: dict[int, int] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def evictor(self) -> Evictor:
        assert self.executor.evictor is not None
        return self.executor.evictor

    def start(self, row: int, tokens: list[int], cached: int = 0, prompt: int = 0) -> None:
        """Give a row to tokens of which the first `prompt` are the prompt (all, where 0)."""
        prompt = prompt or len(tokens)
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        self.executor.drop(f"r{row}")
        self.executor.add(f"r{row}", tokens, params, b"", resume=len(tokens) - prompt)
        self.tokens[row], self.computed[row], self.entries[row] = tokens, cached, cached
        self.run([], started=[Started(f"r{row}", row, cached)])

    def run(self, spans: list[tuple[int, int]], to_score: Ints | None = None, **changes: object):
        """Compute so many of each row's next tokens in one step, without sampling."""
        rows = np.array([row for row, _ in spans], dtype=np.int32)
        counts = np.array([count for _, count in spans], dtype=np.int32)
        plan = Plan(
            rows=rows,
            starts=np.array([self.computed[row] for row, _ in spans], dtype=np.int32),
            counts=counts,
            kv_lens=np.array([self.entries[row] for row, _ in spans], dtype=np.int32),
            samples=np.ones(len(spans), dtype=np.bool_),
            **changes,  # type: ignore[arg-type]
        )
        if to_score is not None:
            plan.to_score = to_score
        taken: list[Tensor] = []
        plain = self.executor.model.logits

        def seen(hidden: Tensor) -> Tensor:
            taken.append(plain(hidden))
            return taken[-1]

        model = self.executor.model
        self.executor.model = _Heard(model, seen)  # type: ignore[assignment]
        try:
            result = self.executor.execute(plan)
        finally:
            self.executor.model = model
        for i, (row, count) in enumerate(spans):
            self.computed[row] += count
            self.entries[row] += count
            self.logits[row] = taken[-1][i]
        for sequence in self.executor._sequences.values():  # what was sampled does not count
            sequence.length = len(self.tokens[int(sequence.request[1:])])
        return result

    def compaction(
        self, row: int, drop: int, first: int = 0, copies: Ints | None = None
    ) -> Compaction:
        blocks = self.tables[row, : -(-self.entries[row] // SIZE)].copy()
        task = Compaction(
            row, self.entries[row], first, drop, no_pairs() if copies is None else copies, blocks
        )
        self.entries[row] -= drop
        return task

    def kept(self, row: int) -> Kept:
        """Return the original positions of a row's entries, by layer and head."""
        positions = self.evictor.positions(self.tables[row], self.entries[row])
        return [[set(head.tolist()) for head in layer] for layer in positions]


class _Heard:
    """A model whose logits somebody hears."""

    def __init__(self, inner: object, logits: object) -> None:
        self.inner = inner
        self.logits = logits

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def bench(
    model: LoadedModel,
    policy: str = "random",
    *,
    plain: bool = False,
    host: int = 0,
    size: int = SIZE,
    params: dict[str, float] | None = None,
    **limits: int,
) -> Bench:
    """Make one; `plain` for torch's operations instead of compiled kernels."""
    config = EvictionConfig(
        policy=policy, params=params or {}, **{"sinks": 2, "recent": 8, "least": 10, **limits}
    )
    tables = np.arange(ROWS * WIDE, dtype=np.int32).reshape(ROWS, WIDE)[:, ::-1].copy()
    cache = model.cache(ROWS * WIDE + 16, size, host)
    executor = model.executor(cache, tables, 256, config)
    if plain:
        attention = PagedAttention(model.config, cache, tables, 256)
        attention.watch = executor._attention.watch
        executor._attention = attention
        evictor = executor.evictor
        assert evictor is not None
        fields = len(evictor.policy.fields)
        stats = EntryStats(cache.layout, fields, cache.blocks, cache.data.device, host)
        evictor.stats = evictor.watch.stats = stats
    return Bench(executor, tables)


def attend_in_full(
    model: LoadedModel, tokens: list[int], seen: dict[int, Kept] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Compute all of a sequence with plain attention, all tokens at once.

    Args:
        model: in fp32.
        tokens: of the sequence.
        seen: from a position on, which of the tokens before it a query may see (and all tokens
            from it on); the last such position at or before a query counts.

    Returns:
        Logits, shape (n, vocab), and each layer's probabilities, shape (heads, n, n).
    """
    config, decoder = model.config, model.decoder
    count = len(tokens)
    turns = rotary_table(config.rope, count, torch.device("cpu"))[:, None]
    chances: list[Tensor] = []
    group = config.group

    class Plain:
        beat = None  # nobody watches the layers

        def __call__(self, layer: int, qkv: Tensor, norm: object) -> Tensor:
            heads = qkv.view(count, -1, config.head_dim)
            query, key, value = torch.split(
                heads, [config.heads, config.kv_heads, config.kv_heads], dim=1
            )
            if norm is not None:
                query = F.rms_norm(query, (config.head_dim,), norm.query, norm.eps)
                key = F.rms_norm(key, (config.head_dim,), norm.key, norm.eps)
            query, key = rotate(query, turns), rotate(key, turns)
            keys = key.repeat_interleave(group, 1).transpose(0, 1)
            values = value.repeat_interleave(group, 1).transpose(0, 1)
            scores = query.transpose(0, 1) @ keys.mT / config.head_dim**0.5
            scores.masked_fill_(~_mask(layer, count, config.heads, group, seen), float("-inf"))
            chances.append(scores.softmax(-1))
            return (chances[-1] @ values).transpose(0, 1).reshape(count, -1)

    with torch.inference_mode():
        hidden = decoder.hidden(torch.tensor(tokens), Plain(), None)  # type: ignore[arg-type]
        return decoder.logits(hidden), chances


def _mask(layer: int, count: int, heads: int, group: int, seen: dict[int, Kept] | None) -> Tensor:
    mask = torch.ones(count, count, dtype=torch.bool).tril().repeat(heads, 1, 1)
    for start, kept in sorted((seen or {}).items()):
        for head in range(heads):
            gone = [t for t in range(start) if t not in kept[layer][head // group]]
            mask[head, start:, gone] = False
            back = [t for t in range(start) if t in kept[layer][head // group]]
            mask[head, start:, back] = True
    return mask


def random_tokens(count: int, vocab: int = 320, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, count).tolist()
