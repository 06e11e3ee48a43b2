"""What tenants use of a fleet: KV residency over time, and the fleet's rates and prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import Estimates
from pigou.control.state import FleetState
from pigou.request import SECOND, Request

#: Tokens of a prompt that are shared as one piece.
_PIECE = 256
_MIN_TOKEN_S = 1e-9  # seconds of a prompt token


@dataclass(frozen=True, slots=True)
class FleetRates:
    """What a fleet can do, and what its units cost the others, in seconds of a worker."""

    prefill_tokens_s: float = 1e4  # uncached tokens per second of all workers
    output_tokens_s: float = 1e3
    kv_tokens: float = 0.0  # KV capacity; 0 if unknown
    # prefill and decode share workers, so they are one resource.
    is_shared: bool = True
    # prices: own seconds, delay of others (tolls), and evictions (memory price).
    prefill_s: float = 1e-4  # per uncached token
    output_s: float = 1e-3  # per output token
    kv_token_s: float = 0.0  # per token of KV and second


def fleet_rates(
    state: FleetState, known: Estimates, max_streams: NDArray[np.int64],
    displaced: NDArray[np.float64], written_tokens_s: float,
) -> FleetRates:  # fmt: skip
    """Return a fleet's rates and prices of the moment, means over its workers.

        p_prefill = s + n i + m,   p_output = f(n) / n + n (f(n+1) - f(n)) + m,   p_kv = m W / K

    | symbol | meaning |
    |---|---|
    | s, i | seconds per uncached token: of the worker, and taken from each of its streams |
    | n, f | streams of a worker, its seconds between two tokens |
    | m | memory price: seconds of prefill that a written token pushes out (`displaced`) |
    | W, K | tokens written per second, KV capacity: a token is in the cache for K / W seconds |
    """
    columns = state.columns
    decodes, prefills = np.flatnonzero(columns.decodes), np.flatnonzero(columns.prefills)
    if not len(decodes):
        return FleetRates()
    if not len(prefills):
        prefills = decodes
    token_s = np.maximum(known.prefill_per_token, _MIN_TOKEN_S)
    limits = np.maximum(max_streams[decodes], 1).astype(np.float64)
    output_tokens_s = float((limits / known.itl(decodes, limits)).sum())
    kv_tokens = float((columns.blocks * columns.block_size)[decodes].sum())
    streams = columns.decode_requests[decodes].astype(np.float64)
    step_s = known.itl(decodes, np.maximum(streams, 1.0))
    delay_s = streams * (known.itl(decodes, streams + 1.0) - step_s) * (streams > 0)
    output_s = float((step_s / np.maximum(streams, 1.0) + delay_s).mean())
    memory_s = float((displaced * token_s).mean())
    delays_s = columns.decode_requests * known.interference_token
    prefill_s = float((token_s + delays_s)[prefills].mean())
    return FleetRates(
        prefill_tokens_s=float((1.0 / token_s[prefills]).sum()),
        output_tokens_s=output_tokens_s,
        kv_tokens=kv_tokens,
        is_shared=bool((columns.decodes & columns.prefills).any()) or prefills is decodes,
        prefill_s=prefill_s + memory_s,
        output_s=output_s + memory_s,
        kv_token_s=memory_s * written_tokens_s / kv_tokens if kv_tokens else 0.0,
    )


class _HeldPrompt:
    __slots__ = ("began", "held", "keys", "piece", "tenant")

    def __init__(self, tenant: str, piece: int, keys: list[tuple[str, int]], now: int) -> None:
        self.tenant, self.piece, self.keys = tenant, piece, keys
        self.held = _Holding(now)  # tokens that nobody shares
        self.began = 0.0  # sum of `_Piece.part_s` when it began


class _Holding:
    __slots__ = ("at", "token_s", "tokens")

    def __init__(self, now: int) -> None:
        self.tokens, self.token_s, self.at = 0.0, 0.0, now

    def add(self, tokens: float, now: int) -> None:
        self.token_s += self.tokens * (now - self.at) / SECOND
        self.tokens += tokens
        self.at = now

    def until(self, now: int) -> float:
        return self.token_s + self.tokens * (now - self.at) / SECOND


class _Piece:
    __slots__ = ("at", "count", "holders", "part_s")

    def __init__(self, now: int) -> None:
        self.holders: dict[str, int] = {}  # requests by tenant
        self.count, self.part_s, self.at = 0, 0.0, now

    def until(self, now: int) -> float:
        """Return the integral of 1 / holders, in seconds."""
        return self.part_s + ((now - self.at) / SECOND / self.count if self.count else 0.0)


class KVResidency:
    """KV tokens that running requests hold, over time, by tenant; times are nanoseconds.

    A piece of a prompt that k requests on one worker hold costs each of them 1/k, so sharing never
    raises a bill. Each step costs O(pieces of the prompt), where tenants share them O(tenants).
    """

    def __init__(self) -> None:
        self._runs: dict[str, _HeldPrompt] = {}
        self._pieces: dict[tuple[str, int], _Piece] = {}  # by worker and router key of its end
        self._tenants: dict[str, _Holding] = {}

    def began(self, request: Request, worker: str, now: int) -> None:
        """Add a request's prompt on a worker."""
        self.ended(request.id, now)
        piece, keys = 0, []
        block_size, block_keys = next(iter(request.keys.items()), (0, None))
        if block_keys is not None and block_size > 0:
            stride = max(1, _PIECE // block_size)
            piece = stride * block_size
            keys = [(worker, key) for key in block_keys[stride - 1 :: stride].tolist()]
        run = self._runs[request.id] = _HeldPrompt(request.account, piece, keys, now)
        self.grew(request.id, max(0, request.prompt - piece * len(keys)), now)
        for key in keys:
            self._share(key, run, 1, now)
        run.began = self._parts_s(run, now)

    def grew(self, request: str, tokens: int, now: int) -> None:
        """Add output tokens."""
        run = self._runs.get(request)
        if run is not None:
            run.held.add(tokens, now)
            self._holding(run.tenant, now).add(tokens, now)

    def ended(self, request: str, now: int) -> None:
        """Remove a request."""
        run = self._runs.pop(request, None)
        if run is not None:
            self._holding(run.tenant, now).add(-run.held.tokens, now)
            for key in run.keys:
                self._share(key, run, -1, now)

    def token_s(self, tenant: str, now: int) -> float:
        """Return the tokens times seconds that a tenant held so far."""
        held = self._tenants.get(tenant)
        return 0.0 if held is None else held.until(now)

    def request_token_s(self, request: str, now: int) -> float:
        """Return the tokens times seconds of a running request; 0 where it is unknown."""
        run = self._runs.get(request)
        if run is None:
            return 0.0
        return run.held.until(now) + run.piece * (self._parts_s(run, now) - run.began)

    def _parts_s(self, run: _HeldPrompt, now: int) -> float:
        return sum(self._pieces[key].until(now) for key in run.keys)

    def _holding(self, tenant: str, now: int) -> _Holding:
        held = self._tenants.get(tenant)
        if held is None:
            held = self._tenants[tenant] = _Holding(now)
        return held

    def _share(self, key: tuple[str, int], run: _HeldPrompt, change: int, now: int) -> None:
        """Add or remove a holder of a piece, and divide it anew."""
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = _Piece(now)
        piece.part_s, piece.at = piece.until(now), now
        holders, before = piece.holders, piece.count
        after = piece.count = before + change
        own = holders.get(run.tenant, 0)
        holders[run.tenant] = own + change
        if before and after and len(holders) == 1:
            return  # a tenant's requests share it among themselves
        for tenant, count in holders.items():
            was = (own if tenant == run.tenant else count) / before if before else 0.0
            share = count / after if after else 0.0
            self._holding(tenant, now).add(run.piece * (share - was), now)
        if not holders[run.tenant]:
            del holders[run.tenant]
        if not holders:
            del self._pieces[key]
