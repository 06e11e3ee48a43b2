"""Laws of the advice on prefixes: by tenant, bounded, and right on the known answer."""

from __future__ import annotations

from pigou.diagnosis.prefix_lint import PrefixAdvisor

SYSTEM = list(range(1000, 2000))


def test_a_prompt_with_a_stamp_first_is_advised_to_move_it() -> None:
    advisor = PrefixAdvisor()
    assert advisor.advise("anna", [*range(16), *SYSTEM]).startswith("unknown")
    advice = advisor.advise("anna", [*range(50, 66), *SYSTEM])
    assert advice.startswith("move; the prompt diverges at token 0 (block 0), and 1000 tokens")


def test_a_stable_prefix_is_told() -> None:
    advisor = PrefixAdvisor()
    advisor.advise("anna", [*SYSTEM, *range(16)])
    assert advisor.advise("anna", [*SYSTEM, *range(50, 66)]).startswith("stable; the first 1000")


def test_no_tenant_learns_of_another_and_old_ones_are_forgotten() -> None:
    advisor = PrefixAdvisor()
    for number in range(17):
        assert advisor.advise(f"t{number}", SYSTEM).startswith("unknown")
    assert advisor.advise("t0", SYSTEM).startswith("unknown")
    assert advisor.advise("t16", SYSTEM).startswith("stable; the first 1000")
