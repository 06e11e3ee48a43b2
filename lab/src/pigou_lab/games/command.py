"""`pigou game`: the games of the theory, solved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import typer
from rich.table import Table

from pigou.cli.option_values import check_json, write_json
from pigou.cli.progress import wide_console
from pigou.config import ConfigError, check_bounds
from pigou.small_file import FileRefused, read_bytes
from pigou_lab.games.caching import CachingGame
from pigou_lab.games.caching_studies import (
    TIERS,
    SocialCosts,
    TierGame,
    cache_paradoxes,
    costs_of,
    crowded,
    lead,
    topology_costs,
    topology_distances,
)
from pigou_lab.games.dynamics import claims
from pigou_lab.games.hierarchy import hierarchy_equilibrium, two_levels
from pigou_lab.games.normal_form import KNOWN, NormalFormGame
from pigou_lab.games.traffic import PoleLaw, heavy_limit, price_at, swinging

game = typer.Typer(
    help="Solve games of the theory: equilibria, optimum, Price of Anarchy.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Json = Annotated[str, typer.Option("--json", help="File to write the figures to.")]
TOPOLOGIES = ("complete", "line", "two-level")
#: Numbers of nodes that are shown where none are given.
_NODES = {"complete": "5,7,9", "line": "5,7,9,25,101,401", "two-level": "4,8,16,32"}
#: Limit of numbers of nodes and slots; a line takes the square of it.
MAX_COUNT = 2000
MAX_TOKENS = 65_536
_LOADS = "1e-6,0.1,0.5,0.8,0.9,0.99,0.999,0.9999,0.999999"
T = TypeVar("T")


class GameFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A game in normal form: an array per player, with a dimension per player."""

    payoffs: list[Any] | None = None
    costs: list[Any] | None = None  # in place of payoffs
    strategies: list[list[str]] | None = None  # names, by player
    social: list[Any] | None = None  # social value of profiles; the players' sum unless given


class CachingFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A caching game, as of `CachingGame`."""

    distance: list[list[float]]
    demand: list[list[float]]
    placement_cost: float | list[float] = 0.0
    capacity: int | list[int] | None = None
    miss_cost: float | None = None


@game.command("normal")
def normal(
    which: Annotated[
        str,
        typer.Argument(
            metavar="GAME",
            help=f"{', '.join(KNOWN)}; or a JSON file with payoffs (or costs), an array a player.",
        ),
    ],
    json: Json = "",
) -> None:
    """Solve a game in normal form: pure and mixed equilibria, optimum, prices, commitment."""
    check_json(json)
    if which in KNOWN:
        read = GameFile(*KNOWN[which][:1], strategies=KNOWN[which][1])
    else:
        read = _read(which, GameFile)
    if (read.payoffs is None) == (read.costs is None):
        raise ConfigError(f"{which} needs payoffs or costs, and not both")
    made = _made(lambda: NormalFormGame(
        read.payoffs or read.costs or [], costs=read.costs is not None, social=read.social
    ))  # fmt: skip
    names = read.strategies or [[str(n) for n in range(size)] for size in made.shape]
    if [len(own) for own in names] != list(made.shape):
        raise ConfigError(f"strategies of {which} are not as many as the payoffs: {made.shape}")
    document: dict[str, Any] = {
        "pure": [_profile(made, names, p) for p in made.pure_equilibria()],
        "optimum": _profile(made, names, made.optimum()),
    }
    if made.players == 2:
        document["equilibria"] = _made(lambda: [
            {"rows": e.rows.tolist(), "columns": e.columns.tolist(), "payoffs": list(e.payoffs),
             "social": e.social} for e in made.equilibria
        ])  # fmt: skip
    for key in ("price_of_anarchy", "price_of_stability"):
        try:
            document[key] = getattr(made, key)()
        except ValueError as error:
            document[key] = None
            document.setdefault("notes", []).append(f"{key}: {error}")
    if made.players > 1:
        document["commitment"] = _commitment(made.commitment())
    if made.players == 2:
        document["mixed_commitment"] = _commitment(made.mixed_commitment())
    _show(document)
    write_json("--json", json, document)


@game.command("caching")
def caching(
    topology: Annotated[str, typer.Option(help="Topologies, by commas.")] = ",".join(TOPOLOGIES),
    nodes: Annotated[
        str, typer.Option(help="Numbers of nodes, as 5,7,9. (default: some of each topology)")
    ] = "",
    alpha: Annotated[
        str,
        typer.Option(help="Cost of a copy: one for all, or one a number. (default: (nodes - 1)/2)"),
    ] = "",
    clusters: Annotated[int, typer.Option(help="Clusters of two levels.")] = 2,
    miss: Annotated[float, typer.Option(help="Cost of a miss where slots are limited.")] = 20.0,
    json: Json = "",
) -> None:
    """Print the Price of Anarchy of caching by topology, with and without a limit of slots.

    Without a limit everybody wants one object: the line's distances are its steps, clusters are
    alpha apart. With one slot a node, one node wants two objects, and its neighbours none of them.
    """
    check_json(json)
    check_bounds("--clusters", clusters, ge=1)
    check_bounds("--miss", miss, gt=1)
    rows: list[dict[str, Any]] = []
    for name in topology.split(","):
        if name not in TOPOLOGIES:
            raise ConfigError(f"--topology has {name!r}; give of: {', '.join(TOPOLOGIES)}")
        counts = _counts("--nodes", nodes or _NODES[name])
        costs = _numbers("--alpha", alpha) if alpha else [(n - 1) / 2 for n in counts]
        if len(costs) not in (1, len(counts)):
            raise ConfigError(f"--alpha has {len(costs)} numbers for {len(counts)} of --nodes")
        for n, cost in zip(counts, costs * (len(counts) if len(costs) == 1 else 1), strict=False):
            solved = _made(lambda n=n, c=cost, t=name: topology_costs(t, n, c, clusters))
            rows.append({"topology": name, "nodes": n, "alpha": cost, "slots": None} | _row(solved))
    for name in topology.split(","):
        for n in (2, 4) if name != "two-level" else (4,):
            solved = costs_of(crowded(topology_distances(name, n), miss))
            rows.append({"topology": name, "nodes": n, "alpha": 0.0, "slots": 1} | _row(solved))
    _table(rows)
    write_json("--json", json, rows)


@game.command("hierarchy")
def hierarchy(
    file: Annotated[
        str,
        typer.Argument(help="JSON file with distance and demand, and placement_cost, capacity and "
                       "miss_cost. (default: a random game of two levels)"),
    ] = "",
    clusters: Annotated[int, typer.Option(help="Clusters of the random game.")] = 4,
    size: Annotated[int, typer.Option(help="Nodes of a cluster.")] = 8,
    objects: Annotated[int, typer.Option(help="Objects.")] = 16,
    slots: Annotated[int, typer.Option(help="Slots of each node.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the demand.")] = 0,
    json: Json = "",
) -> None:  # fmt: skip
    """Construct an equilibrium of caching on a hierarchy, in polynomial time."""
    check_json(json)
    for name, value in (("clusters", clusters), ("size", size), ("objects", objects)):
        check_bounds(f"--{name}", value, ge=1)
    check_bounds("--slots", slots, ge=0)
    if file:
        read = _read(file, CachingFile)
        made = _made(lambda: CachingGame(**msgspec.structs.asdict(read)))
    else:
        demand = np.random.default_rng(seed).zipf(1.5, (clusters * size, objects)) / 10
        made = CachingGame(two_levels(clusters, size, 1, 10), np.minimum(demand, 5.0), 0.0, slots,
                           miss_cost=50.0)  # fmt: skip
    solved = _made(lambda: hierarchy_equilibrium(made))
    document: dict[str, Any] = {
        "nodes": made.nodes, "objects": made.objects, "swaps": solved.swaps, "bound": solved.bound,
        "equilibrium": made.is_equilibrium(solved.placement),
        "social_cost": made.social_cost(solved.placement),
    }  # fmt: skip
    if made.exact:
        document |= _row(costs_of(made))
    document["holds"] = [np.flatnonzero(row >= 0).tolist() for row in solved.placement]
    _show(document)
    write_json("--json", json, document)


@game.command("paradox")
def paradox(
    miss: Annotated[float, typer.Option(help="Cost of a miss.")] = 10.0, json: Json = ""
) -> None:
    """Show the cache paradox: more room, or a new link, makes every equilibrium dearer."""
    check_json(json)
    rows = [
        {"change": one.change, "state": state} | _row(costs_of(made))
        for one in _made(lambda: cache_paradoxes(miss))
        for state, made in (("before", one.before), ("after", one.after))
    ]
    _table(rows)
    write_json("--json", json, rows)


@game.command("leading")
def leading(
    demand: Annotated[str, typer.Option(help="Accesses of each object.")] = "10,6",
    access: Annotated[str, typer.Option(help="Cost of an access, by tier, HBM first.")] = "0,4",
    capacity: Annotated[str, typer.Option(help="Objects of each tier.")] = "1,1",
    price: Annotated[str, typer.Option(help="Cost of holding an object, by tier.")] = "0,13",
    miss: Annotated[float, typer.Option(help="Cost of a miss.")] = TIERS.miss,
    json: Json = "",
) -> None:
    """Let HBM lead and the tiers below reply: what commitment is worth (Stackelberg)."""
    check_json(json)
    slots = _counts("--capacity", capacity)
    rest = [_numbers(f"--{name}", text) for name, text in
            (("demand", demand), ("access", access), ("price", price))]  # fmt: skip
    made = _made(lambda: TierGame(rest[0], rest[1], slots, rest[2], miss))
    solved = _made(lambda: lead(made))
    worth = solved.worth
    document = {
        "hbm_cost": solved.leads.payoffs[0], "social_cost": solved.leads.social,
        "holds": [list(own) for own in solved.held],
        "equilibria": [{"hbm_cost": own, "social_cost": all_} for own, all_ in solved.equilibria],
        "worth_over_best": None if worth is None else worth[0],
        "worth_over_worst": None if worth is None else worth[1],
    }  # fmt: skip
    _show(document)
    write_json("--json", json, document)


@game.command("traffic")
def traffic(
    rates: Annotated[str, typer.Option(help="Service rates of M/M/1 workers.")] = "9,1",
    poles: Annotated[str, typer.Option(help="n_sat of workers of the latency law.")] = "64,32",
    law: Annotated[
        str, typer.Option(help="a,b,d,beta of the latency law a n + b + d / (n_sat - n)^beta.")
    ] = "0.005,0.02,0.01,2",
    loads: Annotated[str, typer.Option(help="Shares of the capacity.")] = _LOADS,
    json: Json = "",
) -> None:
    """Print the Price of Anarchy from light to heavy traffic, with its limits."""
    check_json(json)
    shares = _numbers("--loads", loads)
    for share in shares:
        check_bounds("--loads", share, gt=0, lt=1)
    shape = _numbers("--law", law)
    if len(shape) != 4:
        raise ConfigError(f"--law is {law!r}; write a,b,d,beta")
    a, b, d, beta = shape
    queues = [PoleLaw(0, 0, 1, rate) for rate in _numbers("--rates", rates)]
    workers = [PoleLaw(a, b, d, pole, beta) for pole in _numbers("--poles", poles)]
    rows: list[dict[str, Any]] = []
    for share in shares:
        row: dict[str, Any] = {"load": share}
        for name, laws in (("mm1", queues), ("latency_law", workers)):
            capacity = sum(one.n_sat for one in laws)
            row[name] = _made(lambda x=share * capacity, laws=laws: price_at(laws, x))
        # Costs without a pole have no capacity: a share stands for its odds, share / (1 - share).
        odds = share / (1.0 - share)
        row["polynomials"] = price_at([lambda x: 1 + x, lambda x: x * x], odds)
        row["swinging"] = price_at([swinging, float], odds)
        rows.append(row)
    limits = {"mm1": heavy_limit(queues), "latency_law": heavy_limit(workers), "polynomials": 1.0,
              "swinging": None}  # fmt: skip
    _table([*rows, {"load": "limit", **limits}])
    write_json("--json", json, {"loads": rows, "heavy_limit": limits})


@game.command("rounds")
def rounds(
    trials: Annotated[int, typer.Option(help="Random games of each kind.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the games.")] = 0,
    json: Json = "",
) -> None:
    """Print where n best responses reach an equilibrium of n players, and where not."""
    check_json(json)
    check_bounds("--trials", trials, ge=1)
    rows = [{"games": one.games, "n_moves_suffice": one.holds, "most_moves_over_n": one.most,
             "tried": one.tried} for one in claims(trials, seed)]  # fmt: skip
    _table(rows)
    write_json("--json", json, rows)


@game.command("experts")
def experts(
    model: Annotated[str, typer.Option(help="A mixture of experts.")] = "deepseek-v3",
    gpu: Annotated[str, typer.Option(help="GPU of each rank.")] = "H100",
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 32,
    copies: Annotated[str, typer.Option(help="Further copies of experts in all.")] = "32,256",
    tokens: Annotated[str, typer.Option(help="Tokens of each rank.")] = "8,64,128,4096",
    load: Annotated[str, typer.Option(help="Loads of experts, as --expert-load.")] = "zipf:0.6",
    trials: Annotated[int, typer.Option(help="Random nested games of each depth.")] = 50,
    json: Json = "",
) -> None:
    """Solve the nested game of workers and experts, and the game of activated copies."""
    from pigou_lab.games.experts import activation_rows, herding, nested_pigou, worst_nested

    check_json(json)
    check_bounds("--ranks", ranks, ge=1, le=MAX_COUNT)
    check_bounds("--trials", trials, ge=1)
    known = nested_pigou()
    nested = [{"game": "worker, then copies (Pigou's)", "games": 1,
               "price_of_anarchy": known.price_of_anarchy()}]  # fmt: skip
    for depth in (1, 2):
        nested.append({"game": f"affine, {depth} deep, the worst", "games": trials,
                       "price_of_anarchy": worst_nested(depth, trials, 0)})  # fmt: skip
    for number in (2, 3):
        herd = herding(number)
        settled = herd.settled(herd.even(), tolled=False)
        nested.append({"game": f"activation, {number} copies", "games": 1,
                       "price_of_anarchy": herd.layer_s(settled) / herd.optimum()})  # fmt: skip
    _table(nested)
    further, batches = _counts("--copies", copies), _counts("--tokens", tokens, MAX_TOKENS)
    rows = _made(lambda: activation_rows(model, gpu, ranks, further, batches, load))
    _table(rows)
    write_json("--json", json, {"nested": nested, "activation_us": rows})


@game.command("sharing")
def sharing(
    trials: Annotated[int, typer.Option(help="Random instances of each mechanism.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the instances.")] = 0,
    json: Json = "",
) -> None:
    """Solve mechanisms that share resources, and search for violations of their properties."""
    from pigou_lab.games.sharing import audits, known_answers

    check_json(json)
    check_bounds("--trials", trials, ge=1, le=MAX_COUNT)
    answers, rows = known_answers(), audits(trials, seed)
    _table(answers)
    _table(rows)
    write_json("--json", json, {"answers": answers, "properties": rows})


def _made(make: Any) -> Any:
    """Call, and refuse what the game refuses as what was typed."""
    try:
        return make()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read(file: str, kind: type[T]) -> T:
    if not Path(file).exists():
        known = f"give {', '.join(KNOWN)}, or a JSON file" if kind is GameFile else "name a file"
        raise ConfigError(f"{file!r} is no file; {known}")
    try:
        return msgspec.json.decode(read_bytes(file), type=kind)
    except (OSError, FileRefused, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as a game: {error}") from None


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; write numbers, as in 1,2.5") from None


def _counts(option: str, text: str, limit: int = MAX_COUNT) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; write whole numbers, as in 5,7") from None
    check_bounds(option, max(counts), le=limit)
    return counts


def _row(costs: SocialCosts) -> dict[str, float]:
    return {
        "optimum": costs.optimum, "best": costs.best, "worst": costs.worst,
        "price_of_anarchy": costs.price_of_anarchy, "price_of_stability": costs.price_of_stability,
    }  # fmt: skip


def _profile(
    made: NormalFormGame, names: Sequence[Sequence[str]], profile: Sequence[int]
) -> dict[str, Any]:
    own = [names[player][choice] for player, choice in enumerate(profile)]
    return {"strategies": own, "payoffs": list(made.payoffs(tuple(profile)))}


def _commitment(made: Any) -> dict[str, Any]:
    return {"strategy": made.strategy.tolist(), "replies": list(made.replies),
            "payoffs": list(made.payoffs), "social": made.social}  # fmt: skip


def _table(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(_text(row[name]) for name in rows[0]))
    wide_console(140).print(table)


def _show(document: Mapping[str, Any]) -> None:
    table = Table(show_header=False)
    for key, value in document.items():
        lines: Iterable[Any] = value if key in ("pure", "equilibria", "notes") else [value]
        for number, line in enumerate(lines or ["none"]):
            table.add_row("" if number else key.replace("_", " "), _text(line))
    wide_console(140).print(table)


def _text(value: Any) -> str:
    """Return a value as text; simple fractions as such."""
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        if not math.isfinite(value) or abs(value) >= 100:
            return f"{value:.6g}"
        simple = Fraction(value).limit_denominator(12)
        return str(simple) if abs(simple - value) < 1e-9 else f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "(" + ", ".join(map(_text, value)) + ")"
    return str(value)
