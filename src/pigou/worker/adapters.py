"""LoRA adapters of a worker: their names, copies in host memory, loads, routes and metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from aiohttp import web
from prometheus_client.core import Metric

from pigou.engine.plan import AdapterLoad
from pigou.kv.memory_price import UseRates, held_value
from pigou.metric_rows import counter_family, gauge_family
from pigou.models import ModelError
from pigou.wire.errors import APIError, bad_request, decoded
from pigou.worker.config import WorkerConfig
from pigou.worker.engine_thread.commands import AdapterLoaded

log = logging.getLogger(__name__)
#: Allows clients to load and unload adapters, as in vLLM.
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
#: Reads a folder: what it returns has a `digest`. And writes that to a slot, by its key.
ReadAdapter: TypeAlias = Callable[[Path], Any]
FillSlot: TypeAlias = Callable[[str, Any, int], None]


class ServedAdapter(NamedTuple):
    """An adapter that requests may name."""

    name: str
    path: str
    key: str  # name and digest: a version
    created: int  # Unix seconds


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def name_of(key: str) -> str:
    """Return the name in a version's key."""
    return key.rpartition("@")[0]


class AdapterStore:
    """Adapters by name; a thread of its own reads them and fills the device's slots.

    Host memory keeps `max_host` of the highest `held_value`, and the newest; the others are read
    again when a slot takes them.
    """

    def __init__(
        self, read: ReadAdapter, fill: FillSlot, config: WorkerConfig, reserved: str
    ) -> None:
        """Read the adapters of `config`; `reserved` is the model's own name."""
        self._read, self._fill, self._reserved = read, fill, reserved
        self._slots, self._max_host = config.max_loras, config.max_cpu_loras or config.max_loras
        self.answer: Callable[[AdapterLoaded], None] = lambda _: None
        self.served: dict[str, ServedAdapter] = {}
        self._paths: dict[str, str] = {}  # by key, unloaded versions included
        self._host: dict[str, Any] = {}  # by key, least recently used first
        self._rates = UseRates()  # loads to slots
        self._read_s: dict[str, float] = {}  # seconds to read each key
        self._device: dict[int, str] = {}  # keys by slot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self.loads, self.load_s = 0, 0.0
        for name, path in config.adapters.items():
            self.add(name, path)

    def add(self, name: str, path: str, inplace: bool = False) -> None:
        """Read an adapter and serve it; raises ModelError if it is refused."""
        if name == self._reserved:
            raise ModelError(f"The lora adapter {name!r} conflicts with a served base model.")
        if name in self.served and not inplace:
            raise ModelError(
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        began = time.monotonic()
        weights = self._read(Path(path))
        key = f"{name}@{weights.digest}"
        self._keep(key, weights, time.monotonic() - began)
        self._paths[key] = path
        if (older := self.served.get(name)) is not None and older.key != key:
            self._rates.forget(older.key)
        self.served[name] = ServedAdapter(name, path, key, int(time.time()))

    def begin(self, load: AdapterLoad) -> None:
        """Fill a slot, and answer the engine."""
        self._thread.submit(self._load, load)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, load: AdapterLoad) -> None:
        began, error = time.monotonic(), ""
        try:
            self._device.pop(load.slot, None)
            self._fill(load.adapter, self._weights(load.adapter), load.slot)
            self._device[load.slot] = load.adapter
        except Exception as failure:  # the engine waits for an answer
            error = str(failure) if isinstance(failure, ModelError) else repr(failure)
            log.error("adapter %s cannot be loaded: %s", load.adapter, error)
        seconds = time.monotonic() - began
        self.loads, self.load_s = self.loads + 1, self.load_s + seconds
        self.answer(AdapterLoaded(load.adapter, error, seconds))

    def _weights(self, key: str) -> Any:
        self._rates.use(key)
        if (weights := self._host.pop(key, None)) is not None:
            self._host[key] = weights
            return weights
        began = time.monotonic()
        weights = self._read(Path(self._paths[key]))
        if not key.endswith(f"@{weights.digest}"):
            raise ModelError(
                f"The files of adapter {name_of(key)!r} have changed since it was loaded; load it "
                "again with load_inplace."
            )
        self._keep(key, weights, time.monotonic() - began)
        return weights

    def _keep(self, key: str, weights: Any, read_s: float) -> None:
        self._host.pop(key, None)
        self._read_s[key] = read_s
        while len(self._host) >= self._max_host:
            del self._host[min(self._host, key=self._value)]
        self._host[key] = weights

    def _value(self, key: str) -> float:
        return held_value(self._rates.rate(key), self._read_s[key], self._host[key].bytes)

    # --- HTTP -------------------------------------------------------------------------------

    def routes(
        self, read: Callable[[web.Request, Callable[[bytes], Any]], Any]
    ) -> list[web.RouteDef]:
        """Return the routes that change adapters; none unless the environment allows it."""
        if os.environ.get(UPDATING, "").lower() not in ("1", "true"):
            return []

        async def load(request: web.Request) -> web.Response:
            body = await read(request, partial(decoded, msgspec.json.Decoder(LoadRequest)))
            if not body.lora_name or not body.lora_path:
                raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
            name, path = body.lora_name, body.lora_path
            run = asyncio.get_running_loop().run_in_executor
            try:
                await run(self._thread, self.add, name, path, body.load_inplace)
            except ModelError as error:
                status = 400 if Path(path).is_dir() or name in self.served else 404
                raise APIError(status, str(error), "lora_path") from None
            return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

        async def unload(request: web.Request) -> web.Response:
            body = await read(request, partial(decoded, msgspec.json.Decoder(UnloadRequest)))
            if body.lora_name not in self.served:
                text = f"The lora adapter '{body.lora_name}' cannot be found."
                raise APIError(404, text, "lora_name")
            del self.served[body.lora_name]  # requests under way end with it
            text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
            return web.Response(text=text)

        return [web.post("/v1/load_lora_adapter", load),
                web.post("/v1/unload_lora_adapter", unload)]  # fmt: skip

    # --- metrics ----------------------------------------------------------------------------

    def families(self, running: Callable[[], tuple[set[str], set[str]]]) -> Iterator[Metric]:
        """Yield the metrics; `running` gives the keys of who runs and who waits."""
        names = [",".join(sorted(map(name_of, keys))) for keys in running()]
        yield gauge_family(
            "vllm:lora_requests_info", "Adapters of running and waiting requests.",
            [((*names, str(self._slots)), time.time())],
            "running_lora_adapters", "waiting_lora_adapters", "max_lora",
        )  # fmt: skip
        levels = dict.fromkeys(self._host.copy(), "cpu")
        levels |= dict.fromkeys(self._device.copy().values(), "gpu")
        own = {adapter.key for adapter in self.served.copy().values()}
        yield gauge_family(
            "vllm:lora_adapter_loaded", "1 where an adapter is in device or host memory.",
            [((name_of(key), level), 1.0) for key, level in levels.items() if key in own],
            "adapter_name", "level",
        )  # fmt: skip
        loads, seconds = [((), float(self.loads))], [((), self.load_s)]
        yield counter_family("pigou_lora_loads", "Adapters loaded to a slot.", loads)
        yield counter_family("pigou_lora_load_seconds", "Seconds of these loads.", seconds)
