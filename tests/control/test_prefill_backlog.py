"""Laws of the prompts that wait at each worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pigou.control.state import PrefillBacklog

STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=60)


@given(STEPS)
def test_the_first_of_those_there_is_under_way_since_it_became_that(
    steps: list[tuple[int, int, bool]],
) -> None:
    backlog, there = PrefillBacklog(), [dict[str, tuple[int, int]]() for _ in range(3)]
    since = [0, 0, 0]
    for _ in range(3):
        backlog.up()
    for now, (row, key, joins) in enumerate(steps):
        name, mine = str(key), there[row]
        before = next(iter(mine), None)
        if joins:
            mine[name] = (100 + now, now)
            backlog.add(row, name, 100 + now, now, now)
        elif name in mine:
            del mine[name]
            backlog.remove(row, name, now)
        after = next(iter(mine), None)
        if after != before:
            since[row] = now
        for each in range(3):
            first = next(iter(there[each].values()), (0, 0))
            assert (backlog.tokens[each], backlog.pairs[each]) == first
            assert not there[each] or backlog.since[each] == since[each]


def test_the_lines_of_others_stay_when_a_worker_leaves() -> None:
    backlog = PrefillBacklog()
    for row in range(3):
        backlog.up()
        backlog.add(row, "r", 10 + row, row, 7 + row)
    backlog.down(1)
    assert backlog.tokens.tolist() == [10, 12]
    assert backlog.since.tolist() == [7, 9]
    backlog.remove(1, "r", 20)
    assert backlog.tokens.tolist() == [10, 0]
