"""Programs of llama-index as its documentation has them. Arguments: URL of a gateway, model."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Market(BaseModel):
    """A market."""

    open: bool


llm = OpenAILike(model=sys.argv[2], api_base=sys.argv[1] + "/v1", api_key="any", max_tokens=12,
                 temperature=0, is_chat_model=True, is_function_calling_model=True, max_retries=0,
                 context_window=1024, should_use_structured_outputs=True)  # fmt: skip
asked = [ChatMessage(role="user", content="Where is the market?")]
whole = llm.chat(asked)
assert whole.message.content
assert "".join(part.delta or "" for part in llm.stream_chat(asked)) == whole.message.content
assert llm.complete("Where is the market?").text
llm.max_tokens = 96
assert isinstance(llm.as_structured_llm(Market).chat(asked).raw, Market)
