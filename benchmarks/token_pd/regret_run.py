"""The runs and the report of `benchmarks.token_pd.regret`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from benchmarks.token_pd.load import Arrival, Item, Texts, arrivals, make_items
from benchmarks.token_pd.optimum import (
    BEGIN,
    Floats,
    Recorded,
    earned,
    filled,
    fixed_optimum,
    settling,
)
from benchmarks.token_pd.paper_tables import markdown
from benchmarks.token_pd.record import Recorder, future_shares, lay_out
from benchmarks.token_pd.regret_games import by_price, growth, optimum, regret, utility
from benchmarks.token_pd.run import BLOCK, Run, Setting
from pigou.models import bundled_path
from pigou.report.figure import Axis, Chart, ChartLine
from pigou.report.figure_png import png
from pigou.runtime.models.load import LoadedModel, load

#: Steps before the load doubles, and steps looked at after that.
CHANGE, WINDOW = 100, 120
#: Lengths of the requests of that run: all run until its end.
PROMPT, OUTPUT = 100, CHANGE + WINDOW + 8


@dataclass
class Course:
    """What a policy's regret did; means over layers and heads."""

    policy: str
    each: Floats  # regret against the best set of each step, after every step, shape (T,)
    ends: list[int]  # steps after which the fixed optimum is told, shape (k,)
    fixed: Floats  # regret against it, shape (k,)
    possible: float  # total return of the best sets
    got: float
    # figures of Token-PD's rule on the premises of its bound, after those steps: regret, tokens
    # beyond the budget (summed over steps), regret within the budget; shape (k, 3).
    priced: Floats
    # entries kept, of those that the budget's bytes hold, in the steps in which not all fit: blocks
    # are not full, and not all are handed out.
    filled: float


def report(args: argparse.Namespace) -> None:
    """Run everything and print it."""
    model = load(bundled_path(), args.dtype)
    texts = Texts.unseen(bundled_path())
    items = make_items(texts, args.requests, args.fan, args.seed)
    returns = future_shares(bundled_path(), items)
    courses = [course(model, policy, items, returns, args) for policy in args.policies]
    rows = [
        [c.policy, str(len(c.each)), f"{c.got / c.possible:.1%}", f"{c.each[-1]:.2f}",
         f"{growth(c.each, BEGIN):.2f}", f"{c.fixed[-1]:.2f}", _grows(c), f"{c.filled:.1%}"]
        for c in courses
    ]  # fmt: skip
    head = ["policy", "steps", "earned of the best sets", "regret, best sets", "exponent",
            "regret, best fixed choice", "exponent", "of the budget filled"]  # fmt: skip
    print(f"\n{args.streams} streams, {args.requests} requests, budget "
          f"{args.blocks * args.streams} blocks of {BLOCK} tokens, cut into {args.block}\n"
          f"{markdown(head, rows)}\n")  # fmt: skip
    for c in courses:
        print(f"Token-PD's rule on the premises of its bound (arrivals of {c.policy}):")
        lines = [[str(end), *(f"{each:.2f}" for each in row)]
                 for end, row in zip(c.ends, c.priced.tolist(), strict=True)]  # fmt: skip
        print(markdown(["steps", "regret", "tokens beyond the budget", "regret within the budget"],
                       lines) + "\n")  # fmt: skip
    print(markdown(["policy", "load doubled: price settles after (steps)", "before", "after",
                    "load halved: after (steps)", "before", "after"],
                   [settle(model, policy, texts, args) for policy in args.policies]))  # fmt: skip
    if args.picture is not None:
        png(picture(courses), args.picture)


def course(
    model: LoadedModel,
    policy: str,
    items: list[Item],
    returns: list[np.ndarray],
    args: argparse.Namespace,
) -> Course:
    """Record one policy's run and set it beside the optima."""
    recorder = Recorder()
    budget = args.blocks * args.streams
    run = Run(model, Setting(policy, args.streams, budget, block=args.block), recorder)
    figures, done = run(arrivals(items, args.rate, args.fan, args.seed))
    print(f"{policy}: {figures.steps} steps, perplexity {figures.perplexity:.3f}, "
          f"given up {figures.dropped}, {figures.at_once:.1f} at once (most {figures.most}), "
          f"{figures.capacity:.1f} req per busy s", flush=True)  # fmt: skip
    by_item = {id(served.arrival.item): served.output.request for served in done}
    requests = [by_item[id(item)] for item in items]
    ends = np.unique(np.geomspace(BEGIN, len(recorder.steps), args.points).astype(int)).tolist()
    layers, heads = returns[0].shape[:2]
    parts = []
    for layer in range(layers):
        for head in range(heads):
            found = lay_out(recorder.steps, requests, returns, layer, head)
            none = np.zeros_like(found.returns)
            limit = budget * BLOCK
            best = optimum(found.returns, none, found.there, limit, 0.0, 0.0)
            real = utility(found.returns, none, found.kept, found.there, 0.0, 0.0)
            lacking = fixed_optimum(found, limit, ends) - earned(found)[np.array(ends) - 1]
            played = priced(found, best, limit, ends)
            parts.append(
                (regret(best, real), lacking, float(best.sum()), float(real.sum()), played,
                 filled(found, limit))
            )  # fmt: skip
    regrets, fixed, possible, got, rule, full = zip(*parts, strict=True)
    return Course(
        policy, np.mean(regrets, axis=0), ends, np.mean(fixed, axis=0), float(np.mean(possible)),
        float(np.mean(got)), np.mean(rule, axis=0), float(np.mean(full)),
    )  # fmt: skip


def priced(found: Recorded, best: Floats, budget: int, ends: list[int]) -> Floats:
    """Return what `Course.priced` has, of one layer and KV head.

    Args:
        found: the recorded run; only its returns count, and which tokens are there.
        best: utility of each step's best set, shape (T,).
        ends: steps after which to tell it. The rate depends on the horizon, as the bound has it,
            so each is a play of its own.
    """
    rows = []
    for end in ends:
        returns, there = found.returns[:end], found.there[:end]
        free, beyond = by_price(returns, there, budget, end**-0.5)
        held, _ = by_price(returns, there, budget, end**-0.5, capped=True)
        possible = float(best[:end].sum())
        rows.append([possible - float(returns[free].sum()), float(beyond.sum()),
                     possible - float(returns[held].sum())])  # fmt: skip
    return np.array(rows)


def _grows(course: Course) -> str:
    """Return the exponent of the regret against the fixed optimum, where there is any."""
    good = course.fixed > 0
    if good.sum() < 3:
        return "none: at or below 0"
    slope, _ = np.polyfit(np.log(np.array(course.ends)[good]), np.log(course.fixed[good]), 1)
    return f"{slope:.2f}"


def settle(model: LoadedModel, policy: str, texts: Texts, args: argparse.Namespace) -> list[str]:
    """Double the load at once, and thereby exceed the budget; time the price, and back again."""
    half = args.streams // 2
    budget = half * ((PROMPT + CHANGE) // BLOCK + 2)
    setting, cells = Setting(policy, args.streams, budget, block=args.block), [policy]
    for early, late in ((OUTPUT, CHANGE), (CHANGE, 0)):
        prices = _changed(model, setting, texts, args, early, late)
        found = settling(prices, CHANGE, WINDOW)
        before, after = np.median(prices[CHANGE - 20 : CHANGE]), np.median(prices[-WINDOW // 2 :])
        told = "not within the window" if found is None else str(found)
        cells += [told, f"{before:.3g}", f"{after:.3g}"]
    return cells


def _changed(
    model: LoadedModel, setting: Setting, texts: Texts, args: argparse.Namespace,
    early: int, late: int,
) -> list[float]:  # fmt: skip
    """Return the price by step where one half has other times than the other.

    Args:
        early: tokens that the second half of the streams generates.
        late: step at which it comes.
    """
    half = setting.streams // 2
    rng = np.random.default_rng((args.seed, 7))
    ids = texts.ids["play"]
    starts = rng.integers(0, len(ids) - PROMPT - OUTPUT, size=setting.streams).tolist()
    reads = [ids[start : start + PROMPT + OUTPUT] for start in starts]
    recorder = Recorder(positions=False)
    run = Run(model, setting, recorder)
    for read in reads[:half]:
        run.offer(Arrival(0, Item("play", read[:PROMPT], read[PROMPT:])))
    for number in range(CHANGE + WINDOW):
        if number == late:
            for read in reads[half:]:
                item = Item("play", read[:PROMPT], read[PROMPT : PROMPT + early])
                run.offer(Arrival(run.now, item))
        run.step()
    return [step.price for step in recorder.steps]


def picture(courses: list[Course]) -> Chart:
    """Return the regrets over steps, beside a square root."""
    top = max(float(c.each[-1]) for c in courses)
    longest = max(len(c.each) for c in courses)
    steps = np.arange(1, longest + 1)
    root = top * np.sqrt(steps / longest)
    lines = [
        ChartLine(c.policy, range(BEGIN, len(c.each) + 1), c.each[BEGIN - 1 :].tolist(), i)
        for i, c in enumerate(courses)
    ]
    lines += [
        ChartLine(f"{c.policy}, fixed choice", c.ends, [max(v, 0.0) for v in c.fixed.tolist()], i,
             stroke="dash", marks=True)
        for i, c in enumerate(courses)
    ]  # fmt: skip
    tail = slice(BEGIN - 1, None)
    lines.append(
        ChartLine("square root", steps[tail].tolist(), root[tail].tolist(), -1, stroke="dot")
    )
    return Chart(
        "token-pd-regret", "Regret against those who know the future", "",
        Axis("step", log=True), Axis("attention lost", log=True), tuple(lines),
    )  # fmt: skip
