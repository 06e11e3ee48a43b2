"""`pigou game`: known answers as they are printed, and errors for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pigou.cli import main


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["game", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def figures(tmp_path: Path, *arguments: str) -> Any:
    path = tmp_path / "out.json"
    assert call(*arguments, "--json", str(path)) == 0
    return json.loads(path.read_text())


def test_a_known_game_and_the_same_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = figures(tmp_path, "normal", "battle-of-the-sexes")
    assert "rows (2/3, 1/3), columns (1/3, 2/3), payoffs (2/3, 2/3)" in capsys.readouterr().out
    assert [p["strategies"] for p in known["pure"]] == [["opera"] * 2, ["football"] * 2]
    assert known["price_of_anarchy"] == pytest.approx(9 / 4)
    file = tmp_path / "game.json"
    file.write_text('{"payoffs": [[[2, 0], [0, 1]], [[1, 0], [0, 2]]]}')
    own = figures(tmp_path, "normal", str(file))
    assert own["equilibria"] == known["equilibria"]
    assert own["pure"][0]["strategies"] == ["0", "0"]


def test_three_players_have_pure_equilibria_and_no_mixed_ones(tmp_path: Path) -> None:
    file = tmp_path / "game.json"
    same = [[[1, 0], [0, 0]], [[0, 0], [0, 2]]]
    file.write_text(json.dumps({"costs": [same] * 3}))
    found = figures(tmp_path, "normal", str(file))
    assert "equilibria" not in found
    assert len(found["pure"]) == 6  # all profiles in which two differ
    assert found["price_of_anarchy"] == 1


def test_caching_by_topology_prints_the_known_rows(tmp_path: Path) -> None:
    rows = figures(tmp_path, "caching")
    at = {(r["topology"], r["nodes"], r["slots"]): r for r in rows}
    for nodes, costs in ((5, (7, 7, 8)), (7, (12, 12, 15)), (9, (18, 18, 24))):
        row = at["line", nodes, None]
        assert (row["optimum"], row["best"], row["worst"]) == costs
    assert at["complete", 9, None]["price_of_anarchy"] == 1
    assert at["complete", 2, 1]["price_of_stability"] == pytest.approx(10)
    chosen = figures(tmp_path, "caching", "--topology", "line", "--nodes", "5", "--alpha", "2")
    assert chosen[0] == at["line", 5, None]


def test_a_hierarchy_from_a_file_is_solved(tmp_path: Path) -> None:
    file = tmp_path / "caching.json"
    file.write_text(json.dumps({
        "distance": [[0, 1, 4], [1, 0, 4], [4, 4, 0]], "demand": [[1, 1], [1, 1], [1, 1]],
        "capacity": 1, "miss_cost": 9,
    }))  # fmt: skip
    found = figures(tmp_path, "hierarchy", str(file))
    assert found["equilibrium"]
    assert found["best"] <= found["social_cost"] <= found["worst"]
    assert sorted(found["holds"][0] + found["holds"][1]) == [0, 1]
    assert figures(tmp_path, "hierarchy", "--clusters", "3", "--size", "4")["equilibrium"]


def test_the_others_print_their_tables(tmp_path: Path) -> None:
    before, after, *_ = figures(tmp_path, "paradox")
    assert after["best"] > 5 * before["worst"]
    assert figures(tmp_path, "leading")["worth_over_worst"] == 16
    limits = figures(tmp_path, "traffic", "--loads", "0.5,0.999999")
    assert limits["heavy_limit"]["mm1"] == pytest.approx(5 / 4)
    assert limits["loads"][-1]["mm1"] == pytest.approx(5 / 4, rel=1e-4)
    assert [r["n_moves_suffice"] for r in figures(tmp_path, "rounds", "--trials", "50")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["normal", "chess"], "'chess' is no file; give prisoners-dilemma"),
        (["normal", "FILE"], "unknown field `payoff`"),
        (["caching", "--topology", "ring"], "--topology has 'ring'"),
        (["caching", "--nodes", "x"], "--nodes is 'x'"),
        (["caching", "--nodes", "5.5"], "--nodes is '5.5'; write whole numbers"),
        (["caching", "--nodes", "9000"], "--nodes is 9000"),
        (["caching", "--alpha", "nan"], "alpha nan"),
        (["leading", "--capacity", "1,0.5"], "--capacity is '1,0.5'"),
        (["traffic", "--rates", "0,1"], "n_sat is 0.0"),
        (["caching", "--nodes", "5,7,9", "--alpha", "1,2"], "--alpha has 2 numbers for 3"),
        (["caching", "--topology", "two-level", "--nodes", "5"], "a multiple of the clusters"),
        (["hierarchy", "nowhere.json"], "'nowhere.json' is no file"),
        (["hierarchy", "--size", "0"], "--size is 0"),
        (["paradox", "--miss", "1"], "miss is 1.0"),
        (["leading", "--price", "0"], "one of each a tier"),
        (["traffic", "--loads", "1"], "--loads is 1.0"),
        (["traffic", "--law", "1,2"], "write a,b,d,beta"),
        (["rounds", "--trials", "0"], "--trials is 0"),
        (["rounds", "--json", "/nowhere/at/all.json"], "--json is '/nowhere/at/all.json'"),
    ],
)
def test_what_is_wrong_is_refused_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "game.json"
    file.write_text('{"payoff": []}')
    assert call(*(str(file) if word == "FILE" else word for word in arguments)) == 2
    assert message in capsys.readouterr().err
