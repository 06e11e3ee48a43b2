"""Structured output: masks of the tokens that a grammar (llguidance) allows next."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from pigou.request import Grammar
from pigou.runtime.step_output import GrammarError
from pigou.text.model_files import read_tokenizer
from pigou.text.reasoning import ReasoningEnd

#: Max bytes of cached grammars, as estimated by `_weight`.
CACHE_BYTES = 64 * 2**20
#: JSON without white space between parts, where a model could loop.
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_FLEXIBLE = {"whitespace_flexible": True}
#: Preference of tokens that end JSON soonest outside strings; n begins null.
_CLOSERS = ("]", "}", '"', ",", ":", "n")
#: The same in strings; after the quote, separators of formats such as email.
_STRING_CLOSERS = ('"', "@", ":", ".", "-")
#: Characters that JSON has in strings only.
_IN_STRINGS = ("z", "Z", ";")
_MILLISECOND = 1_000_000
#: Limits per compilation and step. Step fuel is the library's default, which large vocabularies
#: need; `WorkBudget` bounds the total.
LIMITS = LLParserLimits(
    max_items_in_row=2000, step_max_items=50_000, initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000, max_lexer_states=16_384, max_grammar_size=200_000,
    verbose_errors=False,
)  # fmt: skip


class JsonCloser:
    """Narrows JSON masks to the tokens that end it soonest, so that generation terminates."""

    def __init__(self, tokenizer: LLTokenizer, end_tokens: Iterable[int]) -> None:

        def ids(texts: tuple[str, ...]) -> list[int]:
            return [tokenizer.tokenize_str(text)[-1] for text in texts]

        self._stops = sorted(end_tokens)
        self._closers, self._string_closers, self._in_strings = map(
            ids, (_CLOSERS, _STRING_CLOSERS, _IN_STRINGS)
        )
        texts = (tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size))
        self._blank = np.array([text.isspace() for text in texts])

    def narrow(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask of tokens that end the JSON soonest."""
        in_strings = allowed[self._in_strings]
        closers = self._string_closers if in_strings.any() else self._closers
        if in_strings.all():
            closers = closers[:1]
        for tokens in (self._stops, *([token] for token in closers)):
            if allowed[tokens].any():
                narrowed = np.zeros_like(allowed)
                narrowed[tokens] = allowed[tokens]
                return narrowed
        dense = allowed & ~self._blank[: len(allowed)]
        return dense if dense.any() and not in_strings.any() else allowed


class GrammarState:
    """Position of one sequence in its grammar; it only advances."""

    def __init__(
        self, matcher: LLMatcher, vocab: int, budget: WorkBudget | None = None,
        cpu_ns: Callable[[], int] = time.thread_time_ns, closer: JsonCloser | None = None,
        close_after: int = 0, end_tokens: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Start at the beginning; `budget` None is unbounded, `closer` None never narrows."""
        self._matcher = matcher
        self._vocab = vocab
        self._budget = budget
        self._cpu_ns = cpu_ns
        self._debt = Debt()
        self._unpaid_ns = 0
        self._closer = closer
        self._left = close_after
        self._end_tokens = sorted(end_tokens)
        self._reasoning: ReasoningEnd | None = None

    def wait_for(self, reasoning: ReasoningEnd) -> None:
        """Leave tokens free, but for those that end the sequence, until reasoning ends."""
        self._reasoning = reasoning

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask of allowed tokens, (vocab,); raises GrammarError if there are none."""
        if self._reasoning is not None and self._reasoning.open:
            free = np.ones(self._vocab, dtype=np.bool_)
            free[self._end_tokens] = False
            return free
        if self._budget is not None:
            self._budget.check(self._debt)
        began = self._cpu_ns()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        cost_ns = self._cpu_ns() - began + self._unpaid_ns
        self._unpaid_ns = 0
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first_line(self._matcher)}")
        if self._budget is not None:
            self._budget.charge(self._debt, cost_ns)
        flags = np.unpackbits(bits, bitorder="little")[: self._vocab].view(np.bool_)
        if len(flags) < self._vocab:
            missing = np.zeros(self._vocab - len(flags), dtype=np.bool_)
            flags = np.concatenate((flags, missing))
        if not flags.any():
            raise GrammarError("the grammar allows no token that the model has")
        if self._reasoning is not None and self._reasoning.opening:
            flags[list(self._reasoning.opening)] = True
        return flags if self._closer is None or self._left > 0 else self._closer.narrow(flags)

    def advance(self, token: int) -> bool:
        """Consume a token; True if nothing more may follow. Raises GrammarError if not allowed."""
        if self._reasoning is not None and self._reasoning.take(token):
            return False
        began = self._cpu_ns()
        taken = self._matcher.consume_token(token)
        self._unpaid_ns += self._cpu_ns() - began
        self._left -= 1
        if not taken:
            raise GrammarError(
                f"token {token} is against the grammar: {_first_line(self._matcher)}"
            )
        return bool(self._matcher.is_stopped())

    def settle(self) -> None:
        """Reset the CPU time so far, which was not spent in a step."""
        self._unpaid_ns = 0


class Grammars:
    """Compiles grammars for one tokenizer; thread-safe. `budget` bounds their CPU time."""

    def __init__(
        self, tokenizer: str, vocab: int, end_tokens: frozenset[int], *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:  # fmt: skip
        """Load a tokenizer; raises GrammarError without end token or if it is unusable."""
        if not end_tokens:
            raise GrammarError("structured output needs an end token; the model names none")
        try:
            # Masks exclude ids beyond the logits.
            self.tokenizer = _read_tokenizer(tokenizer, vocab, sorted(end_tokens))
        except ValueError as error:
            raise GrammarError(f"the tokenizer cannot be used for grammars: {error}") from None
        self.budget: WorkBudget | None = None
        self.vocab, self.end_tokens, self._cache_bytes = vocab, end_tokens, cache_bytes
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._bytes = 0

    def has(self, grammar: Grammar) -> bool:
        """True if a grammar is cached."""
        with self._lock:
            return grammar in self._compiled

    def start(self, grammar: Grammar, output: Iterable[int] = ()) -> GrammarState:
        """Return a grammar's state after `output`; raises GrammarError if either is invalid."""
        state = GrammarState(
            self._matcher(grammar).deep_copy(), self.vocab, self.budget,
            closer=self._closer if grammar.close_after else None, close_after=grammar.close_after,
            end_tokens=self.end_tokens,
        )  # fmt: skip
        for token in output:
            state.advance(token)
        state.settle()
        return state

    @cached_property
    def _closer(self) -> JsonCloser:
        return JsonCloser(self.tokenizer, self.end_tokens)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self.compile(grammar)
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = matcher
                self._bytes += _weight(grammar)
            while self._bytes > self._cache_bytes and len(self._compiled) > 1:
                dropped, _ = self._compiled.popitem(last=False)
                self._bytes -= _weight(dropped)
        return matcher

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar, bypassing the cache and releasing the GIL; raises GrammarError."""
        matcher = LLMatcher(self.tokenizer, _translate(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind}: {_first_line(matcher)}")
        return matcher


def _read_tokenizer(text: str, vocab: int, end_tokens: list[int]) -> LLTokenizer:
    """Read a tokenizer; twice if it has more ids than the model has logits."""
    try:
        return LLTokenizer(text, n_vocab=vocab, eos_token=end_tokens)
    except ValueError:
        known = LLTokenizer(text).vocab_size
        return LLTokenizer(text, n_vocab=max(vocab, known), eos_token=end_tokens)


def read_grammars(folder: Path, vocab: int, end_tokens: frozenset[int]) -> Grammars:
    """Load grammars for a model folder's tokenizer.json; raises GrammarError if unusable."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise GrammarError(f"structured output needs {path}, which is missing")
    return Grammars(read_tokenizer(folder), vocab, end_tokens)


def _weight(grammar: Grammar) -> int:
    return 2**16 + 64 * len(grammar.source)


def _translate(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return _from_schema(_json(grammar), grammar)
        case "json_object":
            return _from_schema({"type": "object"}, grammar)
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.source))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice(_json(grammar))))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(grammar.source))


def _from_schema(schema: Any, grammar: Grammar) -> str:
    options: Any = _FLEXIBLE if grammar.flexible else _COMPACT
    if grammar.whitespace is not None:
        options = {**_FLEXIBLE, "whitespace_pattern": grammar.whitespace}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options))


def _json(grammar: Grammar) -> object:
    try:
        value: object = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{grammar.kind} is not JSON: {error}") from None
    if grammar.kind == "json_schema" and not isinstance(value, (dict, bool)):
        raise GrammarError("json_schema must be a JSON object")
    return value


def _choice(values: object) -> str:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise GrammarError("choice must be a list of strings, at least one")
    # One terminal compiles to one automaton; alternatives of a rule are tried one by one.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(value) for value in values)


def _first_line(matcher: LLMatcher) -> str:
    message = matcher.get_error().strip()
    return message.splitlines()[0] if message else "it allows nothing more"


@dataclass(slots=True)
class Debt:
    """CPU time of one sequence's grammar."""

    ns: int = 0  # in excess of its share so far
    last_ns: int = 0  # time of the last token, ns


class WorkBudget:
    """Bounds the CPU time of grammars in engine steps; an overdrawing one fails its request.

    Each sequence gets `step_ns` per token and a `burst_ns`; all together get `free_ns` per
    sequence, `shared_step_ns` per step and a `shared_burst_ns`.
    """

    def __init__(
        self, *, step_ns: int = _MILLISECOND, burst_ns: int = 100 * _MILLISECOND,
        free_ns: int = _MILLISECOND // 2, shared_step_ns: int = 2 * _MILLISECOND,
        shared_burst_ns: int = 200 * _MILLISECOND,
    ) -> None:  # fmt: skip
        self._step_ns, self._burst_ns = step_ns, burst_ns
        self._free_ns = free_ns
        self._shared_step_ns, self._shared_burst_ns = shared_step_ns, shared_burst_ns
        self._shared_debt_ns = 0

    def begin_step(self) -> None:
        """Credit one engine step."""
        self._shared_debt_ns = max(0, self._shared_debt_ns - self._shared_step_ns)

    def check(self, debt: Debt) -> None:
        """Raise GrammarError if the shared budget is overdrawn and this sequence is costly."""
        if self._shared_debt_ns > self._shared_burst_ns and debt.last_ns > self._free_ns:
            raise GrammarError(
                "the grammars of this worker's requests take too long together: this one's last "
                f"mask took {debt.last_ns / _MILLISECOND:.1f} ms of CPU time, and "
                f"{self._free_ns / _MILLISECOND:g} ms are free: make it simpler, or try again"
            )

    def charge(self, debt: Debt, cost_ns: int) -> None:
        """Charge a token's CPU time; raises GrammarError if the sequence overdraws a budget."""
        debt.ns = max(0, debt.ns + cost_ns - self._step_ns)
        if debt.ns > self._burst_ns:
            raise GrammarError(
                "the grammar takes too long: its masks took "
                f"{(debt.ns + self._step_ns) / _MILLISECOND:.0f} ms of CPU time more than "
                f"{self._step_ns / _MILLISECOND:g} ms for every token, and at most "
                f"{self._burst_ns / _MILLISECOND:g} ms more are allowed: make it less ambiguous"
            )
        self._shared_debt_ns += max(0, cost_ns - self._free_ns)
        debt.last_ns = cost_ns
        self.check(debt)
