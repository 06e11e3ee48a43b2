"""Every decoder of the `tokenizers` library gives its text, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.text.detokenizer import Detokenizer
from pigou.text.tokenizer import Tokenizer

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


FUSE, FALLBACK = {"type": "Fuse"}, {"type": "ByteFallback"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
WORDS = {"type": "WordPiece", "prefix": "##", "cleanup": True}
BPE_END = {"type": "BPEDecoder", "suffix": "</w>"}
CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
DECODERS: dict[str, Any] = {
    "none": None,
    "fuse": FUSE,
    "fuse-alone-in-a-sequence": sequence(FUSE),
    "empty-sequence": sequence(),
    "llama": sequence(REPLACE, FALLBACK, FUSE, STRIP),
    "llama-two-spaces": sequence(REPLACE, FALLBACK, FUSE, {**STRIP, "start": 2}),
    "gemma": sequence(REPLACE, FALLBACK, FUSE),
    "metaspace-always": metaspace("always"),
    "metaspace-first": metaspace("first"),
    "metaspace-never": metaspace("never"),
    "metaspace-fallback": sequence(FALLBACK, metaspace("always")),
    "replace-alone": REPLACE,
    "replace-regex": {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": "_"},
    "replace-after-fuse": sequence(FUSE, {**REPLACE, "pattern": {"String": "o"}, "content": "0"}),
    "replace-across-tokens": sequence(
        FUSE, {"type": "Replace", "pattern": {"String": "lo▁"}, "content": "-"}
    ),
    "strip-each": {**STRIP, "content": "▁"},
    "byte-level": BYTES,
    "byte-level-fused": sequence(BYTES, FUSE),
    "byte-level-strip": sequence(BYTES, STRIP),
    "wordpiece": WORDS,
    "wordpiece-raw": {**WORDS, "cleanup": False, "prefix": "▁"},
    "bpe": BPE_END,
    "ctc": CTC,
    "nested": sequence(sequence(REPLACE), sequence(FUSE, STRIP)),
    "wordpiece-replace": sequence(WORDS, {**REPLACE, "pattern": {"String": "h"}}),
}
WORD_LIST = [
    "<unk>", "<s>", "</s>", "<pad>", "▁", "▁Hello", "▁▁", "lo", "##lo", "▁world", "h", "</w>",
    "he</w>", "low</w>", "|", ".", ",", "n't", "'", "Ġthe", "Ċ", "Ã", "©", "é", "ä½", "ł", "a▁b",
    "o", "'s", " ",
]  # fmt: skip
TOKENS = [*WORD_LIST, *(f"<0x{byte:02X}>" for byte in (0x20, 0xE2, 0x82, 0xAC, 0x41, 0xFF))]


def write(folder: Path, decoder: Any) -> Tokenizer:
    """Write a tokenizer whose tokens meet every decoder's rules, and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    added = [
        {"id": i, "content": TOKENS[i], "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i in range(3)
    ]  # fmt: skip
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": [],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("decoders")
    return {name: write(root / name, decoder) for name, decoder in DECODERS.items()}


ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)
EURO = [TOKENS.index(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC)]
#: Bytes that make whole characters; of others the library marks each, we mark them as UTF-8 does.
whole_characters = st.lists(
    st.one_of(
        st.integers(0, len(WORD_LIST) - 1).map(lambda token: [token]),
        st.sampled_from([EURO, [TOKENS.index("<0x20>")], [TOKENS.index("<0x41>")]]),
    ),
    max_size=10,
).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("name", DECODERS)
@given(tokens=whole_characters, skip=st.booleans())
@settings(max_examples=examples(60))
def test_whole_text_is_that_of_the_library(
    loaded: dict[str, Tokenizer], name: str, tokens: list[int], skip: bool
) -> None:
    tokenizer = loaded[name]
    expected = tokenizer.backend.decode(tokens, skip_special_tokens=skip)
    text = tokenizer.decode(tokens, skip)
    assert text == expected


#: It changes text that was shown already.
ACROSS = "replace-across-tokens"


@pytest.mark.parametrize("name", [name for name in DECODERS if name != ACROSS])
@given(tokens=whole_characters, skip=st.booleans(), cuts=st.lists(st.integers(0, 12), max_size=4))
@settings(max_examples=examples(50))
def test_streamed_text_is_the_whole_text(
    loaded: dict[str, Tokenizer], name: str, tokens: list[int], skip: bool, cuts: list[int]
) -> None:
    tokenizer = loaded[name]
    detokenizer = Detokenizer(tokenizer.vocabulary, skip)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    shown = "".join(detokenizer.feed(tokens[a:b]) for a, b in pairwise(edges))
    assert shown + detokenizer.flush() == tokenizer.decode(tokens, skip)


SENTENCEPIECE = ("llama", "gemma", "metaspace-always", "metaspace-first", "metaspace-never")


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(prompt=ids, output=ids)
@settings(max_examples=examples(50))
def test_output_goes_on_where_the_prompt_ends(
    loaded: dict[str, Tokenizer], name: str, prompt: list[int], output: list[int]
) -> None:
    tokenizer = loaded[name]
    first = [TOKENS.index("h")]
    prompt = first + [t for t in prompt if not TOKENS[t].startswith("<0x")]
    text = tokenizer.decode(prompt)
    more = Detokenizer(tokenizer.vocabulary, begins=False)
    assert text + more.feed(output) + more.flush() == tokenizer.decode([*prompt, *output])


@pytest.mark.parametrize("name", [*SENTENCEPIECE, "wordpiece", "none", "fuse", "byte-level", "bpe"])
def test_text_is_that_of_transformers(loaded: dict[str, Tokenizer], name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = loaded[name]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", eos_token="</s>"
    )
    for words in (
        ["▁Hello", "▁world"],
        ["<s>", "▁Hello", "lo", "</s>"],
        ["▁", "▁Hello"],
        ["he</w>"],
    ):
        tokens = [TOKENS.index(word) for word in words]
        for skip in (False, True):
            expected = theirs.decode(tokens, skip_special_tokens=skip)
            assert tokenizer.decode(tokens, skip) == expected


def test_one_leading_space_is_dropped_where_a_text_begins_and_kept_where_it_goes_on(
    loaded: dict[str, Tokenizer],
) -> None:
    tokenizer = loaded["llama"]
    hello, world = TOKENS.index("▁Hello"), TOKENS.index("▁world")
    assert tokenizer.decode([hello, world]) == "Hello world"
    assert tokenizer.decode([1, hello], skip_special=False) == "<s> Hello"
    assert Detokenizer(tokenizer.vocabulary, begins=False).feed([hello]) == " Hello"


@pytest.mark.parametrize("name", DECODERS)
def test_every_token_has_a_name_and_the_longest_is_known(
    loaded: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = loaded[name]
    assert tokenizer.vocabulary.max_token_bytes >= len("▁Hello") - 2
    assert all(isinstance(tokenizer.name(i), str) for i in range(len(TOKENS) + 2))
