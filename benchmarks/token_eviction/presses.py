"""The presses of kvpress that run offline on a CPU and really shrink what is stored.

Runs in the peer's environment. Left out: AdaKV, DMS, KVzip, LU-KV and CriticalAdaKV (they mask and
keep the storage), QFilter, KVzap, FastKVzip and RestoreKV (they fetch weights).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress import (
    BasePress,
    ChunkKVPress,
    CompactorPress,
    CriticalKVPress,
    CURPress,
    DecodingPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KeyRerotationPress,
    KnormPress,
    LagKVPress,
    LeverageScorePress,
    NonCausalAttnPress,
    ObservedAttentionPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

#: Queries that SnapKV looks at after a prompt, and within one chunk of a stream, which it must
#: not fill; lag of LagKV, which at its default of 128 does nothing below 260 entries.
WINDOW, CHUNK_WINDOW, LAG = 32, 8, 32

#: Presses that are given nothing but their shipped defaults, sinks and the lag.
SCORERS: dict[str, Callable[[int], ScorerPress]] = {
    "random": lambda _: RandomPress(),
    "knorm": lambda _: KnormPress(),
    "snapkv": lambda window: SnapKVPress(window_size=window),
    "expected": lambda _: ExpectedAttentionPress(),
    "streaming": lambda _: StreamingLLMPress(),
    "tova": lambda _: TOVAPress(),
    "observed": lambda _: ObservedAttentionPress(),
    "keydiff": lambda _: KeyDiffPress(),
    "lagkv": lambda _: LagKVPress(lag_size=LAG),
}
#: These only know prompts.
PREFILL_ONLY: dict[str, Callable[[], Any]] = {
    "rerotated streaming": lambda: KeyRerotationPress(StreamingLLMPress()),
    "leverage": LeverageScorePress,
    "compactor": CompactorPress,
    "cur": CURPress,
    "non-causal": NonCausalAttnPress,
    "chunk snapkv": lambda: ChunkKVPress(SnapKVPress(window_size=WINDOW), chunk_length=16),
    "critical expected": lambda: CriticalKVPress(ExpectedAttentionPress(use_vnorm=False)),
}
#: Behind a press's name: the sinks and the recent window are kept whatever it says.
GUARDED = " +window"
#: Behind a press's name: four chunks between cuts, at the same mean and one and a half chunks
#: more at the peak, as presses that look at recent queries see more of them.
SELDOM, CHUNKS = " /4", 4


@dataclass
class Guarded(ScorerPress):
    """Another press that keeps sinks and the most recent entries, and leaves them in order."""

    base: Any = field(default=None)
    sinks: int = 4
    recent: int = 32

    def score(self, *args: Any) -> torch.Tensor:
        """Return the base's scores, above all others where an entry is to be kept."""
        scores: torch.Tensor = self.base.score(*args).clone()
        scores[..., : self.sinks] = torch.inf
        scores[..., -self.recent :] = torch.inf
        return scores

    def compress(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is kept, in order of position (the shipped presses order by score)."""
        if self.compression_ratio == 0:
            return keys, values
        self.base.compression_ratio = self.compression_ratio
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        count = int(keys.shape[2] * (1 - self.compression_ratio))
        order = scores.topk(count, dim=-1).indices.sort(dim=-1).values
        order = order.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, order), values.gather(2, order)


@dataclass
class Oracle(ScorerPress):
    """Keeps what the full cache will attend to: the harness's own, no press of kvpress."""

    # attention to come by position, of the layer, shape (rows, kv_heads, length); set before each
    # cut.
    future: Callable[[int], torch.Tensor] | None = None
    # positions of a layer's entries, shape (rows, kv_heads, entries).
    positions: Callable[[int], torch.Tensor] | None = None

    def score(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,  # noqa: ARG002
        keys: torch.Tensor,  # noqa: ARG002
        values: torch.Tensor,  # noqa: ARG002
        attentions: torch.Tensor,  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
    ) -> torch.Tensor:
        """Return each entry's attention to come."""
        assert self.future is not None
        assert self.positions is not None
        layer: int = module.layer_idx  # type: ignore[assignment]
        return self.future(layer).gather(2, self.positions(layer))


def names(whole: bool) -> list[str]:
    """Return the names of all presses, for prompts (`whole`) or for streams."""
    shipped = list(SCORERS) + (list(PREFILL_ONLY) if whole else [])
    # After a prompt, StreamingLLM keeps sinks and the last entries as it is.
    same = {"random", "streaming"} if whole else {"random"}
    guarded = [name + GUARDED for name in SCORERS if name not in same]
    return shipped + guarded + ([] if whole else ["expected" + GUARDED + SELDOM])


def scorer(name: str, window: int, sinks: int, recent: int) -> Any:
    """Make a press by its name, without what says how often it cuts."""
    base = name.removesuffix(GUARDED)
    press = Oracle() if base == "oracle" else SCORERS[base](window)
    return Guarded(base=press, sinks=sinks, recent=recent) if name.endswith(GUARDED) else press


def prefill_press(name: str, length: int, keep: int, sinks: int, recent: int) -> BasePress:
    """Make a press that cuts `length` entries to `keep` at the end of a prompt."""
    press = PREFILL_ONLY[name]() if name in PREFILL_ONLY else scorer(name, WINDOW, sinks, recent)
    press.compression_ratio = 1 - (keep + 0.5) / length  # presses round down
    return press


def stream_press(name: str, most: int, chunk: int, sinks: int, recent: int) -> DecodingPress:
    """Make a press that cuts between chunks, so that attention never works on more than `most`.

    With `SELDOM`, it works on `most` in the mean.
    """
    every = CHUNKS if name.endswith(SELDOM) else 1
    base = scorer(name.removesuffix(SELDOM), CHUNK_WINDOW, sinks, recent)
    target = most - chunk - (every - 1) * chunk // 2
    return DecodingPress(base_press=base, compression_interval=every, target_size=target)
