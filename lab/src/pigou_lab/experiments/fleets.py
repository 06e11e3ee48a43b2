"""The paper's fleets, and three readings of what its load generator and its prefill did.

Every constant names its source. "Ours" means: from no figure of the paper.

| constant | 340B | 70B | source |
|---|---|---|---|
| base | 74 ms | 55 ms | TTFT P99 at C = 1 (Table 4); the 70B's baseline (section 8.2) |
| ITL, `client-pool` and `fair` | 20.8 ms | 7.15 + 0.0159 n ms | throughput column of Table 4; a line through C = 32 (16.8/s, Table 8) and the ceiling of 51/s of 1P/5D |
| ITL of 1 or 2 streams | 19.3 ms | - | mean of the ITL column at C = 1, 2, 4 |
| ITL, `serial-prefill` | 19.0 + 0.026 n ms | as above | ITL at C = 2, and the ceiling of 18.9/s with 100 in flight |
| prefill, `serial-prefill` | 1/18.9 s | 1/47 s, 1/51 s | the ceilings of sections 8.1 and 8.4 |
| prefill, otherwise | 5.9 ms | 2.4 ms | ours: FP8 weights read once from HBM (8 TB/s, 0.9 of it) |
| pool | 100 | 100 | default limit of aiohttp's and httpx's connections |
| barging | 0.9 | 0.9 | ours: `benchmarks/gateway/client_pool.py`, aiohttp's connector measured |
| link | 390 Gb/s | 390 Gb/s | measured between the paper's nodes (Table 3) |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

from pigou.config import ConfigError
from pigou.control.routing.policy import Costs, RequestView, RoutingPolicy
from pigou.control.routing.pool_policy import Pool, Rows
from pigou.control.routing.view import FleetView
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, WorkerGroup
from pigou.sim.network import LinkConfig
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.timing import Law
from pigou.sim.workload import ClosedLoop, RequestLengths
from pigou_lab.experiments.paper import FleetName
from pigou_lab.routing.dynamo import DynamoPaper, DynamoPaperParams

Reading: TypeAlias = Literal["serial-prefill", "client-pool", "fair"]
READINGS: tuple[Reading, ...] = get_args(Reading)
FLEETS: tuple[FleetName, ...] = get_args(FleetName)

#: 128 tokens in, 256 out, five templates (section 7.4).
LENGTHS = RequestLengths(input=(128, 128), output=(256, 256), templates=5)
POOL, BARGING = 100, 0.9
_LINK = LinkConfig(gbps=390.0)
#: Memory bandwidth of a B200 (HGX data sheet), and the share that reading weights reaches
#: (`models.gpus`).
_HBM_BYTES_PER_S, _STREAMED = 8e12, 0.9


@dataclass(frozen=True, slots=True)
class PaperFleet:
    """One of the paper's fleets."""

    name: FleetName
    model: str
    tp: int  # GPUs of a worker
    decoders: int  # decode workers, beside one for prefill
    parameters: float
    base: float  # seconds to the first token of a request alone
    ceiling: float  # requests a second that the paper saw at most
    line: tuple[float, float]  # ITL in seconds: (constant, more for each stream)
    # ITL in seconds that the throughput column has, from 3 streams on; None takes `line`.
    flat: float | None = None
    few: float = 0.0  # ITL in seconds of 1 or 2 streams, where `flat` is given

    def law(self, reading: Reading) -> Law:
        """Return the workers' timing law under a reading."""
        a, b = self.line
        if reading == "serial-prefill":
            prefill = 1.0 / self.ceiling
            return Law(itl_a=a, itl_b=b, prefill=prefill, overhead=self._rest(a + b, prefill))
        prefill = self.parameters / (self.tp * _HBM_BYTES_PER_S * _STREAMED)
        if self.flat is None:
            return Law(itl_a=a, itl_b=b, prefill=prefill, overhead=self._rest(a + b, prefill))
        rest = self._rest(self.few, prefill)
        return Law(itl_a=self.flat, few=2, itl_few=self.few, prefill=prefill, overhead=rest)

    def _rest(self, step: float, prefill: float) -> float:
        """Rest of the base beside prefill and the first decode step."""
        return max(0.0, self.base - prefill - step)


_FLEETS = {
    fleet.name: fleet
    for fleet in (
        PaperFleet("340b-1p2d", "nemotron-4-340b", 8, 2, 340e9, 0.074, 18.9, (19.0e-3, 0.026e-3),
              20.8e-3, 19.3e-3),
        PaperFleet("70b-1p2d", "llama-3.1-70b", 4, 2, 70e9, 0.055, 47.0, (7.15e-3, 0.0159e-3)),
        PaperFleet("70b-1p5d", "llama-3.1-70b", 4, 5, 70e9, 0.055, 51.0, (7.15e-3, 0.0159e-3)),
    )
}  # fmt: skip


def fleet(name: str) -> PaperFleet:
    """Return a fleet by name; raises ConfigError if there is none."""
    match = _FLEETS.get(name)  # type: ignore[call-overload]
    if match is None:
        raise ConfigError(f"fleet is {name!r}; it must be one of: {', '.join(FLEETS)}")
    return match  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """How requests are routed: Eq. 1 and 2 of the paper, or any policy of the fleet's."""

    temperature: float = 0.0
    overlap_weight: float = 1.0
    policy: str = ""  # name of the policy; "" for Eq. 1, applied to prefill and to decode workers.
    params: Mapping[str, Any] = field(default_factory=dict)


def client(reading: Reading, pool: int = POOL, barging: float = BARGING) -> ClientConfig:
    """Return the client of a reading: a pool of connections, or none."""
    if reading == "client-pool":
        return ClientConfig(pool=pool, barging=barging)
    return ClientConfig()


def make_simulation(
    paper_fleet: PaperFleet, reading: Reading, loop: ClosedLoop, seed: int, *,
    setting: PolicySetting | None = None, sender: ClientConfig | None = None,
    law: Law | None = None,
    saturation: dict[str, object] | None = None, rehearses: bool | None = None,
    policy: RoutingPolicy | None = None,
) -> Simulation:  # fmt: skip
    """Build a run; prefill caches no prefix, decode does, so that there is an overlap."""
    setting = setting or PolicySetting()
    law = law or paper_fleet.law(reading)
    serial = 1 if reading == "serial-prefill" else 0
    workers = (
        WorkerGroup(role=Role.PREFILL, prefix_caching=False, max_seqs=serial),
        WorkerGroup(role=Role.DECODE, count=paper_fleet.decoders),
    )
    if policy is None and not setting.policy:
        policy = EqualStages.weighing(setting.overlap_weight)
    control = unlimited(
        policy=setting.policy or "dynamo-paper",
        params=dict(setting.params),
        temperature=setting.temperature,
        saturation=dict(saturation or {"detector": "cusum"}),
        seed=seed,
    )
    return Simulation(
        loop,
        FleetConfig(workers=workers, link=_LINK),
        Setup(
            model=paper_fleet.model,
            gpu="B200",
            tp=paper_fleet.tp,
            timing=_text(law),
            max_seqs=1024,
            rehearses=rehearses,
        ),
        control,
        client(reading) if sender is None else sender,
        seed=seed,
        policy=policy,
        assess_every=20.0,
    )


def _text(law: Law) -> str:
    names: tuple[str, ...] = (
        "itl_a", "itl_b", "few", "itl_few", "prefill", "prefill_token", "overhead",
    )  # fmt: skip
    if law.mixed is not None:
        names = (*names, "mixed")
    return "law:" + ",".join(f"{name}={getattr(law, name)!r}" for name in names)


class EqualStages(DynamoPaper):
    """cost_j = omega * prefill_j + active_j, for prefill and decode workers alike (Eq. 7)."""

    name: ClassVar[str] = "eq1"

    @classmethod
    def weighing(cls, overlap_weight: float) -> Self:
        """Return one with this omega."""
        return cls(DynamoPaperParams(overlap_weight=overlap_weight))

    def pool_costs(
        self, request: RequestView, fleet: FleetView, rows: Rows, pool: Pool
    ) -> dict[str, Costs]:
        """Return `prefill` and `active`, in blocks, (rows,)."""
        return super().pool_costs(
            request, fleet, rows, Pool.AGGREGATED if pool is Pool.DECODE else pool
        )
