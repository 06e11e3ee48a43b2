"""The meter of one worker: its seconds, split among the requests it serves.

A stream pays (KV bytes + W/B) / (all KV bytes + W) of a step: its own reads, and an equal part of
the weights W, read once for the batch of B. Its toll, the marginal price, omits W/B. Prompts pay by
computed tokens. Charged, idle and open time add up to the worker's.

With A = int dt / (K + W) and C = int (W/B) dt / (K + W) over decode seconds t, K the tokens in the
KV cache and W in tokens of KV, a stream of k tokens pays k dA + dC; its toll is k dA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pigou.cost.usage import Payer, WorkerRate
from pigou.request import SECOND, Rehearsed

#: Weight of a new observation in moving averages.
_NEW = 0.2
#: MFU of prefill before any observation.
_FIRST_MFU = 0.3
#: Seconds per uncached token before any observation or profile.
_FIRST_TOKEN_S = 1e-4


@dataclass(slots=True)
class _Prompt:
    payer: Payer
    tokens: int
    restore_s: float
    number: int
    is_seen: bool = True  # whether a driver reported its end


@dataclass(slots=True)
class _Stream:
    payer: Payer
    kv_tokens: int
    sequences: int
    a: float
    c: float
    own: float = 0.0
    equal: float = 0.0

    def touch(self, a: float, c: float) -> None:
        self.own += self.kv_tokens * (a - self.a)
        self.equal += self.sequences * (c - self.c)
        self.a, self.c = a, c


@dataclass(slots=True)
class _Interval:
    """Seconds since the last settlement; `stream_s`, `kv_s` and `tokens` are integrals."""

    idle: float = 0.0
    prompts: float = 0.0
    streams: float = 0.0
    both: float = 0.0
    stream_s: float = 0.0
    kv_s: float = 0.0
    tokens: int = 0
    ended: list[_Stream] = field(default_factory=list)
    computed: list[_Prompt] = field(default_factory=list)


class WorkerMeter:
    """Splits one worker's time among its requests."""

    def __init__(self, rate: WorkerRate, now: int, profile: Sequence[Rehearsed] = ()) -> None:
        """Start at `now` (ns), with the worker's start-up `profile`."""
        prompts = {entry.tokens: entry.seconds for entry in profile if not entry.streams}
        self._profile = ((0, *sorted(prompts)), (0.0, *(prompts[n] for n in sorted(prompts))))
        self.rate = rate
        self.seconds = 0.0  # since it was up
        self.idle_s = self.idle_joules = 0.0  # without work
        self.open_s = self.open_joules = 0.0  # spent on unfinished prompts
        self.joules = 0.0
        self._prompts: dict[str, _Prompt] = {}
        self._streams: dict[str, _Stream] = {}
        self._at, self._number = now, 0
        self._weight = rate.weight_tokens
        self._kv = self._sequences = 0
        self._a = self._c = 0.0
        self._now = _Interval()
        self._ticked = _Interval()
        self._step_s = 0.0
        self._fastest_step_s = math.inf
        self._mfu = _FIRST_MFU
        self._token_s: float | None = None  # seconds per uncached token; None before a prompt
        self._measured: float | None = None  # joules to charge at the next settlement
        self._charged = 0.0
        self._modelled, self._scale = 0.0, 1.0 if rate.power is not None else 0.0
        self.energy_source = "none" if rate.power is None else "model"

    # --- what happens ---------------------------------------------------------------------------

    def prompt_sent(
        self, request: str, payer: Payer, tokens: int, now: int, restore_s: float = 0.0
    ) -> None:
        """Add a prompt to compute."""
        self.advance(now)
        self._number += 1
        self._prompts[request] = _Prompt(payer, max(tokens, 1), restore_s, self._number)

    def prompt_changed(self, request: str, tokens: int) -> None:
        """Set a prompt's uncached tokens; nothing is restored."""
        if request in self._prompts:
            self._prompts[request].tokens = max(tokens, 1)
            self._prompts[request].restore_s = 0.0

    def prompt_ended(
        self, request: str, now: int, computed: bool = True, is_seen: bool = True
    ) -> None:
        """End a prompt, computed or not; it pays so far. Unseen (estimated) ends teach nothing."""
        if request not in self._prompts:
            return
        self.advance(now)
        prompt = self._prompts.pop(request)
        prompt.is_seen = is_seen
        self._now.computed.append(prompt)
        if computed:
            prompt.payer.add("uncached_tokens", prompt.tokens)

    def stream_began(
        self, request: str, payer: Payer, kv_tokens: int, sequences: int, now: int
    ) -> None:
        """Start decoding a request with `kv_tokens` in the KV cache."""
        if request in self._streams:
            return
        self.advance(now)
        self._streams[request] = _Stream(payer, kv_tokens, sequences, self._a, self._c)
        self._kv += kv_tokens
        self._sequences += sequences

    def stream_tokens(self, request: str, tokens: int, now: int) -> None:
        """Add output tokens of a stream."""
        stream = self._streams.get(request)
        if stream is None:
            return
        self.advance(now)
        stream.touch(self._a, self._c)
        stream.kv_tokens += tokens
        self._kv += tokens
        self._now.tokens += tokens

    def stream_ended(self, request: str, now: int) -> None:
        """End a stream."""
        if request not in self._streams:
            return
        self.advance(now)
        stream = self._streams.pop(request)
        stream.touch(self._a, self._c)
        self._kv -= stream.kv_tokens
        self._sequences -= stream.sequences
        self._now.ended.append(stream)

    def prompt_seconds(self, tokens: int) -> float:
        """Return expected seconds of a prompt behind the current ones, observed or as profiled."""
        sizes = [tokens, *(prompt.tokens for prompt in self._prompts.values())]
        known, seconds = self._profile
        if self._token_s is not None:
            return sum(sizes) * self._token_s
        if len(known) == 1:
            return sum(sizes) * _FIRST_TOKEN_S
        max_size, slope = known[-1], seconds[-1] / known[-1]
        return sum(
            float(np.interp(size, known, seconds)) + max(size - max_size, 0) * slope
            for size in sizes
        )

    # --- time -----------------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        """Advance the clock to `now` (ns)."""
        passed = (now - self._at) / SECOND
        if passed <= 0.0:
            return
        self._at = now
        interval = self._now
        if not self._sequences:
            if self._prompts:
                interval.prompts += passed
            else:
                interval.idle += passed
            return
        if self._prompts:
            interval.both += passed
        else:
            interval.streams += passed
        interval.stream_s += self._sequences * passed
        interval.kv_s += self._kv * passed
        if math.isinf(self._weight):
            self._c += passed / self._sequences
        else:
            total = self._kv + self._weight
            self._a += passed / total
            self._c += passed * self._weight / self._sequences / total

    def tick(self, now: int) -> None:
        """Learn the step time from the seconds and tokens since the last call."""
        self.advance(now)
        last, interval = self._ticked, self._now
        tokens = interval.tokens - last.tokens
        seconds = interval.streams + interval.both - last.streams - last.both
        if tokens > 0 and seconds > 0.0:
            step_s = (interval.stream_s - last.stream_s) / tokens
            if not math.isinf(self._weight):
                step_s /= 1.0 + (interval.kv_s - last.kv_s) / seconds / self._weight
            self._fastest_step_s = min(self._fastest_step_s, step_s)
            if interval.both == last.both:
                self._step_s += (step_s - self._step_s) * (_NEW if self._step_s else 1.0)
        self._ticked = _Interval(
            streams=interval.streams, both=interval.both, stream_s=interval.stream_s,
            kv_s=interval.kv_s, tokens=interval.tokens,
        )  # fmt: skip

    def measured(self, joules: float) -> None:
        """Add joules of the energy counter; the first call starts scaling modelled energy by it."""
        if self.energy_source != "counter":
            self.energy_source = "counter"
            self._modelled = self._charged = 0.0
        else:
            self._measured = (self._measured or 0.0) + joules

    def settle(self, now: int, *, final: bool = False) -> None:
        """Charge the seconds since the last call; if `final`, requests in flight pay, too."""
        self.advance(now)
        if final:
            for request in list(self._prompts):
                self.prompt_ended(request, now, computed=False)
            for request in list(self._streams):
                self.stream_ended(request, now)
        interval, self._now, self._ticked = self._now, _Interval(), _Interval()
        decode_s = interval.streams + self._decode_part(interval)
        prompt_s = interval.prompts + interval.both + interval.streams - decode_s
        self.seconds += interval.idle + prompt_s + decode_s
        self.idle_s += interval.idle
        idle, prompt, decode = self._joules(interval, prompt_s, decode_s)
        self.idle_joules += idle
        self.joules += idle + prompt + decode
        self.open_s += prompt_s
        self.open_joules += prompt
        self._charge_streams(interval, decode_s, decode)
        self._charge_prompts(interval)

    def _decode_part(self, interval: _Interval) -> float:
        """Return decode seconds within mixed time, by tokens per step."""
        step_s = self._step_s or self._fastest_step_s
        if not interval.both:
            return 0.0
        if not interval.tokens or math.isinf(step_s):
            return interval.both / 2.0 if interval.tokens else 0.0
        mean = interval.streams + interval.both
        steps = interval.tokens / (interval.stream_s / mean)
        if not math.isinf(self._weight):
            step_s *= 1.0 + interval.kv_s / mean / self._weight
        return min(max(steps * step_s - interval.streams, 0.0), interval.both)

    def _joules(
        self, interval: _Interval, prompt_s: float, decode_s: float
    ) -> tuple[float, float, float]:
        rate, power = self.rate, self.rate.power
        joules = interval.idle, prompt_s, decode_s
        if power is not None:
            mbu = 0.0
            if decode_s > 0.0 and rate.bytes_per_s:
                span = interval.streams + interval.both
                steps = interval.tokens / max(interval.stream_s / span, 1e-12)
                read = rate.weight_bytes + interval.kv_s / span * rate.kv_bytes
                mbu = steps * read / decode_s / rate.bytes_per_s
            joules = (
                interval.idle * power.idle_w * rate.gpus,
                prompt_s * power.prefill_watts(self._mfu) * rate.gpus,
                decode_s * power.decode_watts(mbu) * rate.gpus,
            )
        modelled, scale = sum(joules), self._scale
        self._modelled += modelled
        if self._measured is not None and modelled > 0.0:
            scale = max(self._measured - self._charged, 0.0) / modelled
            self._scale = self._measured / self._modelled
            self._charged += scale * modelled - self._measured
            self._measured, self._modelled = None, 0.0
        else:
            self._charged += scale * modelled
        return joules[0] * scale, joules[1] * scale, joules[2] * scale

    def _charge_streams(self, interval: _Interval, decode_s: float, joules: float) -> None:
        span = interval.streams + interval.both
        if span <= 0.0:
            return
        for stream in self._streams.values():
            stream.touch(self._a, self._c)
        rate, part = self.rate, decode_s / span
        for stream in (*interval.ended, *self._streams.values()):
            seconds, own = (stream.own + stream.equal) * part, stream.own * part
            stream.own = stream.equal = 0.0
            payer = stream.payer
            payer.add("decode_gpu_s", seconds * rate.gpus)
            payer.add("decode_usd", seconds * rate.usd_per_s)
            payer.add("marginal_usd", own * rate.usd_per_s)
            if decode_s > 0.0:
                payer.add("decode_joules", joules * seconds / decode_s)

    def _charge_prompts(self, interval: _Interval) -> None:
        """Charge open seconds to ended prompts, and to those they overtook."""
        if not interval.computed:
            return
        last = max(prompt.number for prompt in interval.computed)
        payers = interval.computed + [p for p in self._prompts.values() if p.number < last]
        tokens, rate = sum(prompt.tokens for prompt in payers), self.rate
        restore_s = sum(prompt.restore_s for prompt in interval.computed)
        seconds, joules = self.open_s, self.open_joules
        computing_s = max(seconds - restore_s, 0.0)
        if computing_s > 0.0:
            if all(prompt.is_seen for prompt in interval.computed):
                token_s = computing_s / tokens
                last_s = token_s if self._token_s is None else self._token_s
                self._token_s = last_s + (token_s - last_s) * _NEW
            if rate.flops:
                mfu = tokens * rate.token_flops / computing_s / rate.flops
                self._mfu += (min(mfu, 1.0) - self._mfu) * _NEW
        restored = min(restore_s, seconds)
        for prompt in payers:
            share = prompt.tokens / tokens * computing_s
            restore = prompt.restore_s / restore_s * restored if restore_s else 0.0
            payer = prompt.payer
            payer.add("prefill_gpu_s", share * rate.gpus)
            payer.add("restore_gpu_s", restore * rate.gpus)
            payer.add("prefill_usd", share * rate.usd_per_s)
            payer.add("restore_usd", restore * rate.usd_per_s)
            payer.add("marginal_usd", (share + restore) * rate.usd_per_s)
            if seconds > 0.0:
                payer.add("prefill_joules", joules * (share + restore) / seconds)
        self.open_s = self.open_joules = 0.0
