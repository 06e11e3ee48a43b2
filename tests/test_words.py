"""The project speaks the field's language: words that its identifiers do not use.

docs/glossary.md has the words that they use instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from tests.lib.source_tree import ROOT, SRC, modules, name, parsed

#: No identifier has one of these as a part (`seat_count`, `LongestSeat`).
_PARTS = """
    alike among appraise assessment attend audit awake beside beyond came coming desk dialect
    foresight found handed harvest harvested landed lately least lend lender lenders lent most
    mould moulds mover outlet pilot rehearsal rehearse rerun rested revive scene seat seated seats
    settlement slowness speller splice tally tiering told transcript twin twins unread usual vacate
    withdraw
"""
PARTS = frozenset(_PARTS.split())
#: No identifier is one of these.
_WHOLE = """
    alone asked behind each earlier ends facts grant gains here hold joined kept later leading
    longest losses nearest offered place plain reach seal shelf stated team there waited waits
    weigh which whose worth
"""
WHOLE = frozenset(_WHOLE.split())
#: Names of the field, and names of options and keys of files that users hold on to.
ALLOWED = frozenset({"least_loaded", "LeastLoaded"})
KEYS = frozenset(
    {
        ("config.py", "least"), ("control/saturation/cusum_detector.py", "least_scale"),
        ("request.py", "hold"),
        ("sim/network.py", "ends"), ("sim/timing_measured.py", "alone"),
        ("worker/config.py", "rehearse"), ("workload/workload_spec.py", "hold"),
    }
)  # fmt: skip


ROOMS = ("src", "lab/src", "benchmarks", "tools")
#: First words of a comment that leave out what it speaks of: `# of the last token`.
_HEADLESS = re.compile(r"(?:^\s*|\S  )#:? (of|that|its|whose|which)\b", re.I)
#: The same in place of the field's noun: `# what a running stream lost to it`.
_INDIRECT = re.compile(
    r"(?:#:|\S  #) (what|who|whom|(?:by|in|to|for|from|with) wh(?:ich|om))\b", re.I
)


def headless(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield comments that begin with a genitive or a relative clause; later lines may."""
    before = ""
    for number, line in enumerate(lines, 1):
        match = _HEADLESS.search(line) or _INDIRECT.search(line)
        if match is not None and not (line.lstrip().startswith("#") and before.startswith("#")):
            yield number, line[match.start() :].strip()
        before = line.lstrip()


def parts(identifier: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def forbidden(identifier: str) -> bool:
    if identifier in ALLOWED:
        return False
    return identifier.strip("_").lower() in WHOLE or not PARTS.isdisjoint(parts(identifier))


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines or assigns, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno


def test_identifiers_are_words_of_the_field() -> None:
    bad = [
        f"{name(path)}:{line} {word}"
        for path in modules()
        for word, line in ((path.stem, 1), *identifiers(parsed(path)))
        if forbidden(word) and (name(path), word) not in KEYS
    ]
    assert not bad, "see docs/glossary.md for the word"


def test_every_exempted_key_is_still_there() -> None:
    for file, key in KEYS:
        assert key in {word for word, _ in identifiers(parsed(SRC / file))}


@pytest.mark.parametrize(
    ("identifier", "is_forbidden"),
    [
        ("found", True), ("_Seats", True), ("MOST_TENANTS", True), ("longest", True),
        ("longest_prefix", False), ("least_loaded", False), ("max_tenants", False),
        ("foundation", False), ("placement", False),
    ],
)  # fmt: skip
def test_a_word_is_found_as_a_part_and_never_inside_another(
    identifier: str, is_forbidden: bool
) -> None:
    assert forbidden(identifier) == is_forbidden


def test_a_comment_names_what_it_speaks_of() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{number} {comment}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, comment in headless(path.read_text().splitlines())
    ]
    assert not bad, "begin with a noun: `last_ns: int  # time of the last token, ns`"


def test_an_option_says_on_its_own_what_it_sets() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    bad = re.findall(r"^\| .* \| ((?:As of|Of|That|Its|Whose|Which|Those) .*) \|$", page, re.M)
    assert not bad, "begin with a noun or a verb: `Seed of arrivals.`"


def test_a_parameter_is_named_not_called_so_many() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for room in (*ROOMS, "docs")
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "so many" in line.lower()
    ]
    assert not bad, 'name the parameter: "Return slots for `rows` rows"'


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["last_ns: int = 0  # of the last token"], 1), (["#: Of a closed loop.", "USERS = 1"], 1),
        (["    # whose links are shared.", "    ends: str"], 1), (["key: str  # its hash"], 1),
        (["counted: str  # what told the count"], 1), (["    # What follows is read twice."], 0),
        (["last_ns: int = 0  # time of the last token, ns"], 0), (["# offset of a row"], 0),
        (["    # blocks to copy, in order, with those", "    # that are deleted"], 0),
    ],
)  # fmt: skip
def test_a_headless_comment_is_found(lines: list[str], found: int) -> None:
    assert len(list(headless(lines))) == found
