"""Waits and knees of the textbook queues.

``utilisation`` is always a server's: arrival rate times mean service time, over the number of
servers. Times are in units of ``service``, the mean service time, in seconds.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq


def erlang_b(servers: int, erlangs: float) -> float:
    """Return the share of arrivals that a loss system with a load of ``erlangs`` turns away."""
    if servers < 0 or not erlangs >= 0:
        raise ValueError(f"servers={servers}, offered={erlangs}: give numbers of 0 or more")
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = erlangs * blocked / (count + erlangs * blocked)
    return blocked


def erlang_c(servers: int, utilisation: float) -> float:
    """Return the probability that an arrival waits in an M/M/c queue (Erlang 1917).

    Raises ValueError unless servers >= 1 and 0 <= utilisation < 1.
    """
    _check(servers, utilisation)
    blocked = erlang_b(servers, servers * utilisation)
    return blocked / (1.0 - utilisation * (1.0 - blocked))


def mmc_wait(servers: int, utilisation: float, service: float = 1.0) -> float:
    """Return the mean wait in an M/M/c queue: C / (c (1 - utilisation)) services."""
    return service * erlang_c(servers, utilisation) / (servers * (1.0 - utilisation))


def mmc_wait_quantile(
    servers: int, utilisation: float, quantile: float, service: float = 1.0
) -> float:
    """Return the wait that a share ``quantile`` of arrivals to an M/M/c queue stays within.

    P(wait > t) = C exp(-c (1 - utilisation) t / service).
    """
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile is {quantile}: give a number from 0 up to, not at, 1")
    wait_probability = erlang_c(servers, utilisation)
    if 1.0 - quantile >= wait_probability:
        return 0.0
    return service * math.log(wait_probability / (1.0 - quantile)) / (servers * (1.0 - utilisation))


def mgc_wait(servers: int, utilisation: float, scv: float, service: float = 1.0) -> float:
    """Return the mean wait in an M/G/c queue by the Lee-Longton approximation (1959).

    (1 + scv) / 2 times the M/M/c wait, where ``scv`` is the squared coefficient of variation of
    service times. Exact for one server (Pollaczek-Khinchine) and for scv = 1.
    """
    if not scv >= 0:
        raise ValueError(f"scv is {scv}: give a number of 0 or more")
    return 0.5 * (1.0 + scv) * mmc_wait(servers, utilisation, service)


def mm1ps_response(utilisation: float, service: float = 1.0) -> float:
    """Return the mean time in a processor-sharing server of a request that alone takes ``service``.

    service / (1 - utilisation), for every distribution of service times (Kleinrock 1967): so it
    is the time of a request of that size, as well as the mean over sizes.
    """
    _check(1, utilisation)
    return service / (1.0 - utilisation)


def wait_knee(servers: int, wait: float = 1.0, scv: float = 1.0) -> float:
    """Return the utilisation at which the mean M/G/c wait is ``wait`` mean service times."""
    if not (math.isfinite(wait) and wait > 0):
        raise ValueError(f"wait is {wait}: give a finite number of services above 0")
    top = 1.0 - 1e-12
    return float(brentq(lambda u: mgc_wait(servers, u, scv) - wait, 0.0, top, xtol=1e-14))


def power_knee(servers: int, scv: float = 1.0) -> float:
    """Return the utilisation of greatest power, throughput over response time (Kleinrock 1979).

    There, one per cent more load costs one per cent more response. For M/M/1 it is 1/2.
    """

    def excess(utilisation: float) -> float:
        step = 1e-6 * min(utilisation, 1.0 - utilisation)
        below = mgc_wait(servers, utilisation - step, scv)
        above = mgc_wait(servers, utilisation + step, scv)
        response = 1.0 + 0.5 * (below + above)
        return utilisation * (above - below) / (2.0 * step) - response

    return float(brentq(excess, 1e-3, 1.0 - 1e-6, xtol=1e-10))


def closed_knee(throughput: float, response: float, think: float = 0.0) -> float:
    """Return the number of clients at which a closed system's two asymptotes meet.

    ``throughput`` is the most that the system completes (a second), ``response`` what a request
    takes with nobody else there, ``think`` a client's pause between requests (seconds). With fewer
    clients than throughput (response + think), nobody need wait; with more, somebody must
    (Denning and Buzen 1978).
    """
    if not (throughput > 0 and response > 0 and think >= 0):
        raise ValueError("give throughput > 0, response > 0 and think >= 0")
    return throughput * (response + think)


def _check(servers: int, utilisation: float) -> None:
    if servers < 1:
        raise ValueError(f"servers is {servers}: give 1 or more")
    if not 0 <= utilisation < 1:
        raise ValueError(f"utilisation is {utilisation}: only from 0 up to, not at, 1 is it stable")
