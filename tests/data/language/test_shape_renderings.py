"""Renderings put together from shapes are those of the template itself, whatever template and conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.language import shape_renderings, template_renderer
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.shape_renderings import LookedIntoError, Mark, ShapeRenderings
from drivetrain.data.language.vocabularies import byte_tokenizer
from tests.properties import examples

LLAMA3 = """{%- for message in messages -%}{{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim
 + '<|eot|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant<|end|>\n\n' -}}{%- endif -%}"""
MACRO = """{%- macro body(content, last) -%}{{- content -}}{%- endmacro -%}{%- for m in messages -%}
{%- set content = body(m.content, loop.last) | trim -%}{{- m.role ~ ':' if false else m.role + ':' -}}
{{- content -}}{{ '\n' }}{%- endfor -%}{{ 'assistant:' if add_generation_prompt }}"""
MACRO = MACRO.replace("m.role ~ ':' if false else ", "")
THINKS = """{%- for m in messages -%}{%- set c = m.content -%}{%- if '</think>' in c and not loop.last -%}
{%- set c = c.split('</think>')[-1] -%}{%- endif -%}{{- '<' + m.role + '>' + c + '</s>' -}}{%- endfor -%}
{{- '<assistant>' if add_generation_prompt -}}"""
SECRETLY = MACRO.replace("{{- content -}}{%- endmacro", "{{- content -}}!{%- endmacro").replace(
    "{{- content -}}{{ '\n' }}", "{{- 'X' if 'secret' in content else content -}}{{ '\n' }}"
)
SHOUTS = "{% for m in messages %}{{ m.role + m.content | upper }}{% endfor %}{{ 'a' if add_generation_prompt }}"
QUOTES = "{% for m in messages %}{{ m.role + m.content | tojson }}{% endfor %}{{ 'a' if add_generation_prompt }}"
LAST = """{% for m in messages %}{{ m.role + ':' + (m.content | trim if loop.last else m.content) + ';' }}{% endfor %}
{{- 'assistant:' if add_generation_prompt }}"""
TEMPLATES = {
    "llama3": LLAMA3,
    "macro": MACRO,
    "thinks": THINKS,
    "secretly": SECRETLY,
    "shouts": SHOUTS,
    "quotes": QUOTES,
    "last": LAST,
}
FAST = {"llama3", "macro", "last", "chatml", "alpaca", "vicuna", "plain"}

CONTENT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["secret", "a</think> b", " \n spaces\t", '"quoted"', "<|im_end|>", "\ue0000\ue001", "é\u2003"]),
)


def talk(contents: Sequence[str]) -> Conversation:
    roles: Any = ["user", "assistant"]
    return Conversation(tuple(Message(roles[number % 2], content) for number, content in enumerate(contents)))


def template(name: str, folder: Path) -> ChatTemplate:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    if name not in TEMPLATES:
        return ChatTemplate(tokenizer, name, "f")
    file = folder / f"{name}.jinja"
    file.write_text(TEMPLATES[name])
    return ChatTemplate(tokenizer, str(file), "f")


@pytest.mark.parametrize("name", [*TEMPLATES, "chatml", "alpaca", "vicuna", "plain"])
def test_renderings_are_those_of_the_template(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_renderings, "CHECKED", 0)  # or rare contents would hide a fault
    made = template(name, tmp_path)
    shapes = made._shapes_of_now()
    assert shapes is not None

    @settings(deadline=None, max_examples=examples(60))
    @given(st.lists(CONTENT, min_size=1, max_size=5), st.booleans())
    def same(contents: list[str], prompt: bool) -> None:
        messages = talk(contents).messages
        assert shapes.text(messages, prompt) == made._rendered_by_template(messages, prompt, ())

    same()
    assert any(pieces is not None for pieces in shapes._known.values()) == (name in FAST)


def test_a_template_is_not_asked_again_for_a_shape_it_was_checked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate(byte_tokenizer(), "chatml", "f")
    calls = []
    original = ChatTemplate._rendered_by_template

    def counted(self: ChatTemplate, *given: Any, **named: Any) -> str:
        calls.append(given)
        return original(self, *given, **named)

    monkeypatch.setattr(ChatTemplate, "_rendered_by_template", counted)
    made._samples([talk([f"a {number}", "b", "c", "d"]) for number in range(500)], "responses")
    assert len(calls) < 50


def test_a_rendering_that_turns_out_otherwise_is_not_put_together_again() -> None:
    class Environment:
        concat = "".join

    class Template:
        environment = Environment()

        def render(self, messages: Any, **_: Any) -> str:
            return "".join(message["content"] for message in messages)

    def render(messages: Any, prompt: bool) -> str:
        del messages, prompt
        return "other"

    made = ShapeRenderings(render, Template(), {}, "")
    assert [made.text([Message("user", "a")], prompt=True) for _ in range(5)] == ["other"] * 5


@pytest.mark.parametrize(
    "look",
    [
        "m == 'x'",
        "'x' == m",
        "'x' in m",
        "len(m)",
        "m[0]",
        "m.upper()",
        "hash(m)",
        "list(m)",
        "m.strip('x')",
        "'%s' % m",
    ],
)
def test_a_mark_refuses_to_be_looked_into(look: str) -> None:
    with pytest.raises(LookedIntoError):
        eval(look, {"m": Mark("x")})
    assert type("a" + Mark("x").strip() + "b") is Mark


def test_the_compiler_that_shapes_need_is_there() -> None:
    assert template_renderer.compile_template is not None
