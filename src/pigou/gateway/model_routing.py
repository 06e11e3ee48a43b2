"""Routing by model: which workers serve a request, by the model name in its body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pigou.gateway.config import Overflow
from pigou.gateway.failure import unknown_model
from pigou.gateway.fleet_status import FleetStatus, WorkerRow
from pigou.gateway.metrics import Metrics
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prompt_reader import PromptReader
from pigou.gateway.proxy.upstream import Upstream
from pigou.gateway.request_parsing import ServerScope
from pigou.wire.errors import DECODING_ERRORS, APIError, bad_request
from pigou.wire.openai_replies import model_card
from pigou.wire.openai_requests import without_bom

#: Fields that `/workers` shows by model, and fields that it adds up.
_OF_MODEL = ("game", "tokenized", "queued", "held_sequences", "shed", "slo")
_SUMS = ("queued", "held_sequences", "shed")
#: Names of models that an error lists at most.
_MAX_LISTED = 20


class _ModelField(msgspec.Struct):
    model: str | None = None


_model_field = msgspec.json.Decoder(_ModelField)


class GatewayModel:
    """A model: its control plane and workers."""

    def __init__(
        self, plane_driver: PlaneDriver, metrics: Metrics, fleet_status: FleetStatus,
        name: str = "", aliases: Sequence[str] = (), overflow: Overflow | None = None,
    ) -> None:  # fmt: skip
        self.name = name  # as declared; empty where the workers say it
        self.aliases, self.overflow = tuple(aliases), overflow
        self.plane_driver, self.metrics, self.fleet_status = plane_driver, metrics, fleet_status
        plane_driver.timed = metrics.decision.observe

    @property
    def upstreams(self) -> list[Upstream]:
        """The model's workers that are up."""
        return list(self.plane_driver.upstreams.values())

    def owns(self, upstream: Upstream) -> bool:
        """True if a worker belongs to the model and is up."""
        return self.plane_driver.upstreams.get(upstream.worker.id) is upstream

    @property
    def served_name(self) -> str:
        """The model's name; empty before a worker reports one."""
        upstreams = self.upstreams
        return self.name or (upstreams[0].engine.model if upstreams else "")

    @property
    def names(self) -> dict[str, Upstream | None]:
        """Return names that requests may use, models before adapters, with a worker or None."""
        upstreams = self.upstreams
        names: dict[str, Upstream | None] = {}
        if self.name:
            last = upstreams[-1] if upstreams else None
            names |= dict.fromkeys((self.name, *self.aliases), last)
        names |= {up.engine.model: up for up in upstreams if up.engine.model not in names}
        for up in upstreams:
            for name in up.engine.served.aliases:
                names.setdefault(name, up)
        for up in upstreams:
            for name in up.engine.served.adapters:
                names.setdefault(name, up)
        return names

    def knows(self, name: str) -> bool:
        """True if requests may use a name."""
        known = name in (self.name, *self.aliases) and bool(name)
        return known or any(up.engine.serves(name) for up in self.upstreams)

    def adapter(self, name: str | None) -> str:
        """Return a name if it is an adapter's; empty for the model's own names."""
        if name is None or name in (self.name, *self.aliases):
            return ""
        engines = [up.engine for up in self.upstreams]
        if any(name in engine.names for engine in engines):
            return ""
        return name if any(name in engine.served.adapters for engine in engines) else ""

    def serving(self, name: str) -> list[Upstream]:
        """Return the workers that are up and serve a name."""
        adapter = self.adapter(name)
        return [up for up in self.upstreams if not adapter or up.engine.serves(adapter)]

    def sent_name(self, name: str | None) -> str:
        """Return the name to send to workers; empty to keep the request's."""
        return self.adapter(name) or self.name

    @property
    def decodes(self) -> bool:
        """True if a worker that decodes is up."""
        return any(up.worker.role.decodes for up in self.plane_driver.upstreams.values())

    @property
    def pigou_only(self) -> bool:
        """True if all workers that are up are Pigou's own, which refuse unknown fields."""
        upstreams = self.upstreams
        return bool(upstreams) and not any(up.engine.stock for up in upstreams)

    @property
    def context(self) -> int:
        """Minimum context of the workers, in tokens; 0 if any is unknown."""
        sizes = [up.engine.max_model_len for up in self.upstreams]
        return max(sizes) if sizes and all(sizes) else 0

    def scope(self, release: str) -> ServerScope:
        """Return the gateway's part of a request's tenure."""
        prompts: PromptReader | None = self.plane_driver.prompts
        engines = [up.engine for up in self.upstreams]
        return ServerScope(
            model=self.served_name,
            aliases=frozenset(name for engine in engines for name in engine.names),
            release=release,
            releases=frozenset(engine.release for engine in engines if engine.release),
            template=prompts.template if prompts is not None else "",
        )

    def card(self, name: str, created: int) -> dict[str, Any]:
        """Return a name's model card; raise `APIError` 503 without a worker."""
        upstream = self.names.get(name)
        if upstream is None:
            raise APIError(503, f"No worker of {name} is up.", retry_after=1)
        served, engine = self.served_name, upstream.engine
        card = model_card(name, served, created, engine.max_model_len)
        adapter = engine.served.adapters.get(name) if self.adapter(name) else None
        if adapter is not None:
            parent = served if adapter.parent in engine.names else adapter.parent or None
            card |= {"root": adapter.root or name, "parent": parent}
        return card


class ModelRouting:
    """Models of a gateway by the names that requests use.

    A single undeclared model takes requests without `model`, under its workers' name.
    """

    def __init__(self, models: Sequence[GatewayModel]) -> None:
        self.models = tuple(models)
        self._by_name = {
            name: model for model in models if model.name for name in (model.name, *model.aliases)
        }

    def __iter__(self) -> Iterator[GatewayModel]:
        return iter(self.models)

    @property
    def declared(self) -> bool:
        """True if models have names of their own."""
        return bool(self._by_name)

    def rows(self) -> list[WorkerRow]:
        """Return the rows of all workers."""
        return [row for model in self.models for row in model.fleet_status.rows()]

    def view(self) -> dict[str, Any]:
        """Return the table for `/workers`; with several models, `models` has each."""
        views = {model.name: model.fleet_status.view() for model in self.models}
        first = next(iter(views.values()))
        if not self.several:
            return first
        sums = {name: sum(view[name] for view in views.values()) for name in _SUMS}
        speed = sum(view["tokens_per_second"] for view in views.values())
        models = {
            model.name: {"aliases": list(model.aliases)}
            | {key: views[model.name][key] for key in _OF_MODEL}
            for model in self.models
        }
        workers = [worker for view in views.values() for worker in view["workers"]]
        shown = {"workers": workers, "tokens_per_second": round(speed, 1), "models": models}
        return first | sums | shown

    @property
    def several(self) -> bool:
        """True for more than one model."""
        return len(self.models) > 1

    @property
    def names(self) -> list[str]:
        """All names that requests may use."""
        return [name for model in self.models for name in model.names]

    @property
    def decodes(self) -> bool:
        """True if any model has a worker that decodes."""
        return any(model.decodes for model in self.models)

    def find(self, name: str | None) -> GatewayModel:
        """Return the model of a name, None for the only one; raise `APIError` 400 or 404."""
        if name is None and self.several:
            raise bad_request(f"model is missing; it must be one of {self._listed()}.", "model")
        if not self.declared:
            self._check_reported(name)
            return self.models[0]
        if name is None:
            return self.models[0]
        declared = self._by_name.get(name)
        models = [declared] if declared else [model for model in self.models if model.knows(name)]
        if len(models) > 1:
            owners = ", ".join(model.name for model in models)
            raise bad_request(
                f"model is {name!r}, which servers of {owners} list: rename it.", "model"
            )
        if not models:
            raise self._unknown(name)
        return models[0]

    def of_body(self, data: bytes) -> tuple[GatewayModel, str]:
        """Return the model that a body asks for, and its name at the workers; raises APIError.

        Without declared models, or for a malformed body, it is the first with an empty name.
        """
        if not self.declared:
            return self.models[0], ""
        try:
            field = _model_field.decode(without_bom(data))
        except DECODING_ERRORS:
            return self.models[0], ""
        model = self.find(field.model)
        return model, model.sent_name(field.model)

    def check(self, name: str | None) -> None:
        """Raise `APIError` 404 for a name unknown to all workers, without declared models."""
        if not self.declared:
            self._check_reported(name)

    def _check_reported(self, name: str | None) -> None:
        if name is None:
            return
        model = self.models[0]
        if model.upstreams and not model.knows(name):
            raise self._unknown(name)

    def _unknown(self, name: str | None) -> APIError:
        return unknown_model(name, self._listed())

    def _listed(self) -> str:
        names = self.names
        more = f" and {len(names) - _MAX_LISTED} more (GET /v1/models)"
        return ", ".join(names[:_MAX_LISTED]) + (more if len(names) > _MAX_LISTED else "")
