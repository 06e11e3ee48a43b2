"""The paper's tables in our own form: streams of many tenants over one budget of KV blocks.

``python -m benchmarks.token_pd.tables table`` serves the same Poisson arrivals under each policy,
at a load that keeps the processor about 90% busy under FIFO while its cache is over budget, and
prints peak bytes, speed, latency, perplexity and exact match; the paper's ratios beside ours.
``iso`` finds each policy's least memory at the full cache's perplexity; ``held`` compares speed
and latency at one budget with as many streams as keep that quality; ``ablate`` varies the risk
weight and the predictor. ``--json FILE`` keeps every run's figures: what is in it already is not
run again, and ``show`` prints its table. The policy ``full`` is no eviction, and room for all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.servers import machine
from pigou.runtime.resources import prepare_environment, set_threads

if TYPE_CHECKING:
    from benchmarks.token_pd.load import Arrival, Item
    from benchmarks.token_pd.run import Figures, Setting
    from pigou.runtime.models.load import LoadedModel

POLICIES = ("full", "fifo", "lru", "h2o", "paper", "paper-lossy", "pigou")
#: Blocks of the budget for each of 256 streams; about half of what they would fill.
SHARE = 6
#: Requests that tell a policy's speed.
ENOUGH = 128
#: Least and most blocks a stream between which the least memory is sought.
LEAST, MOST = 4.0, 18.0


class Bench:
    """A loaded model, its requests, and the runs made with them."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.token_pd.load import Texts
        from pigou.models import bundled_path
        from pigou.runtime.models.load import load

        self.args = args
        self.model: LoadedModel = load(bundled_path(), args.dtype, args.device)
        self.texts = Texts.unseen(bundled_path(), args.scale)
        self._shares: dict[str, float] = {}
        self._warm_up()

    def items(self, streams: int, fan: int) -> list[Item]:
        """Return the requests of a run."""
        from benchmarks.token_pd.load import make_items

        count = max(round(self.args.requests * streams), 4)
        return make_items(self.texts, count, fan, self.args.seed)

    def run(self, setting: Setting, coming: list[Arrival]) -> Figures:
        """Run one setting, print its line, and keep its figures; look them up where they are."""
        return self.turns([setting], coming)[0]

    def turns(self, settings: list[Setting], coming: list[Arrival]) -> list[Figures]:
        """Run settings that are not kept yet in turns; return the figures of all."""
        from benchmarks.token_pd.run import Figures, serve_in_turns

        kept = {json.dumps(line["setting"]): line["figures"] for line in _lines(self.args.json)}
        told = [self._told(setting, coming) for setting in settings]
        new = [i for i, key in enumerate(told) if key not in kept]
        if new:
            figures = serve_in_turns(self.model, [settings[i] for i in new], coming)
            for i, each in zip(new, figures, strict=True):
                kept[told[i]] = each.row()
                line = json.dumps({"setting": json.loads(told[i]), "figures": each.row()})
                print(line, flush=True)
                if self.args.json:
                    with Path(self.args.json).open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
        return [Figures(**kept[key]) for key in told]

    def _told(self, setting: Setting, coming: list[Arrival]) -> str:
        """Return all that decides a run, as JSON."""
        args = self.args
        return json.dumps({
            "policy": setting.policy, "streams": setting.streams, "blocks": setting.blocks,
            "params": setting.params, "seed": args.seed, "requests": len(coming),
            "scale": args.scale, "last": coming[-1].time, "dtype": args.dtype,
            "device": args.device, "block": setting.block,
        })  # fmt: skip

    def setting(
        self, policy: str, streams: int, blocks: int, params: dict[str, float] | None = None
    ) -> Setting:
        """Return a setting with a budget of the bytes of `blocks` blocks, side data included."""
        from benchmarks.token_pd.run import Setting, blocks_for

        if policy not in self._shares:
            self._shares[policy] = blocks_for(self.model, policy, 1 << 20) / (1 << 20)
        held = int(blocks * self._shares[policy])
        return Setting(policy, streams, held, params or {}, self.args.block)

    def full(self, streams: int, items: list[Item]) -> Setting:
        """Return a setting whose cache holds everything."""
        from benchmarks.token_pd.run import Setting, plenty

        blocks = max(plenty(items, streams), round(MOST * self.args.scale * streams))
        return Setting("none", streams, blocks, block=self.args.block)

    def _warm_up(self) -> None:
        """Compile everything that runs, where it counts for nobody."""
        from benchmarks.token_pd.load import arrivals, make_items
        from benchmarks.token_pd.run import Setting, serve

        items = make_items(self.texts, 6, 2, 1)
        for policy in {"none", *self.args.policies} - {"full"}:
            setting = Setting(policy, 6, round(40 * self.args.scale), block=self.args.block)
            serve(self.model, setting, arrivals(items, float("inf"), 1, 0))


def main() -> None:
    """Run what was asked for."""
    args = _arguments()
    prepare_environment(1)
    set_threads(1)
    print("machine:", machine(), flush=True)
    if args.what == "show":
        show(args)
        return
    bench = Bench(args)
    {"table": table, "iso": iso, "held": held, "ablate": ablate}[args.what](bench)


def _lines(path: str) -> list[dict[str, Any]]:
    """Return the runs that a file holds; none where there is no file."""
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def show(args: argparse.Namespace) -> None:
    """Print the table of the runs that a file holds, by streams, in the order of `--policies`."""
    from benchmarks.token_pd.paper_tables import table as lay_out
    from benchmarks.token_pd.run import Figures

    done = [Figures(**line["figures"]) for line in _lines(args.json)]
    order = {"none" if name == "full" else name: i for i, name in enumerate(args.policies)}
    done.sort(key=lambda f: (f.streams, order.get(f.policy, len(order))))
    print(lay_out(done))


def table(bench: Bench) -> None:
    """Print the paper's tables: every number of streams, every policy, one budget."""
    from benchmarks.token_pd.paper_tables import table as lay_out

    args = bench.args
    done: list[Figures] = []
    for streams in args.streams:
        items, coming = _arrivals(bench, streams)
        settings = [
            bench.full(streams, items) if policy == "full"
            else bench.setting(policy, streams, args.blocks)
            for policy in args.policies
        ]  # fmt: skip
        done += bench.turns(settings, coming)
    print(f"\nbudget: bytes of {args.blocks} blocks of 16 tokens\n{lay_out(done)}")


def _arrivals(bench: Bench, streams: int) -> tuple[list[Item], list[Arrival]]:
    """Return requests for `streams` streams and their arrivals; print their number and rate."""
    from benchmarks.token_pd.load import arrivals

    args = bench.args
    fan = max(1, round(args.fan * streams))
    items = bench.items(streams, fan)
    rate = args.rate or _load(bench, streams, items, fan)
    print(f"{streams} streams, {len(items)} requests, jobs of {fan}, {rate:.3f} req/s", flush=True)
    return items, arrivals(items, rate, fan, args.seed)


def _load(bench: Bench, streams: int, items: list[Item], fan: int) -> float:
    """Return the rate at which FIFO is busy 90% of the time, told by its speed with no pauses."""
    from benchmarks.token_pd.load import arrivals, rate_for

    args = bench.args
    capacity = args.capacity
    if not capacity:
        flood = arrivals(items[:ENOUGH], float("inf"), fan, args.seed)
        capacity = bench.run(bench.setting("fifo", streams, args.blocks), flood).capacity
    return rate_for(items, args.busy, 1.0 / capacity, fan, args.seed)


def iso(bench: Bench) -> None:
    """Print each policy's least memory at the full cache's perplexity."""
    from benchmarks.token_pd.iso_perplexity import HEAD
    from benchmarks.token_pd.paper_tables import markdown

    rows = [row for streams in bench.args.streams for row in _iso_rows(bench, streams)]
    print("\n" + markdown(HEAD, rows))


def _iso_rows(bench: Bench, streams: int) -> list[list[str]]:
    from benchmarks.token_pd.iso_perplexity import compared, least_budget
    from benchmarks.token_pd.load import arrivals

    args = bench.args
    items = bench.items(streams, 1)
    coming = arrivals(items, float("inf"), 1, args.seed)
    full = bench.run(bench.full(streams, items), coming)
    low, high = round(LEAST * streams), round(MOST * args.scale * streams)

    def run(policy: str, blocks: int) -> Figures:
        return bench.run(bench.setting(policy, streams, blocks), coming)

    found = [
        least_budget(policy, partial(run, policy), full.perplexity, low, high, rounds=args.rounds)
        for policy in args.policies
        if policy != "full"
    ]
    return compared(full, found)


def held(bench: Bench) -> None:
    """Print speed at one budget, with as many streams as each policy can hold at that quality.

    `--hold policy=blocks` says how many blocks a stream a policy needs (from `iso`).
    """
    from benchmarks.token_pd.paper_tables import table as lay_out

    args, done = bench.args, []
    needs = dict(each.split("=") for each in args.hold)
    for streams in args.streams:
        _, coming = _arrivals(bench, streams)
        settings = [
            bench.setting(policy, min(streams, int(args.blocks / float(need))), args.blocks)
            for policy, need in needs.items()
        ]
        done += [replace(each, streams=streams) for each in bench.turns(settings, coming)]
    print(f"\nbudget: bytes of {args.blocks} blocks of 16 tokens\n{lay_out(done)}")


def ablate(bench: Bench) -> None:
    """Print what the risk weight and the predictor do at the tables' budget."""
    from benchmarks.token_pd.load import arrivals
    from benchmarks.token_pd.paper_tables import MIB, markdown

    args, rows = bench.args, []
    for streams in args.streams:
        items = bench.items(streams, 1)
        coming = arrivals(items, float("inf"), 1, args.seed)
        full = bench.run(bench.full(streams, items), coming)
        rows.append(["full", "-", f"{full.perplexity:.3f}", "-", f"{full.exact:.1%}",
                     f"{full.peak_bytes / MIB:.1f}", f"{full.mean_bytes / MIB:.1f}"])  # fmt: skip
        for policy, params in variants(args.policies):
            figures = bench.run(bench.setting(policy, streams, args.blocks, params), coming)
            worse = figures.perplexity / full.perplexity - 1
            rows.append([policy, _told(params), f"{figures.perplexity:.3f}", f"{worse:+.2%}",
                         f"{figures.exact:.1%}", f"{figures.peak_bytes / MIB:.1f}",
                         f"{figures.mean_bytes / MIB:.1f}"])  # fmt: skip
    head = ["policy", "parameters", "perplexity", "against full", "exact", "peak MiB", "mean MiB"]
    print("\n" + markdown(head, rows))


#: Weights of the risk, Eq. 4's lambda: how much of it is taken off the return; below 0 it is added.
RISKS = (-2.0, -1.5, -1.0, -0.5, -0.25, 0.0, 0.1, 0.25, 0.5)


def variants(policies: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """Return each policy with each weight of the risk, and with a constant for its predictor.

    A policy that has neither comes as it is, and so does `pigou`, before these: it counts the
    risk as the variance of the logarithm, and adds it (half its `order`, which is the same in all
    layers here, as by default it is not).
    """
    found: list[tuple[str, dict[str, float]]] = []
    for policy in policies:
        told: list[dict[str, float]] = [{}]
        if policy == "pigou":
            told += [*({"order": -2 * risk} for risk in RISKS), {"constant": 1.0}]
        elif policy in ("paper", "paper-lossy"):
            told = [*({"lambda": risk} for risk in RISKS), {"constant": 1.0}]
        found += [(policy, params) for params in told if policy != "full"]
    return found


def _told(params: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in params.items()) or "-"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["table", "show", "iso", "held", "ablate"])
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument(
        "--blocks", type=int, default=SHARE * 256,
        help="the budget, in the bytes of blocks of 16 tokens; side data is paid for out of it",
    )  # fmt: skip
    parser.add_argument("--requests", type=float, default=2.0, help="for each stream")
    parser.add_argument("--busy", type=float, default=0.9, help="share of the time, under FIFO")
    parser.add_argument(
        "--capacity", type=float, default=0.0, help="FIFO's req/s without pauses, if known"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="req/s instead of seeking it")
    parser.add_argument("--fan", type=float, default=0.125, help="requests a job, of the streams")
    parser.add_argument("--rounds", type=int, default=6, help="most runs of a bisection")
    parser.add_argument("--hold", nargs="+", default=[], help="policy=blocks, for `held`")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--block", type=int, choices=(1, 2, 4, 8, 16), default=16, help="tokens of the cache's own"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="file that every run's figures are added to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
