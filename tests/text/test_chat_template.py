"""Chat templates render in a sandbox, and what they refuse is told to the client."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pigou.text.chat_template import ChatError, ChatTemplate
from pigou.text.tokenizer import Tokenizer, TokenizerError


def render(source: str, content: object = "hi", **options: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render([{"role": "user", "content": content}], **options)  # type: ignore[arg-type]


def test_a_model_folder_brings_template_and_tokens(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    template = ChatTemplate(tokenizer.templates["default"], tokenizer.names)
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert tokenizer.encode(text, special=False)[:2] == [0, 2]
    assert tokenizer.eos == {1}
    with pytest.raises(ChatError, match="role is tool"):
        template.render([{"role": "tool", "content": "hi"}])


def test_parts_of_text_are_joined_with_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render("[{{ messages[0].content }}]", None) == "[]"


def test_a_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    assert ChatTemplate(plain, {}).render(messages) == "system:a user:b "
    knows = plain + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTemplate(knows, {}).render(messages) == "developer:a user:b !"
    assert messages[0]["role"] == "developer", "the caller's messages stay as they are"


def test_helpers_of_published_templates_work() -> None:
    assert render("{{ {'a': 'é'} | tojson }}") == '{"a": "é"}'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for m in messages %}{% break %}{% endfor %}y") == "y"
    assert render("{{ flag }}", variables={"flag": "on"}) == "on"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_what_fails_in_the_sandbox_is_an_error_for_the_client(source: str) -> None:
    with pytest.raises(ChatError):
        render(source)


def test_the_final_message_can_be_continued() -> None:
    source = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, "so I ", **options) == "<u>so I "
    trimming = source.replace("m.content", "m.content | trim")
    assert render(trimming, " so I ", **options) == "<u>so I"


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_templates_are_read_from_wherever_they_are_published(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())

    def said(value: object) -> dict[str, str]:
        path.write_text(json.dumps({**settings, "chat_template": value}))
        return Tokenizer.load(folder).templates

    assert said("A") == {"default": "A"}
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert said(named) == {"default": "A", "tool_use": "B"}
    with pytest.raises(TokenizerError, match="chat_template"):
        said(7)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert said(None) == {"default": "J"}
    assert said("A") == {"default": "A"}
    with pytest.raises(TokenizerError, match="without name or template"):
        said([{"name": "default"}])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert said("A") == {"default": "A", "tool_use": "T"}
    assert said(named) == {"default": "A", "tool_use": "T"}
    assert said(None) == {"default": "J", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("F")
    assert said("A") == {"default": "F", "tool_use": "T"}
