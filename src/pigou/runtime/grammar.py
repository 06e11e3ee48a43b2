"""Structured output: which tokens a grammar allows next. The grammars are llguidance's."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pigou.runtime.errors import GrammarError
from pigou.sampling import Grammar


class GrammarState:
    """Where one sequence stands in its grammar. It only ever moves forward."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        """Start at the beginning.

        Args:
            matcher: fresh.
            vocab: logits of the model, at least the tokenizer's tokens.
        """
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, shape (vocab,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        flags = np.unpackbits(bits, bitorder="little")[: self._vocab].view(np.bool_)
        if len(flags) == self._vocab:
            return flags
        return np.concatenate((flags, np.zeros(self._vocab - len(flags), dtype=np.bool_)))

    def advance(self, token: int) -> bool:
        """Move past a token; return whether the grammar allows nothing more.

        Raises:
            GrammarError: the grammar does not allow this token.
        """
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} is against the grammar: {self._matcher.get_error()}")
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: str, vocab: int, ends: frozenset[int]) -> None:
        """Read a tokenizer.

        Args:
            tokenizer: text of a Hugging Face tokenizer.json.
            vocab: logits of the model.
            ends: the model's end tokens; one at least is needed to end an output.

        Raises:
            GrammarError: there is no end token, or the tokenizer cannot be used.
        """
        if not ends:
            raise GrammarError("structured output needs an end token; the model names none")
        try:
            # Ids beyond the logits are cut from the masks: no logit says how likely they are.
            known = LLTokenizer(tokenizer).vocab_size
            self._tokenizer = LLTokenizer(
                tokenizer, n_vocab=max(vocab, known), eos_token=sorted(ends)
            )
        except ValueError as error:
            raise GrammarError(f"the tokenizer cannot be used for grammars: {error}") from None
        self._vocab = vocab
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def start(self, grammar: Grammar) -> GrammarState:
        """Compile a grammar, or take the compiled one, and stand at its beginning.

        Raises:
            GrammarError: the grammar is faulty; says how.
        """
        return GrammarState(self._compiled(grammar).deep_copy(), self._vocab)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = _translate(grammar)
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, self._tokenizer)
        if failed:
            raise GrammarError(f"{grammar.kind}: {_first_line(messages)}")
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind}: {_first_line([matcher.get_error()])}")
        return matcher


def read_grammars(folder: Path, vocab: int, ends: frozenset[int]) -> Grammars:
    """Make grammars for the tokenizer.json of a model's folder.

    Raises:
        GrammarError: there is none, or it cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise GrammarError(f"structured output needs {path}, which is missing")
    return Grammars(path.read_text(encoding="utf-8"), vocab, ends)


def _translate(grammar: Grammar) -> str:
    """Put a grammar into llguidance's own terms."""
    match grammar.kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(_json(grammar))))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice(_json(grammar))))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(grammar.source))


def _json(grammar: Grammar) -> object:
    try:
        value: object = json.loads(grammar.source)
    except ValueError as error:
        raise GrammarError(f"{grammar.kind} is not JSON: {error}") from None
    if grammar.kind == "json_schema" and not isinstance(value, (dict, bool)):
        raise GrammarError("json_schema must be a JSON object")
    return value


def _choice(values: object) -> str:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise GrammarError("choice must be a list of strings, at least one")
    return "start: " + " | ".join(json.dumps(value) for value in values)


def _first_line(messages: list[str]) -> str:
    return messages[0].strip().splitlines()[0] if messages and messages[0].strip() else "not valid"
