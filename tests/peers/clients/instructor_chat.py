"""Programs of instructor as its documentation has them. Arguments: URL of a gateway, model."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

plain = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
MESSAGES = [{"role": "user", "content": "Where is the market?"}]


class Market(BaseModel):
    """A market."""

    open: bool
    town: Literal["Oslo", "Rome"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(
        model=sys.argv[2], messages=MESSAGES, response_model=Market, max_tokens=96, max_retries=0
    )
    assert found.town in ("Oslo", "Rome"), mode
client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
partial = client.chat.completions.create_partial(
    model=sys.argv[2], messages=MESSAGES, response_model=Market, max_tokens=96, max_retries=0
)
assert list(partial)[-1].town in ("Oslo", "Rome")
