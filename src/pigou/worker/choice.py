"""One choice of a reply: from tokens to text, stop reasons and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from pigou.runtime.outputs import TokenLogprobs as Report
from pigou.sampling import SamplingParams
from pigou.text.detokenizer import Detokenizer
from pigou.text.stops import Match, Stops
from pigou.text.tokenizer import Tokenizer
from pigou.wire.openai_replies import Logprob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text.

    Attributes:
        stops: stop strings.
        include_stop: what stops the text is shown.
        skip_special: control tokens are not shown.
        shown: control tokens that are shown all the same.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    shown: frozenset[int] = frozenset()


class Choice:
    """Turns the tokens of one sequence into text, and knows when it has ended.

    Attributes:
        tokens: token ids taken, without resumed ones.
        count: tokens generated, resumed ones included.
        finish: why it ended; None before.
        stop: the stop string or stop token that ended it, if one did.
        replayed: text of the resumed tokens.
    """

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_eos",
        "_least",
        "_most",
        "_options",
        "_stops",
        "_tokenizer",
        "count",
        "finish",
        "replayed",
        "stop",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        params: SamplingParams,
        options: TextOptions,
        resumed: list[int],
    ) -> None:
        """Begin after `resumed`, tokens whose text was sent before.

        Args:
            tokenizer: of the model.
            eos: the model's end tokens.
            params: of the sequence; `max_tokens` counts the resumed ones.
            options: how tokens become text.
            resumed: token ids generated elsewhere.
        """
        self._tokenizer = tokenizer
        self._eos = frozenset[int]() if params.ignore_eos else eos
        self._ends = self._eos | params.stop_token_ids
        self._least, self._most = params.min_tokens, params.max_tokens
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer.vocabulary, options.skip_special, shown=options.shown, begins=False
        )
        self._stops = None
        if options.stops:
            self._stops = Stops(options.stops, options.include_stop, params.min_tokens)
        self.tokens: list[int] = []
        self.count = 0
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.replayed = "".join([self.take(token) for token in resumed])
        self.tokens.clear()

    def take(self, token: int) -> str:
        """Take the next token; return the text to show, and note the end if it is one."""
        self.tokens.append(token)
        self.count += 1
        if token in self._ends and self.count > self._least:
            self.stop = None if token in self._eos else token
            text = self._detokenizer.next(token) if self._options.include_stop else ""
            return text + self.end("stop")
        text = self._detokenizer.next(token)
        if self._stops is not None:
            found = self._stops.feed(text)
            if isinstance(found, Match):
                self.finish, self.stop = "stop", found.stop
                return found.text
            text = found
        return text + self.end("length") if self.count >= self._most else text

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended it, of which the engine knows nothing."""
        return isinstance(self.stop, str)

    def end(self, reason: str) -> str:
        """End the choice; return the text that was held back."""
        self.finish = reason
        held = self._stops.flush() if self._stops is not None else ""
        return held + self._detokenizer.flush()


class Explainer:
    """Puts an executor's reports of log-probabilities into words.

    A token's text is what it adds to the text before it: "" within a character.

    Attributes:
        length: characters of the tokens that it began after.
    """

    __slots__ = ("_detokenizer", "_tokenizer", "length")

    def __init__(self, tokenizer: Tokenizer, resumed: list[int], *, begins: bool = False) -> None:
        """Begin after `resumed`, or after a prompt; `begins`: with the prompt."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.vocabulary, skip_special=False, begins=begins)
        self.length = len(self._detokenizer.feed(resumed))

    def fresh(self) -> Explainer:
        """Return one that begins at no text."""
        return Explainer(self._tokenizer, [], begins=True)

    def explain(self, report: Report) -> TokenLogprobs:
        """Explain the next token."""
        text = self._detokenizer.next(report.token)
        chosen = Logprob(report.token, text, report.logprob, report.rank, list(text.encode()))
        pairs = zip(report.top.tolist(), report.logprobs.tolist(), strict=True)
        top = [
            chosen if token == report.token else self._other(token, logprob, rank)
            for rank, (token, logprob) in enumerate(pairs, 1)
        ]
        return TokenLogprobs(chosen, top, text)

    def bare(self, token: int) -> TokenLogprobs:
        """Take the next token, of which nothing is known."""
        return TokenLogprobs(None, [], self._detokenizer.next(token))

    def _other(self, token: int, logprob: float, rank: int) -> Logprob:
        data = self._tokenizer.vocabulary.bytes_of(token)
        return Logprob(token, self._tokenizer.name(token), logprob, rank, list(data))
