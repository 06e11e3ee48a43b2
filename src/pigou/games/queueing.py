"""Waits of textbook queues, in units of `service`, the mean service time in seconds.

`utilisation` is arrival rate times service over servers; `scv` is variance over squared mean.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import lambertw, ndtri

#: Services up to which Erlang's alternating sum is taken for M/D/1; it loses no digits there.
_ERLANG_SERVICES = 4.0


def erlang_b(servers: int, erlangs: float) -> float:
    """Return the share of arrivals that a loss system with a load of `erlangs` rejects."""
    if servers < 0 or not erlangs >= 0:
        raise ValueError(f"servers={servers}, offered={erlangs}: give numbers of 0 or more")
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = erlangs * blocked / (count + erlangs * blocked)
    return blocked


def erlang_c(servers: int, utilisation: float) -> float:
    """Return P(wait > 0) in M/M/c (Erlang 1917); raises ValueError unless 0 <= utilisation < 1."""
    _check(servers, utilisation)
    blocked = erlang_b(servers, servers * utilisation)
    return blocked / (1.0 - utilisation * (1.0 - blocked))


def mmc_wait(servers: int, utilisation: float, service: float = 1.0) -> float:
    """Return the mean wait in M/M/c: C / (c (1 - utilisation)) services."""
    return service * erlang_c(servers, utilisation) / (servers * (1.0 - utilisation))


def mmc_wait_quantile(
    servers: int, utilisation: float, quantile: float, service: float = 1.0
) -> float:
    """Return a quantile of the M/M/c wait: P(W > t) = C exp(-c (1 - utilisation) t / service)."""
    _check_quantile(quantile)
    wait_probability = erlang_c(servers, utilisation)
    if 1.0 - quantile >= wait_probability:
        return 0.0
    return service * math.log(wait_probability / (1.0 - quantile)) / (servers * (1.0 - utilisation))


def mgc_wait(servers: int, utilisation: float, scv: float, service: float = 1.0) -> float:
    """Return the mean wait in M/G/c: (1 + scv) / 2 times that of M/M/c (Lee and Longton 1959)."""
    if not scv >= 0:
        raise ValueError(f"scv is {scv}: give a number of 0 or more")
    return 0.5 * (1.0 + scv) * mmc_wait(servers, utilisation, service)


# --- deterministic service -------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def mdc_tail(servers: int, utilisation: float) -> tuple[float, float]:
    """Return (A, theta) of the M/D/c wait's tail: P(W > t) ~ A exp(-theta t / service).

    | symbol | meaning |
    |---|---|
    | rho | utilisation |
    | z_k | roots of z^c = exp(c rho (z - 1)) inside the unit circle, except 1 (Lambert's W) |
    | sigma | its root above 1 |

    theta = c rho (sigma - 1), A = (1 - rho) / (rho sigma - 1) prod_k (1 - z_k/sigma) / (1 - z_k),
    the residue at sigma of the generating function (Crommelin 1932; Janssen and van Leeuwaarden,
    "Back to the roots of the M/D/s queue", 2008). (0, inf) without load.
    """
    _check(servers, utilisation)
    if utilisation < 1e-12:
        return 0.0, math.inf
    sigma = float(-lambertw(-utilisation * math.exp(-utilisation), -1).real / utilisation)
    inner = _inner_roots(servers, utilisation)
    product = float(np.prod(np.abs(1.0 - inner / sigma) / np.abs(1.0 - inner)))
    constant = (1.0 - utilisation) / (utilisation * sigma - 1.0) * product
    return constant, servers * utilisation * (sigma - 1.0)


def _inner_roots(servers: int, utilisation: float) -> NDArray[np.complex128]:
    turns = _turns(servers)
    roots: NDArray[np.complex128] = (
        -lambertw(-utilisation * math.exp(-utilisation) * turns) / utilisation
    )
    return roots


@functools.lru_cache(maxsize=1024)
def _turns(servers: int) -> NDArray[np.complex128]:
    turns: NDArray[np.complex128] = np.exp(2j * np.pi * np.arange(1, servers) / servers)
    return turns


# --- general service -------------------------------------------------------------------------


def mgc_wait_quantile(
    servers: int, utilisation: float, quantile: float, scv: float, arrival_scv: float = 1.0
) -> float:
    """Return a quantile of the G/G/c wait, in services.

    | symbol | meaning |
    |---|---|
    | s, a | squared coefficients of variation of service and interarrival times |
    | d, m | the same quantile of M/D/c, from its tail, and of M/M/c |

    (1 - s) d + s m for s <= 1 (Tijms, "A First Course in Stochastic Models", 2003, 9.6), else (1 +
    s) / 2 m (Kingman's heavy traffic); times (a + s) / (1 + s) (Allen and Cunneen); at least
    `burst_wait_quantile`, as a burst waits even where a Poisson arrival never does.
    """
    _check_quantile(quantile)
    if not (scv >= 0 and arrival_scv >= 0):
        raise ValueError(f"scv={scv}, arrival_scv={arrival_scv}: give numbers of 0 or more")
    markov = mmc_wait_quantile(servers, utilisation, quantile) if scv > 0 else 0.0
    if scv >= 1.0:
        wait = 0.5 * (1.0 + scv) * markov
    else:
        wait = (1.0 - scv) * _fixed_quantile(servers, utilisation, quantile) + scv * markov
    wait *= (arrival_scv + scv) / (1.0 + scv)
    return max(wait, burst_wait_quantile(servers, utilisation, quantile, arrival_scv))


def burst_wait_quantile(
    servers: int, utilisation: float, quantile: float, dispersion: float
) -> float:
    """Return a quantile of the wait that bursts alone cause, in services.

    A burst of b = d - 1 waits for those before, P(W > t) = exp(-2 c (1 / rho - 1) t / b): a fluid
    server with Brownian arrivals of dispersion d, less the 1 of Poisson arrivals (Norros 1994); and
    for half of itself. It is at least that quantile of a burst's own wait, b / c in all.
    """
    burst = max(dispersion - 1.0, 0.0) / servers
    before = -math.log1p(-quantile) * 0.5 * burst * utilisation / (1.0 - utilisation)
    return max(quantile * burst, 0.5 * burst + before)


def _fixed_quantile(servers: int, utilisation: float, quantile: float) -> float:
    constant, rate = mdc_tail(servers, utilisation)
    wait = math.log(constant / (1.0 - quantile)) / rate if constant > 1.0 - quantile else 0.0
    if servers > 1 or wait >= _ERLANG_SERVICES:  # the tail is exact to five digits there
        return wait
    if quantile <= 1.0 - utilisation:
        return 0.0
    excess = lambda t: _md1_wait_cdf(utilisation, t) - quantile  # noqa: E731
    return float(brentq(excess, 0.0, _ERLANG_SERVICES + 2.0, xtol=1e-10))


def _md1_wait_cdf(utilisation: float, t: float) -> float:
    """Return (1 - rho) sum_k (-rho (t - k))^k / k! e^(rho (t - k)): Erlang's, for short waits."""
    total = 0.0
    for k in range(math.floor(t) + 1):
        x = utilisation * (t - k)
        total += (-x) ** k / math.factorial(k) * math.exp(x)
    return (1.0 - utilisation) * total


def lognormal_quantile(scv: float, quantile: float) -> float:
    """Return a quantile of a lognormal variable with mean 1 and this variance."""
    _check_quantile(quantile)
    if quantile <= 0.0:
        return 0.0 if scv > 0 else 1.0
    log_variance = math.log1p(scv)
    return math.exp(math.sqrt(log_variance) * float(ndtri(quantile)) - 0.5 * log_variance)


@functools.lru_cache(maxsize=65536)
def response_quantile(
    servers: int, utilisation: float, quantile: float, scv: float = 0.0, arrival_scv: float = 1.0
) -> float:
    """Return a quantile of wait plus service, in mean services; infinity from utilisation 1.

    W + 1 + sqrt((w - W)^2 + (x - 1)^2): W is the mean wait, w and x the quantiles of wait and
    (lognormal) service; independent deviations add in squares. Exact for M/D/1.
    """
    if utilisation >= 1.0:
        return math.inf
    wait = mgc_wait_quantile(servers, utilisation, quantile, scv, arrival_scv)
    if scv <= 0.0:
        return wait + 1.0
    factor = (arrival_scv + scv) / (1.0 + scv)
    mean = factor * mgc_wait(servers, utilisation, scv)
    return mean + 1.0 + _signed_norm(wait - mean, lognormal_quantile(scv, quantile) - 1.0)


def _signed_norm(one: float, other: float) -> float:
    square = one * abs(one) + other * abs(other)
    return math.copysign(math.sqrt(abs(square)), square)


@functools.lru_cache(maxsize=65536)
def max_utilisation(
    servers: int, limit: float, quantile: float, scv: float = 0.0, arrival_scv: float = 1.0
) -> float:
    """Return the highest utilisation that keeps a response quantile within `limit`; else 0.0."""
    top = 1.0 - 1e-6
    if not response_quantile(servers, 1e-9, quantile, scv, arrival_scv) <= limit:
        return 0.0
    if response_quantile(servers, top, quantile, scv, arrival_scv) <= limit:
        return top
    excess = lambda u: response_quantile(servers, u, quantile, scv, arrival_scv) - limit  # noqa: E731
    return float(brentq(excess, 1e-9, top, xtol=1e-5))


def _check_quantile(quantile: float) -> None:
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile is {quantile}: give a number from 0 up to, not at, 1")


def _check(servers: int, utilisation: float) -> None:
    if servers < 1:
        raise ValueError(f"servers is {servers}: give 1 or more")
    if not 0 <= utilisation < 1:
        raise ValueError(f"utilisation is {utilisation}: only from 0 up to, not at, 1 is it stable")


# --- classes -----------------------------------------------------------------------------------


def cobham_waits(rates: Sequence[float], means: Sequence[float], scv: float = 1.0) -> list[float]:
    """Return each class's mean wait in M/G/1 without preemption, the first class served first.

    | symbol | meaning |
    |---|---|
    | l_i, m_i | arrivals a second and mean service of class i; each service has `scv` |
    | R | sum l_i m_i^2 (1 + scv) / 2, the mean work left of the request in service |
    | s_i | l_1 m_1 + ... + l_i m_i |

    W_i = R / ((1 - s_(i-1)) (1 - s_i)) (Cobham 1954). One class is first come, first served.
    """
    if not means or len(rates) != len(means) or min(*rates, *means, scv) < 0:
        raise ValueError(f"rates={rates}, means={means}, scv={scv}: give one of 0 or more a class")
    loads = list(
        itertools.accumulate((r * m for r, m in zip(rates, means, strict=True)), initial=0.0)
    )
    if loads[-1] >= 1.0:
        raise ValueError(f"the load is {loads[-1]:g}; give rates and means below 1 in all")
    left = sum(r * m * m for r, m in zip(rates, means, strict=True)) * (1.0 + scv) / 2.0
    return [left / ((1.0 - before) * (1.0 - upto)) for before, upto in itertools.pairwise(loads)]
