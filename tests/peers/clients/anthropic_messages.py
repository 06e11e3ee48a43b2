"""Programs of the anthropic package, passed on to a server that has /v1/messages."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0)
ASKED = {"model": sys.argv[2], "max_tokens": 12,
         "messages": [{"role": "user", "content": "Where is the market?"}]}  # fmt: skip


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if sys.argv[3] == "passed":
    whole = client.messages.create(**ASKED)
    assert whole.content[0].text == "by the river"
    assert whole.usage.output_tokens == 3
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "by the river"
else:
    told = refusal(lambda: client.messages.create(**ASKED), anthropic.APIStatusError)
    assert told.status_code == 404
    assert "--attach" in str(told)
