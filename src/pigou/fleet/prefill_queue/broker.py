"""The broker: a work queue of NATS JetStream, one consumer for all workers of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from typing import NamedTuple

from nats.aio.client import Client
from nats.errors import Error, NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from pigou.fleet.nats_connection import connect_nats
from pigou.fleet.prefill_queue.messages import QueueAddress
from pigou.wire.names import PullPool

#: Deduplication window in seconds.
DUPLICATE_WINDOW_S = 120.0
#: Seconds between two tries to connect, and for an answer of the broker.
_RETRY_S, _ANSWER_S = 0.2, 2.0
#: The server's error code for a sequence number without a message.
_NO_MESSAGE = 10057
#: Timeout in seconds for closing a connection.
_CLOSE_S = 0.5


class BrokerUnavailable(OSError):
    """The broker does not answer, or refuses."""


class PoolBacklog(NamedTuple):
    """A pool's waiting and claimed prompts; none up to sequence number `ack_floor` comes again."""

    prompts: int
    ack_floor: int


class PrefillBroker:
    """Connection to a prefill queue, which creates its stream; raises `BrokerUnavailable`."""

    def __init__(self, address: QueueAddress) -> None:
        self.address = address
        self.client = Client()
        self._name = address.names.stream
        self._stream: JetStreamContext | None = None

    async def connect(self) -> None:
        """Connect, and make the stream where it is not there; later losses are repaired."""
        await self.close()  # a client of before might connect again by itself
        try:
            self.client = await connect_nats(self.address.nats, _RETRY_S)
            self._stream = self.client.jetstream(timeout=_ANSWER_S)
            await self._make()
        except (Error, OSError, TimeoutError) as error:
            await self.close()
            raise BrokerUnavailable(
                f"the prefill queue at {self.address.nats} is not there: "
                f"{error or type(error).__name__}"
            ) from error

    async def close(self) -> None:
        """Disconnect without waiting for an absent server."""
        if self._stream is None:
            return  # a client that never connected cannot be closed
        with suppress(Error, OSError, TimeoutError):
            await asyncio.wait_for(self.client.close(), _CLOSE_S)

    @property
    def stream(self) -> JetStreamContext:
        """The stream's interface; there is one after `connect`."""
        assert self._stream is not None
        return self._stream

    async def publish(self, subject: str, id_: str, payload: bytes) -> int:
        """Store a message once; return its sequence number, the first one's for a duplicate."""
        if not self.client.is_connected:
            raise BrokerUnavailable("the prefill queue is away")
        try:
            done = await self.stream.publish(subject, payload, headers={"Nats-Msg-Id": id_})
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"the prefill queue took no prompt: {error}") from error
        return done.seq

    async def delete(self, subject: str, sequence: int) -> None:
        """Delete a prompt by sequence number, unless a recreated stream reused it.

        A purge would lose others: nats-server 2.14 moves the ack floor over prompts that workers
        hold.
        """
        if subject not in await self.stored(subject):
            return
        try:
            await self.stream.delete_msg(self._name, sequence)
        except APIError as error:
            if error.err_code != _NO_MESSAGE:
                raise BrokerUnavailable(str(error)) from error
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(str(error)) from error

    async def stored(self, pattern: str) -> Container[str]:
        """Return the subjects with stored prompts, at most 100,000."""
        try:
            info = await self.stream.stream_info(self._name, subjects_filter=pattern)
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(str(error)) from error
        return info.state.subjects or {}

    async def backlog(self, pool: PullPool) -> PoolBacklog:
        """Return a pool's backlog; raises BrokerUnavailable."""
        try:
            info = await self.stream.consumer_info(self._name, pool.consumer)
        except NotFoundError:  # no worker has come yet
            return PoolBacklog(0, 0)
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(str(error)) from error
        prompts = (info.num_pending or 0) + (info.num_ack_pending or 0)
        return PoolBacklog(prompts, 0 if info.ack_floor is None else info.ack_floor.stream_seq)

    async def subscribe(self, pool: PullPool) -> JetStreamContext.PullSubscription:
        """Return the consumer shared by a pool's workers; it expires."""
        config = ConsumerConfig(
            durable_name=pool.consumer,
            filter_subject=pool.prompts,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.address.lease_s,
            max_deliver=-1,  # gateways count those that began
            max_ack_pending=10_000,
            inactive_threshold=self.address.max_age_s,
        )
        try:
            await self._make()  # it may have been deleted
            with suppress(BadRequestError):  # it is there, with other values
                await self.stream.add_consumer(self._name, config)
            return await self.stream.pull_subscribe_bind(durable=pool.consumer, stream=self._name)
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(str(error)) from error

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask who answers on a subject, beside the queue. Raises BrokerUnavailable."""
        try:
            return (await self.client.request(subject, payload, timeout=timeout_s)).data
        except (Error, OSError, TimeoutError, NoRespondersError) as error:
            raise BrokerUnavailable(f"{subject}: {error or type(error).__name__}") from error

    async def _make(self) -> None:
        address = self.address
        storage = StorageType.FILE if address.storage == "file" else StorageType.MEMORY
        config = StreamConfig(
            name=self._name,
            subjects=[address.names.prompts],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            storage=storage,
            max_age=address.max_age_s,
            duplicate_window=min(DUPLICATE_WINDOW_S, address.max_age_s),
        )
        try:
            await self.stream.stream_info(self._name)
        except NotFoundError:
            with suppress(BadRequestError):  # another was quicker
                await self.stream.add_stream(config)
        except APIError as error:
            raise BrokerUnavailable(f"{self._name}: {error}") from error
