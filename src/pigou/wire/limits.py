"""Bounds of what one request may hold; more is answered 400, with the field, count and bound."""

from __future__ import annotations

MAX_DEPTH = 128
MAX_FIELDS = 1024
MAX_FIELD_BYTES = 1024 * 1024
MAX_VALUES = 200_000
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_TOKEN_IDS = 2**20
MAX_TOOLS = 1024
#: Tokens that `logit_bias` and `stop_token_ids` name: each costs time at every step.
MAX_BIASED = 4096
MAX_STOP_TOKENS = 1024
