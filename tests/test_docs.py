"""What the pages of docs/ point to exists, and so does every page that the project points to."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]
FOLDERS = {"guide", "reference", "internals", "results", "notes", "images"}
#: Pages that a tool writes; a test of each compares it with what the tool says now.
GENERATED = {"docs/reference/cli.md", "docs/guide/playbooks.md"}
PAGE = re.compile(r"(?<![\w/.-])docs/(?:[\w-]+/)*[\w.-]+\.(?:md|svg|png)\b")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    slugs: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return frozenset(slugs)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield path and anchor of each relative link of a page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: no {path}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: no #{anchor} in {name(target)}"


def test_every_page_that_the_project_names_exists() -> None:
    """CHANGELOG.md names pages as they were called when a version came out."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    named = 0
    for file in tracked:
        path = ROOT / file
        if file == "CHANGELOG.md" or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for page in PAGE.findall(text):
            assert (ROOT / page).exists(), f"{file} names {page}"
            named += 1
    assert named > 10


def test_no_page_or_message_installs_pigou_from_a_registry_that_does_not_have_it() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    files += [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    install = re.compile(r"""(pip|uv|pipx) (install|add) (-\S+ )*['"]?pigou\b""")
    wrong = [str(path.relative_to(ROOT)) for path in files if install.search(path.read_text())]
    assert not wrong, f"write pip install '.[EXTRA]': {wrong}"


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / path).resolve() for path, _ in links(index) if path}
    missing = [name(page) for page in DOCS.rglob("*.md") if page not in linked | {index}]
    assert not missing


def test_pages_lie_in_the_folders_that_the_index_names() -> None:
    assert {path.name for path in DOCS.iterdir() if path.is_dir()} <= FOLDERS
    assert {path.name for path in DOCS.glob("*.md")} == {"README.md", "glossary.md"}


def test_the_glossary_has_one_line_a_term() -> None:
    terms = re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", (DOCS / "glossary.md").read_text(), re.M)
    terms = [term for term in terms if term != "term"]
    assert len(terms) == len(set(terms))
    assert 40 <= len(terms) <= 80


def test_the_twenty_concepts_are_where_the_architecture_says() -> None:
    page = (DOCS / "internals" / "architecture.md").read_text()
    section = page.partition("## Where twenty concepts are")[2]
    rows = re.findall(r"^\| ([^|]+?) \| `((?:lab/)?src/[^`]+)` \|$", section, re.M)
    assert len(rows) == 20
    missing = [f"{concept}: {path}" for concept, path in rows if not (ROOT / path).exists()]
    assert not missing


def test_the_docs_without_notes_and_generated_pages_have_a_limited_number_of_words() -> None:
    pages = [page for page in DOCS.rglob("*.md") if "notes" not in page.parts]
    written = [page for page in pages if name(page) not in GENERATED]
    assert sum(len(page.read_text().split()) for page in written) <= 55_810  # 4,300 of tenants
