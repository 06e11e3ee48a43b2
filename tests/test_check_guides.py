"""What `tools.check_guides` runs and compares: commands of pages, and what pages show of them."""

from __future__ import annotations

import re

import pytest

from tools.check_guides import PAGES, SKIPS, Command, commands, differences, skip_reason

PAGE = """
```sh
pigou serve --policy toll   # a comment
pigou bench URL \\
  --rate 5
curl URL -d '{
  "a": 1}'
```
```
$ pigou simulate --workload x
95.0% inside, 3 failed
...
took 2 workers
```
```python
pigou = 1
```
"""


def test_all_commands_of_a_page_are_read_with_what_it_shows() -> None:
    assert list(commands(PAGE)) == [
        Command("pigou serve --policy toll"),
        Command("pigou bench URL --rate 5"),
        Command("curl URL -d '{\n  \"a\": 1}'"),
        Command("pigou simulate --workload x",
                ("95.0% inside, 3 failed", "...", "took 2 workers")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("output", "same"),
    [
        ("| 95.0% inside, |\n| 3 failed |\nmore\ntook 2\nworkers", True),
        ("95.1% inside, 3 failed\ntook 2 workers", False),
        ("95.0% inside, 3 failed", False),
    ],
)
def test_figures_that_follow_from_options_must_be_equal_however_lines_wrap(
    output: str, same: bool
) -> None:
    *_, command = commands(PAGE)
    assert (not list(differences(command, output))) == same


def test_a_live_fleets_figures_may_differ_and_its_words_and_keys_may_not() -> None:
    live = Command("pigou replay x", ("The same decisions: 254 of 254, in 0.2 s",))
    assert not list(differences(live, "The same decisions: 9 of 9, in 1.9 s"))
    assert list(differences(live, "Other decisions: 9 of 9"))
    document = Command("curl URL", ('{"usd": 0.1, ...', ' "gpu_s": 2}'))
    assert not list(differences(document, '{"usd":3,"gpu_s":4}'))
    assert list(differences(document, '{"usd":3}'))


def test_every_page_has_readable_commands_and_every_skip_skips_something() -> None:
    texts = [command.text for page in PAGES for command in commands(page.read_text())]
    assert len(texts) > 60
    assert sum(not skip_reason(text) for text in texts) > len(texts) / 2
    assert not [pattern for pattern in SKIPS if not any(re.search(pattern, t) for t in texts)]
