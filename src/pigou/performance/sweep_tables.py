"""Tables of `pigou sweep`: TTFT of a prefill pool, ITL of a decode pool."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pigou.config import ConfigError, wrong
from pigou.performance.model import PerformanceModel
from pigou.request import Role
from pigou.small_file import read_bytes
from pigou.wire.errors import DECODING_ERRORS


class PromptPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prompt on an idle pool: length, prefill seconds, TTFT."""

    isl_tokens: int
    prefill_s: float
    ttft_s: float


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefill pool at a load; TTFT counts from sending."""

    workers: int
    isl_tokens: int
    utilisation: float  # rate over the pool's highest throughput, 0 to 1
    rate_rps: float  # Poisson arrivals a second
    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    ttft_p99_s: float


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One decode worker at a concurrency."""

    concurrency: int  # users with one request at a time each
    streams: float  # mean running streams; other requests wait or prefill
    context_tokens: float  # mean tokens a stream holds: prompt and half of the output
    itl_mean_s: float  # busy seconds over steps
    itl_p95_s: float  # 95th percentile of the requests' mean ITLs
    output_tok_s: float  # tokens a second


class SweepTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The document that `pigou sweep` writes."""

    source: str  # where it was measured: `simulator` or `live`
    model: str
    gpu: str
    tp: int
    dp: int = 1
    ep: bool = False
    timing: str
    kv_tokens: int  # limits of one worker
    max_seqs: int
    max_batched_tokens: int
    overhead_s: float  # TTFT without prefill
    transfer_token_s: float  # TTFT added by each prompt token's transfer
    prompts: tuple[PromptPoint, ...]
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...]

    @classmethod
    def parse(cls, text: bytes) -> SweepTables:
        """Read a written document; raises ConfigError if it is none or a table is empty."""
        try:
            tables = msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"performance: {wrong(error, cls, {})}") from error
        except DECODING_ERRORS as error:
            raise ConfigError(f"performance: {error}; give a file of `pigou sweep`") from error
        if not (tables.prompts and tables.decode):
            raise ConfigError("performance: prompts and decode need a point each; sweep again")
        return tables

    @classmethod
    def read(cls, path: str) -> SweepTables:
        """Read the file of an option `performance`. Raises ConfigError."""
        try:
            return cls.parse(read_bytes(path))
        except OSError as error:
            raise ConfigError(f"performance is {path!r}: {error.strerror}") from None

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
