"""Reads a page as a browser would, as far as tests need it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Read(HTMLParser):
    """What a page has.

    Attributes:
        ids: of its elements.
        fetched: addresses that its elements would load.
        tables: rows by the table's id; a cell is (text, exact value or None).
        figures: as they are drawn, by id.
        text: of its body.
        policy: content of its Content-Security-Policy.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.figures: dict[str, Any] = {}
        self.text, self.policy = "", ""
        self._table, self._inside, self._script = "", "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        for name in ("src", "href", "data", "srcset", "poster"):
            address = given.get(name)
            if address and not address.startswith(("#", "data:")):
                self.fetched.append(address)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])
        if tag == "table":
            self._table = str(given["id"])
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append(("", given.get("data-value")))
            self._inside = tag
        elif tag in ("script", "style"):
            self._script = str(given.get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = ""
        elif tag in ("script", "style"):
            self._script = ""

    def handle_data(self, data: str) -> None:
        if self._script:
            if self._script == "data":
                self.figures = {each["id"]: each for each in json.loads(data)["figures"]}
            elif self._script == "style":
                self.fetched += ["@import"] * data.count("@import") + ["url("] * data.count("url(")
            return
        self.text += data
        if self._inside:
            text, value = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = (text + data, value)

    def exact(self, table: str) -> dict[str, list[float | None]]:
        """Return the exact figures of a table by the text of a row's first cell."""
        return {
            row[0][0]: [None if value is None else float(value) for _, value in row[1:]]
            for row in self.tables[table][1:]
        }
