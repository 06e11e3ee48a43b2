"""Tables of `pigou sweep`: TTFT of a prefill pool, ITL of a decode pool; a performance model."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pigou.config import ConfigError, wrong
from pigou.performance.model import PerformanceModel
from pigou.request import Role


class PromptPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt alone: tokens, seconds that a worker computes it, and until its first token."""

    isl_tokens: int
    prefill_s: float
    ttft_s: float


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefill pool at a load; TTFT counts from sending."""

    workers: int
    isl_tokens: int
    utilisation: float  # rate over what the pool computes at most, 0 to 1
    rate_rps: float  # Poisson arrivals a second
    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    ttft_p99_s: float


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One decode worker with so many users."""

    concurrency: int  # users, each of whom has one request at a time
    streams: float  # that the worker decoded, in the mean; the others wait or are being computed
    context_tokens: float  # prompt and half of the output, that each held in the mean
    itl_mean_s: float  # busy seconds over steps
    itl_p95_s: float  # of requests, their mean seconds between tokens
    output_tok_s: float  # tokens a second


class SweepTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `pigou sweep` writes."""

    source: str  # where it was measured: `simulator` or `live`
    model: str
    gpu: str
    tp: int
    timing: str
    kv_tokens: int  # limits of one worker
    max_seqs: int
    max_batched_tokens: int
    overhead_s: float  # of TTFT besides the prompt
    transfer_token_s: float  # of TTFT for each token of the prompt
    prompts: tuple[PromptPoint, ...]
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...]

    @classmethod
    def parse(cls, text: bytes) -> SweepTables:
        """Read what was written.

        Raises:
            ConfigError: it is no such file, or a table has no point.
        """
        try:
            tables = msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"performance: {wrong(error, cls, {})}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"performance: {error}; give a file of `pigou sweep`") from error
        if not (tables.prompts and tables.decode):
            raise ConfigError("performance: prompts and decode need a point each; sweep again")
        return tables

    def performance(self, role: Role) -> PerformanceModel:
        """Return the performance model of a pool of such workers."""
        prefill = {point.isl_tokens: point.prefill_s for point in self.prompts}
        decode = {
            (max(point.streams, 1.0), point.context_tokens): point.itl_mean_s
            for point in self.decode
        }
        try:
            model = PerformanceModel.from_points(
                ((float(tokens), seconds) for tokens, seconds in prefill.items()),
                ((*key, seconds) for key, seconds in decode.items()),
                float(self.kv_tokens), self.max_seqs,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"performance: {error}; sweep again") from error
        return replace(
            model,
            chunk_tokens=self.max_batched_tokens,
            overhead_s=self.overhead_s,
            transfer_token_s=self.transfer_token_s if role is Role.PREFILL else 0.0,
        )
