"""Run by Gambit's own interpreter: payoffs on stdin, pure Nash equilibria on stdout (both JSON)."""

import json
import sys

import numpy as np
import pygambit


def main() -> None:
    answers = []
    for payoffs in json.load(sys.stdin):
        game = pygambit.Game.from_arrays(*(np.array(p, dtype=object) for p in payoffs))
        found = pygambit.nash.enumpure_solve(game).equilibria
        answers.append([[_choice(profile[player]) for player in game.players] for profile in found])
    json.dump(answers, sys.stdout)


def _choice(strategy: object) -> int:
    """The index of the strategy that is played for certain."""
    return [float(probability) for _, probability in strategy].index(1.0)


if __name__ == "__main__":
    main()
