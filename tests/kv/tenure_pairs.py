"""Random and adversarial pairs of tenures, with an equality of their own to judge digests by."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from typing import Any

from pigou.kv.tenure import Purpose, Tenure
from pigou.request import NEVER

TEXTS = ("tenant", "cache_salt", "model", "principal", "release", "template", "corpus", "safety")
SETS = ("permissions", "tools")
PURPOSES = list(Purpose)
#: Values that separators, numbers, encodings and normal forms could confuse.
WORDS = (
    "", "", "a", "b", "ab", "A", "a ", " a", "a\0", "\0", "\0a", "\n", ",", "a,b", ":", ";", "|",
    "a:b", "[]", "['a']", "None", "null", "0", "00", "1", "01", "+1", "1.0", "1e0", "-1",
    str(NEVER), "True", "tenant", "tenant\0a", "principal", "t", "n", "s", "1:a", "2;1:a1:b",
    "\0\0\0\0\0\0\0\x01a", "\u00e9", "e\u0301", "\u212b", "\u00c5", "A\u030a", "\ufb01", "fi",
    "\u0130", "i\u0307", "\u00df", "ss", "\u212a", "K", "k", "\ud800", "\udc80", "\ufeff", "\u200b",
    "\u00a0", "\u3000", "\U0001f600", "x" * 255, "x" * 256, "tenure1:" + "0" * 64, "prefix",
    "answer", "acme", "acme.s", "user:1", "user:10",
)  # fmt: skip
EXPIRIES = (NEVER, NEVER, NEVER - 1, 0, 1, 2, 10, 11, 2**32, 2**62)

Fields = dict[str, Any]
_ASIDE = "abAB01:, \0\u0301"


def word(at: random.Random) -> str:
    if at.random() < 0.7:
        return at.choice(WORDS)
    return "".join(at.choice(_ASIDE) for _ in range(at.randrange(5)))


def words(at: random.Random) -> frozenset[str]:
    return frozenset(word(at) for _ in range(at.choice((0, 0, 1, 2, 3))))


def some(at: random.Random) -> Fields:
    """Return fields of a tenure; about half of them empty."""
    fields: Fields = {name: word(at) if at.random() < 0.5 else "" for name in TEXTS}
    fields |= {name: words(at) for name in SETS}
    return fields | {"expiry": at.choice(EXPIRIES), "purpose": at.choice(PURPOSES)}


def other(at: random.Random, fields: Fields) -> Fields:  # noqa: PLR0912 (one for each trick)
    """Return fields that are those, made anew, or look much like them."""
    new = dict(fields)
    one, two = at.sample(TEXTS, 2)
    match at.randrange(14):
        case 0 | 1:  # equal, sets in another order
            for name in SETS:
                items = list(fields[name])
                at.shuffle(items)
                new[name] = frozenset(items)
        case 2:
            return some(at)
        case 3:
            new[one] = word(at)
        case 4:  # swapped
            new[one], new[two] = fields[two], fields[one]
        case 5:  # a border moves
            both = fields[one] + fields[two]
            cut = at.randint(0, len(both))
            new[one], new[two] = both[:cut], both[cut:]
        case 6:  # a value moves to another field
            new[one], new[two] = "", fields[one]
        case 7:  # a set's items are joined, or one is split
            items = sorted(fields["permissions"])
            joint = at.choice((",", "", "\0", " "))
            split = [part for item in items for part in (item.split(joint) if joint else item)]
            new["permissions"] = frozenset([joint.join(items)] if at.random() < 0.5 else split)
        case 8:  # a set becomes the other, or loses or gains the empty item
            if at.random() < 0.5:
                new["permissions"], new["tools"] = fields["tools"], fields["permissions"]
            else:
                new["tools"] = fields["tools"] ^ {""}
        case 9:
            found = [(name, as_) for name in TEXTS for as_ in sorted(disguises(fields[name]))]
            new |= [at.choice(found)] if found else []
        case 10:  # numbers as text
            new[one], new["expiry"] = str(fields["expiry"]), NEVER
        case 11:
            new["expiry"] = max(0, fields["expiry"] + at.choice((-1, 1)))
        case 12:
            new["purpose"] = at.choice(PURPOSES)
        case _:  # a text that is the encoding of others, or longer by a bit of one
            forged = Tenure(**fields).encode().decode("latin-1")
            new[one] = forged if at.random() < 0.3 else fields[one] + forged[: at.randrange(9)]
    return new


def disguises(text: str) -> set[str]:
    """Return a text in other normal forms, cases and encodings."""
    return {
        unicodedata.normalize("NFC", text),
        unicodedata.normalize("NFD", text),
        unicodedata.normalize("NFKC", text),
        text.lower(),
        text.upper(),
        text.casefold(),
        text.strip(),
        text.encode("utf-8", "replace").decode(),
        text.encode("utf-8", "ignore").decode(),
        text.encode("utf-8", "surrogatepass").decode("latin-1"),
    } - {text}


def pairs(seed: int, count: int) -> Iterator[tuple[Fields, Fields]]:
    at = random.Random(seed)
    for _ in range(count):
        fields = some(at)
        yield fields, other(at, fields)


def canonical(fields: Fields) -> tuple[Any, ...]:
    """Return a value that is equal exactly where all fields are, whatever `Tenure` thinks."""
    return tuple((name, type(fields[name]), fields[name]) for name in sorted(fields))
