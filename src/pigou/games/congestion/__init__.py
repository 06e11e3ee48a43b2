"""Congestion games: players choose resources, and a resource costs more the more share it.

`AtomicGame` has players that cannot be split, `ParallelLinks` and `FlowNetwork` a flow that can;
`RoutingGame` is the one that a router of requests plays (Georgiou 2026, Eq. 7).
"""

from __future__ import annotations

from pigou.games.congestion.atomic import AtomicGame
from pigou.games.congestion.nonatomic import FlowNetwork, ParallelLinks
from pigou.games.congestion.routing import RoutingGame

__all__ = ["AtomicGame", "FlowNetwork", "ParallelLinks", "RoutingGame"]
