"""Options that name something and give it parameters."""

from __future__ import annotations

import pytest

from pigou.cli.named import named
from pigou.config import ConfigError


def test_numbers_are_numbers_and_words_are_words() -> None:
    name, values = named("--policy", "llm-d,a=1,b=0.5,c=word,d.e=2,d.f=true")
    assert name == "llm-d"
    assert values == {"a": 1, "b": 0.5, "c": "word", "d": {"e": 2, "f": True}}
    assert named("--policy", "toll") == ("toll", {})


@pytest.mark.parametrize(
    "text", ["", ",a=1", "x,a", "x,=1", "x,a=1,a.b=2", "x,a.b=2,a=1", "x,a=1,a=2"]
)
def test_what_is_not_understood_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--policy"):
        named("--policy", text)
