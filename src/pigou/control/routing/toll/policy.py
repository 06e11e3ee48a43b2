"""Pigou's own policy: what a choice costs its request, and what it costs all others."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.latency_model.estimates import Estimates
from pigou.control.routing.policy import Costs, CostTable, RequestView, check_finite, check_share
from pigou.control.routing.toll.columns import PARTS, QUEUE_ROWS
from pigou.control.routing.toll.price import min_uncached, price
from pigou.control.routing.toll.tail import RecentPrompts, patience_s
from pigou.control.routing.view import Candidates, Counts, FleetView
from pigou.control.state import PrefillBacklog

_NO_FETCHES: Costs = np.zeros(0)
_UNKNOWN = PrefillBacklog()


class TollParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Toll`, none of which needs tuning.

    Attributes:
        toll: share of the tolls that is charged; 0 is the selfish choice.
        overlap_weight: share of its cached prefix that a request counts on.
        fairness: how much more seconds count of streams that are slower than the fleet's mean, by
            how much they are, to this power; 0 is the least mean time, however unequal.
        host_restore: seconds that a token from host memory takes, as a share of those to compute
            it; workers tell no rates. Above 1 makes no sense: they compute what is quicker so.
        storage_restore: the same for disk and object storage.
    """

    toll: float = 1.0
    overlap_weight: float = 1.0
    fairness: float = 5.0
    host_restore: float = 0.1
    storage_restore: float = 0.5

    def __post_init__(self) -> None:
        check_finite(self, "toll", "overlap_weight", "fairness")
        check_share(self, "host_restore", "storage_restore")


class Toll:
    """Expected private cost plus toll, in seconds; there are no weights to tune.

    For a prompt of t tokens, of which u are uncached on worker p (p = d where it is computed
    locally), N expected output tokens, n streams on decode worker d:

        wait      Q_p = S_p - min(e_p, s'_p), S_p = prefill_base q_p + prefill_token U_p
                  + prefill_pair V_p  (q_p > 0 prompts there; 0 where there are none)
        prefill   s + l, s = prefill_base_p + prefill_token_p u + prefill_pair_p u (t - u / 2)
                  l = prefill_token_p (host_restore h_p + storage_restore g_p)
        transfer  x = transfer_base_d + transfer_token_d (tokens that d lacks), 0 where p = d
        decode    N f_d(n + 1, K + t + N / 2) + b,  b = Z_d max(0, S_d - Q_p - s - x) / S_d where p
                  is not d
        toll of the stream    h(T_d / T) N n (f_d(n + 1, K + t + N / 2) - f_d(n, K))
        toll of the queue     min(o w v * sum of (k - i) rho_p^i over i = 1, 2, ... below k, G_p)
                  o = 4/3 + mean of 10 F(t)^9 / 3 over t from w to Q_p + w
        toll of the stall     h(T_d / T) z n, where p = d
        toll of memory        (r_p e_p u + r_d e_d y) (s + the two tolls before) / s
        toll of the place     min(A', A_d(n+1)) - A_d(n), where A_d(n) is the least of all
                  A_w(n) = min(z'_w n, (F - T_w)+)
        tail      (10 R^9 / 3) (wait + prefill + transfer) + integral over t from 0 to Q_p of
                  10 F(t)^9 / 3, F(t) = 1 - exp(-t / (m_p (max(1, c) + c_p))), + T integral over r
                  from 1 to (T_d + N (f_d(n + 1, K + t + N / 2) - f_d(n, K))) / T of h(r) - 1

    with f_d(n, K) = f_d(n) + context_token_d (K - context_mean n) for the K tokens that the streams
    of d hold, f_d(n) being for n that hold the mean: a step reads the keys and values of all of
    them. h_p and g_p are tokens of the prefix that p has only in host memory, and only in storage:
    they come back beside the steps, and delay nobody else. U_p are uncached tokens of the prompts
    there, and V_p pairs of them with a token before (the attention of long prompts); z =
    interference_base_d + interference_token_d u, pairs counted as the tokens that they take as long
    as, and Z_d the same of all prompts that wait at d; w = z where p = d and n > 0, s elsewhere;
    m_p the mean of s and c_p its variance by m_p^2; rho_p = Lambda_p m_p; v half the sum of c_p and
    of c, the same of gaps between arrivals; k = 1 + Q_p / (v m_p). The one under way has been for
    e_p seconds, of s'_p that it takes. Where p = d and n > 0, s is at least 3/2 f_d(n, K) + z: the
    step that runs has to end first, in the mean half of one, and the prompt's own comes after it. b
    is for prompts that d itself is to compute, and will not have done when the stream begins. r is
    of `FleetView.recomputed_share`: blocks that had to go for want of memory and were computed
    again, for each block that is stored on the worker; e the seconds that an uncached token takes
    in the mean; y the tokens that d stores besides, N and, where p is not d, those of the prompt
    that it lacks.

    The stream's toll is the marginal-cost toll of the routing game (design, "Three games, three
    prices"; Georgiou 2026, Eq. 7 gives the game). The queue's is Naor's ("The Regulation of Queue
    Size by Levying Tolls", Econometrica 1969), whose customers choose as prompts do here, between a
    queue and another way of known price: it counts those who come to p before its queue is shorter
    than this prompt found it, each delayed by w; those who would find it longer go the other way.
    Those delays are of first tokens, and count with the tail (below): for sizes that is 4/3 in the
    mean, and for waits what seconds of theirs do, which are w (for the last who is delayed) to Q_p
    + w (for the next). His queue is M/M/1, where v is 1; others are like it with v prompts for one
    (the diffusion limit, in which only v tells them apart; Kingman 1962). G_p is the most that it
    can be where p does nothing else: the next prompt may be sent the other way, and all is as if
    this one had not come. It loses g = D - m_p less the wait it would have found, Q_p - 1 /
    Lambda_p, for a prompt of mean length; D is the least of T_w + z'_w n - x_w (below). That is G_p
    where rho_p < 1. Where more would come than p computes, a second in which it is idle loses g /
    m_p; without this prompt it would be idle for exp(-Lambda_p Q_p) / Lambda_p until the next, and
    what that loses is taken off. Lambda_p is who would come: the prompts of the whole fleet, shared
    out among the workers that do nothing else, and of those the share that would rather wait than
    go the other way. That is the mean, over waits from 0 to Q_p, of the share of the recent prompts
    (`RecentPrompts`) that would have waited for longer (`patience_s`): Naor's customers are all
    alike, these are not. For other workers it is those that were recently sent there. The stall's:
    where streams run, chunks of a prompt are mixed with them and take z from each of the n.
    `PrefillInterference` learns z, which is less than s where weights are read for the streams
    anyway. Remote or local prefill is decided by these sums alone. Memory's is what a block there
    is worth to those who come back (`Ghosts` of the prefix index), each second of computing it
    again at what a second costs all requests there now; it is 0 while nothing that is evicted
    returns.

    The slot's (`toll_place`) is the rent of the stream slot with the least stall, which the next
    prompt cannot have: a mean prompt would go there, and now takes the next best (A') or comes
    beside this one, whichever is cheaper. Without it a prompt waits behind another for as long as
    there is one stream fewer to stall, though the next prompt stalls that stream then. z' is z of a
    prompt of mean length, T_w when w would have computed that, and F when the prefill workers would
    have (infinity without any), where it would go rather than stall for longer. It is the
    externality of taking something scarce, as Vickrey ("Counterspeculation, Auctions, and
    Competitive Sealed Tenders", 1961) prices it: the loss of the next who would have had it.

    With the tail the sum is the mean time, and a third of the longest time to the first token of
    ten requests, as expected: a mean distorted towards its tail (the dual power transform; Wang,
    "Premium Calculation by Transforming the Layer Premium Density", ASTIN Bulletin 1996). The one
    with the longest prompt is taken for the last of them. A prompt of rank R, from 0 for the
    shortest recent one to 1 for the longest, is the longest of ten with the density 10 R^9. Those
    as long as each other share their ranks (`rank_weight`): where prompts are alike they count
    alike, a third more than other seconds. A long wait makes a request the last of ten as well.
    Waits are exponential in heavy traffic, with a mean in proportion to m_p and to the spread of
    gaps and services (Kingman 1962), and each second of one counts by how likely the longest of ten
    such waits ends there. The scale is that of what comes, and not of how long prompts waited of
    late: prices change that, and each time they made it shorter a shorter wait would be taken for a
    long one.

    Slow streams count for more. A second on decode worker d, of its streams' or of this one's own,
    counts h(r) = min(3, max(1, r^k)), r = T_d / T and k = `fairness`. T_d is how long a mean
    request takes there, Q + m_d + N f_d(n, K) + Z_d with Q the mean of the decode workers' queues
    Q_d, and T the mean of T_d over all streams. That is fairness of degree k + 2 (Mo and Walrand,
    "Fair End-to-End Window-Based Congestion Control", IEEE/ACM Transactions on Networking 2000; the
    sum of times has degree 2, and the slowest alone has infinity), towards those that are slower
    than the mean and within bounds: a fleet with more to do than it can has some on time rather
    than all late alike. Without it long contexts are put together where few streams read them: the
    least mean, and theirs is twice the time of others.

    Where p would read the beginning of the prompt from another worker's cache
    (`pigou.control.routing.remote_kv_fetch`), u is what is left then, l is 0, and x has the seconds
    of reading too.
    """

    name: ClassVar[str] = "toll"

    def __init__(self, params: TollParams | None = None) -> None:
        self.params = params or TollParams()
        self.recent_prompts = RecentPrompts()

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return one cost a candidate, in seconds."""
        return self.table(request, fleet, candidates).total

    def parts(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> dict[str, Costs]:
        """Return wait, prefill, transfer, decode and tail of the request, and its five tolls."""
        return self.table(request, fleet, candidates).parts

    def table(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return the parts and their sum, in one array."""
        costs = np.empty((len(PARTS) + 1, len(candidates)))
        fetches, backlog = fleet.fetches, fleet.backlog or _UNKNOWN
        cached, own, recent = fleet.cached(request.prompt), self.params, self.recent_prompts
        price(
            fleet.estimates.table,
            (
                fleet.prefills, fleet.decodes, fleet.prefill_requests, fleet.prefill_tokens,
                fleet.prefill_pairs, fleet.decode_requests, fleet.decode_tokens,
            ),
            (backlog.tokens, backlog.pairs, backlog.since),
            fleet.now,
            (
                cached, cached, fleet.host, fleet.storage, _NO_FETCHES, fleet.block_size,
                fleet.recomputed_share,
            )
            if fetches is None
            else (
                cached, fetches.ready, fetches.host, fetches.storage, fetches.seconds,
                fleet.block_size, fleet.recomputed_share,
            ),
            (recent.sizes, recent.patience),
            (candidates.prefill, candidates.decode),
            request.prompt,
            fleet.output,
            (
                own.toll, own.overlap_weight, own.fairness, own.host_restore,
                own.storage_restore,
            ),
            np.empty((QUEUE_ROWS, len(fleet.prefills))),
            costs,
        )  # fmt: skip
        return CostTable(PARTS, costs)

    def record(
        self, request: RequestView, fleet: FleetView, candidates: Candidates, table: CostTable
    ) -> None:
        """Remember a prompt that was routed, and what its candidates cost (`table`).

        Later prompts are compared with it. Asking for prices changes nothing.
        """
        ready = fleet.fetches.ready if fleet.fetches else fleet.cached(request.prompt)
        size = min_uncached(
            ready, candidates.prefill, candidates.decode, request.prompt, self.params.overlap_weight
        )
        self.recent_prompts.record(size, patience_s(candidates.prefill, table.rows))


def stream_tolls(known: Estimates, streams: Counts, output: float) -> Costs:
    """Return the seconds that one more stream on each worker would cost those there, (workers,).

    The toll of the stream alone: N n (f(n+1) - f(n)), its prompt not counted.

    Args:
        known: speeds of the workers.
        streams: on each worker, (workers,).
        output: tokens that a stream is expected to have (N).
    """
    rows, n = np.arange(len(streams)), streams.astype(np.float64)
    tolls: Costs = output * n * (known.itl(rows, n + 1.0) - known.itl(rows, n))
    return tolls


def memory_prices(known: Estimates, recomputed_share: Costs) -> Costs:
    """Return the seconds of prefill that a token of KV on each worker pushes out, (workers,).

    Args:
        known: speeds of the workers.
        recomputed_share: as of `FleetView`, (workers,).
    """
    prices: Costs = recomputed_share * known.prefill_per_token
    return prices
