"""Stat logger of vLLM: pushes the load of its engines to Pigou's gateways, step by step.

`PIGOU_LOAD=tcp://*:5567` in the server's environment binds a ZMQ publisher; a gateway reads it by
`--attach URL,load=tcp://HOST:5567`. Without the variable nothing is published. With the fleet's
secret in `PIGOU_FLEET_SECRET` it is encrypted, and read by `load=curve+tcp://HOST:5567`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import Any

import zmq
from vllm.v1.metrics.loggers import StatLoggerBase

from pigou.config import ConfigError
from pigou.wire.fleet_secret import FleetSecret, secure_server

SEAM, VARIABLE = "vllm 0.32", "PIGOU_LOAD"
#: Least seconds between two messages, and messages that a slow gateway may leave.
_EVERY_S, _HIGH_WATER = 0.02, 4
_log = logging.getLogger("vllm.pigou")


class LoadPublisher:
    """Publishes the newest load of this server's engines, as lines of a metrics page."""

    def __init__(self, endpoint: str, secret: FleetSecret | None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        if secret is not None:
            secure_server(self._socket, secret)
        self._socket.bind(endpoint)
        self.pages: dict[int, bytes] = {}  # lines by engine
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, engine: int, page: bytes) -> None:
        """Send an engine's load now, or with the next ones `_EVERY_S` after the last message."""
        self.pages[engine] = page
        if self._timer is not None:
            return
        wait_s = self._sent_s + _EVERY_S - time.monotonic()
        if wait_s <= 0:
            self._send()
        else:  # vLLM records on its event loop
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)

    def _send(self) -> None:
        self._timer, self._sent_s = None, time.monotonic()
        with suppress(zmq.ZMQError):  # the next one says more
            self._socket.send(b"".join(self.pages.values()), zmq.NOBLOCK)


_publishers: dict[str, LoadPublisher | None] = {}


def _publisher() -> LoadPublisher | None:
    """Return this process's publisher, shared by its engines; None if not configured."""
    endpoint = os.environ.get(VARIABLE, "")
    if endpoint and endpoint not in _publishers:
        _publishers[endpoint] = None
        try:
            secret = FleetSecret.given(environment=dict(os.environ))
            _publishers[endpoint] = LoadPublisher(endpoint, secret)
            _log.info("Pigou: load is pushed at %s%s", endpoint, ", encrypted" * bool(secret))
        except (zmq.ZMQError, ConfigError) as error:
            _log.error("Pigou: no load is pushed: %s is %r: %s", VARIABLE, endpoint, error)
    return _publishers.get(endpoint)


class PigouStatLogger(StatLoggerBase):
    """Publishes one engine's requests, KV usage, preemptions and tokens after each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002
        self._publisher = _publisher()
        self._index = engine_index
        self._preemptions = self._prompt_tokens = self._output_tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Take the statistics of one step; either may be None."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._prompt_tokens += iteration_stats.prompt_token_stats.computed
            self._output_tokens += iteration_stats.num_generation_tokens
        if self._publisher is None or scheduler_stats is None:
            return
        stats = scheduler_stats
        figures = {
            "num_requests_running": stats.num_running_reqs,
            "num_requests_waiting": stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            "kv_cache_usage_perc": stats.kv_cache_usage,
            "num_preemptions_total": self._preemptions,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._output_tokens,
        }
        of = f'{{engine="{self._index}"}}'
        page = "".join(f"vllm:{name}{of} {value}\n" for name, value in figures.items())
        self._publisher.put(self._index, page.encode())

    def log_engine_initialized(self) -> None:
        """Do nothing: the start line is logged when the publisher binds."""
