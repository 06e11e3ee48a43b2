"""Stop strings: found across tokens, held back until known, the same for any cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.text.stop_strings import StopMatch, Stops

letters = st.text("ab", max_size=3)
streams = st.lists(letters, max_size=14)
strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: Stops, pieces: list[str]) -> tuple[list[str], StopMatch | None]:
    shown = []
    for piece in pieces:
        out = stops.feed(piece)
        if isinstance(out, StopMatch):
            return [*shown, out.text], out
        shown.append(out)
    return [*shown, stops.flush()], None


def reference(
    pieces: list[str], strings: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The whole text after each token, searched from its beginning."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        old, text = len(text), text + piece
        if count <= min_tokens:
            continue
        found = [
            (at, len(stop), stop)
            for stop in strings
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > old
        ]
        if found:
            at, length, stop = min(found)
            return text[: at + length] if include else text[:at], stop
    return text, None


@given(streams, strings, st.booleans(), st.integers(0, 5))
@settings(max_examples=examples(1500))
def test_the_shown_text_ends_at_the_first_stop(
    pieces: list[str], strings: list[str], include: bool, least: int
) -> None:
    shown, match = run(Stops(strings, include, least), pieces)
    text, stop = reference(pieces, strings, include, least)
    assert ("".join(shown), match.stop if match else None) == (text, stop)


@given(streams, strings, st.booleans(), st.integers(0, 5), st.integers(0, 14))
@settings(max_examples=examples(800))
def test_a_stream_continued_elsewhere_shows_what_one_would(
    pieces: list[str], strings: list[str], include: bool, least: int, cut: int
) -> None:
    whole, match = run(Stops(strings, include, least), pieces)
    if match is not None and len(whole) <= cut:
        return
    first, second = Stops(strings, include, least), Stops(strings, include, least)
    shown = [str(first.feed(piece)) for piece in pieces[:cut]]
    for piece in pieces[:cut]:
        second.feed(piece)
    rest, again = run(second, pieces[cut:])
    assert "".join(shown + rest) == "".join(whole)
    assert again == match or (again and match and again.stop == match.stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = Stops(["stop"])
    assert [stops.feed(t) for t in ("a s", "t", "op it")] == ["a ", "", StopMatch("", "stop")]
    stops = Stops(["stop"])
    assert [stops.feed(t) for t in ("a st", "x")] == ["a ", "stx"]
