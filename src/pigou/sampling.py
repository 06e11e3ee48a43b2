"""How tokens are chosen: the sampling parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match."""

    kind: GrammarKind  # the language that `source` is written in
    # a JSON schema as text, a regular expression, a Lark grammar, or a JSON list of strings
    # (`choice`); empty for `json_object`.
    source: str = ""
    flexible: bool = False  # JSON may have white space between its parts
    # regular expression of that white space; None for the usual characters.
    whitespace: str | None = None
    # tokens after which JSON ends as soon as its schema allows; 0 for no bound.
    close_after: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, already checked."""

    max_tokens: int  # most tokens to generate, at least 1
    min_tokens: int = 0  # no end or stop token before this many
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability, in (0, 1]
    # keep tokens at least this share as probable as the most probable, in [0, 1].
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from the logit of every token generated before
    frequency_penalty: float = 0.0  # subtracted for every time that the token was generated before
    # divides (or multiplies, when negative) the logits of tokens of the prompt and the output; 1
    # does nothing.
    repetition_penalty: float = 1.0
    # key of the generator, with the position: a sequence continued elsewhere draws the same tokens.
    seed: int = 0
    # how many most probable tokens to report beside the chosen; None for no report.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every token of the prompt
    # end the sequence; the token counts as generated, and its text is not shown.
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # the model's end token does not end the sequence
    # added to the logits of these tokens.
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
