"""How tokens are chosen: the sampling parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match.

    Attributes:
        kind: the language that `source` is written in.
        source: a JSON schema as text, a regular expression, a Lark grammar, or a JSON list of
            strings (`choice`); empty for `json_object`.
        flexible: JSON may have white space between its parts.
        whitespace: regular expression of that white space; None for the usual characters.
        close_after: tokens after which JSON ends as soon as its schema allows; 0 for no bound.
    """

    kind: GrammarKind
    source: str = ""
    flexible: bool = False
    whitespace: str | None = None
    close_after: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, already checked.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: no end or stop token before this many.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        min_p: keep tokens at least this share as probable as the most probable, in [0, 1].
        presence_penalty: subtracted once from the logit of every token generated before.
        frequency_penalty: subtracted for every time that the token was generated before.
        repetition_penalty: divides (or multiplies, when negative) the logits of tokens of the
            prompt and the output; 1 does nothing.
        seed: of the generator, which is keyed by (seed, position), so that a sequence continued
            elsewhere draws the same tokens.
        logprobs: how many most probable tokens to report beside the chosen; None for no report.
        prompt_logprobs: the same for every token of the prompt.
        stop_token_ids: end the sequence; the token counts as generated, and its text is not shown.
        ignore_eos: the model's end token does not end the sequence.
        logit_bias: added to the logits of these tokens.
        grammar: what the output must match.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
