"""Laws of the attack suite."""

from __future__ import annotations

from random import Random

import pytest

from pigou_lab.experiments import tenants
from pigou_lab.experiments.tenants import ATTACKER, ATTACKS, figures_of, jobs, meets, price


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "HOLD_S", 3.0)
    tenants._FIGURES.clear()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_offers_at_most_the_work_of_honest_play_and_one_request_more(name: str) -> None:
    honest = jobs(ATTACKER, tenants._JOBS, 0.5, 1)
    lie = {key: values[-1] for key, values in ATTACKS[name].grid.items()}
    play = ATTACKS[name].play(honest, lie, Random(1))

    def uncached(spec: tenants.RequestSpec) -> float:
        own = len(spec.block_ids) == 2
        return price(tenants.OWN if own else spec.prompt_tokens, spec.output_tokens)

    work = [sum(map(uncached, one.requests)) for one in play.sessions]
    assert sum(work) <= 1.35 * sum(uncached(one.requests[0]) for one in honest) + max(work)


def test_fcfs_rewards_no_over_claim_and_a_claimed_priority_jumps_the_queue() -> None:
    lie = (("deadline_s", 0.05), ("priority", 10.0))
    honest = figures_of("priority-fair", "", (), 1)
    assert figures_of("priority-fair", "urgent", lie, 1).tokens >= honest.tokens
    assert figures_of("fcfs", "urgent", lie, 1) == figures_of("fcfs", "", (), 1)
    assert figures_of("fcfs", "over-claim", (("times", 2.0),), 1).tokens == pytest.approx(
        figures_of("fcfs", "", (), 1).tokens, rel=0.1
    )


def test_probes_tell_a_victims_prompt_in_one_tenure_and_not_across(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants, "_PROBES", 10)
    accuracy = {row["order"]: row["accuracy"] for row in tenants._side_channel([1])}
    assert accuracy["one tenure"] > 0.8
    assert accuracy["tenure of each tenant"] < 0.8


def test_a_storm_that_ignores_retry_after_sends_more_attempts() -> None:
    play = ATTACKS["retry-storm"].play(
        jobs(ATTACKER, tenants._JOBS, 2.0, 1), {"timeout_s": 0.05, "heeds": 0}, Random(1)
    )
    runs = tenants.simulation("fair", play, 1).run().runs
    own = [run.attempts for run in runs if run.spec.tenant == ATTACKER]
    others = [run.attempts for run in runs if run.spec.tenant != ATTACKER]
    assert max(own) > 1
    assert set(others) == {1}


def test_an_order_meets_the_target_only_with_all_three_figures() -> None:
    row = {"victim_ratio": 1.1, "gain": 1.05, "credit_term": 0.1, "throughput_ratio": 0.99}
    assert meets(row)
    for change in ({"victim_ratio": 1.3}, {"gain": 1.2}, {"throughput_ratio": 0.9}):
        assert not meets(row | change)


@pytest.mark.slow
def test_a_planner_that_knows_tenants_starts_fewer_workers_for_junk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants, "_PLANNED_S", (0.0, 30.0))
    monkeypatch.setattr(tenants, "_JUNK_S", (2.0, 30.0))
    known, unknown = (tenants._planned(who, 2.0, [1]) for who in ("pooled names", "no tenants"))
    assert known["workers"] < unknown["workers"]
    assert known["victim_ttft_p99_s"] < unknown["victim_ttft_p99_s"]


def test_made_up_names_gain_nothing_where_they_share_one_weight() -> None:
    lie, honest = (("keys", 8.0),), figures_of("fair", "", (), 1)
    pooled = figures_of("fair", "sybil-pooled", lie, 1)
    assert pooled.ttfts == honest.ttfts
    assert pooled.tokens == honest.tokens


def test_a_run_that_claims_nothing_is_made_once_for_orders_of_claims() -> None:
    found = tenants.figures_of_all([("fair", "", (), 1), ("priority-fair", "", (), 1)])
    assert found[0] is found[1]
    assert tenants._run_of(("edf", "urgent", (), 1))[0] == "edf"


def test_a_floor_keeps_a_flooded_victims_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "HOLD_S", 8.0)
    hits = {row["order"]: row["hit_ratio"] for row in tenants._quotas([1])}
    assert hits["flood"] < hits["no flood"] - 0.1
    assert hits["floor and ceiling"] == pytest.approx(hits["no flood"], abs=0.02)
