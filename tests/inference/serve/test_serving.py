"""The server, asked by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from drivetrain.data.language.chat import ChatTemplate
from drivetrain.generation.requests import Request
from tests.running_server import Running, serving
from tests.scripted_model import scripted

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as found:
        yield found


def chat(server: Running, **given: Any) -> Any:
    return server.client().chat.completions.create(model="scripted", messages=HELLO, **given)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_answers_and_each_choice_its_own(server: Running) -> None:
    one, other = chat(server, seed=5, n=3), chat(server, seed=5, n=3)
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in other.choices]
    assert texts == [f"answer 5 {draw}." for draw in range(3)]
    assert one.usage.completion_tokens == sum(map(len, texts))
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens


def test_the_prompt_is_what_the_chat_template_renders(server: Running) -> None:
    chat(server, seed=1)
    ids = server.model.generator.requests[-1].ids
    assert server.model.tokenizer.decode(list(ids)) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_stream_has_the_text_of_the_whole_answer_and_usage_last(server: Running) -> None:
    chunks = list(chat(server, seed=7, n=2, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["answer 7 0.", "answer 7 1."]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ] * 2
    assert chunks[-1].usage.completion_tokens == len("".join(texts))


def test_sampling_fields_reach_the_generator(server: Running) -> None:
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    chat(server, seed=9, temperature=0.5, top_p=0.9, stop=["x", "y"], max_completion_tokens=11, extra_body=extra)
    request = server.model.generator.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.2, 9)
    assert (request.stop_strings, request.max_new_tokens) == (("x", "y"), 11)


def test_answers_end_before_a_stop_text_and_at_their_length(server: Running) -> None:
    assert chat(server, seed=5, stop="5").choices[0].message.content == "answer "
    cut = chat(server, seed=5, max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("ans", "length")


def test_log_probabilities_of_chat_name_tokens_and_bytes() -> None:
    with serving(scripted(lambda _: "é")) as server:
        [choice] = chat(server, logprobs=True, top_logprobs=2).choices
        streamed = [each.choices[0] for each in chat(server, logprobs=True, stream=True)]
    first, second = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("bytes:\\xc3", [0xC3], -0.5)
    assert (second.token, second.bytes) == ("bytes:\\xa9", [0xA9])
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [("bytes:\\xc3", -1.0), ("A", -2.0)]
    parts = [each.bytes for choice in streamed if choice.logprobs for each in choice.logprobs.content]
    assert parts == [[0xC3], [0xA9]]


def test_functions_are_offered_called_and_answered() -> None:
    def script(request: Request) -> str:
        text = model.tokenizer.decode(list(request.ids))
        if "tool_response" in text.split("<|im_end|>")[-2]:
            return "It is warm."
        return 'Let me see.\n<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>'

    model = scripted(script)
    with serving(model) as server:
        create = server.client().chat.completions.create
        asked = create(model="scripted", messages=HELLO, tools=TOOLS)
        [choice] = asked.choices
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Köln"})
        answer = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
        later = create(model="scripted", messages=[*HELLO, choice.message.model_dump(), answer], tools=TOOLS)
        assert later.choices[0].message.content == "It is warm."
        deltas = [each.choices[0] for each in create(model="scripted", messages=HELLO, tools=TOOLS, stream=True)]
        [streamed] = [call for each in deltas for call in each.delta.tool_calls or []]
        assert (streamed.index, streamed.function.name) == (0, "weather")
        assert "".join(each.delta.content or "" for each in deltas) == "Let me see."
        assert deltas[-1].finish_reason == "tool_calls"
        none = create(model="scripted", messages=HELLO, tools=TOOLS, tool_choice="none")
        assert none.choices[0].message.tool_calls is None


def test_a_forced_function_constrains_the_reply_to_its_schema() -> None:
    with serving(scripted(lambda _: '{"name": "weather", "arguments": {"town": "Rom"}}')) as server:
        forced = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", forced):
            [reply] = chat(server, tools=TOOLS, tool_choice=choice).choices
            assert reply.message.tool_calls[0].function.arguments == '{"town": "Rom"}'
            constraint = server.model.generator.requests[-1].constraint
            assert constraint["properties"]["name"] == {"const": "weather"}
            assert constraint["properties"]["arguments"] == TOOLS[0]["function"]["parameters"]


def test_an_answer_in_a_form_has_no_thought_though_the_template_opens_one() -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
    model = scripted(lambda _: '{"a": 1}')
    model.tokenizer.chat_template = template
    model.template = ChatTemplate(model.tokenizer, None, "template")
    with serving(model) as server:
        form: Any = {"type": "json_object"}
        message = chat(server, response_format=form).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == ('{"a": 1}', None)
        found = server.client().responses.create(model="scripted", input="Hi", text={"format": form})
        assert found.output_text == '{"a": 1}'
        assert chat(server).choices[0].message.reasoning_content == '{"a": 1}'


def test_a_schema_reaches_the_generator_as_its_constraint(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert server.model.generator.requests[-1].constraint == schema
    chat(server, response_format={"type": "json_object"})
    assert server.model.generator.requests[-1].constraint == {"type": "object"}


def test_thoughts_are_apart_from_the_answer() -> None:
    with serving(scripted(lambda _: "<think>\nfirst\n</think>\n\nthen")) as server:
        message = chat(server).choices[0].message
        assert (message.content, message.reasoning_content) == ("then", "first")
        deltas = [each.choices[0].delta for each in chat(server, stream=True)]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "first"
    assert "".join(each.content or "" for each in deltas) == "then"


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]], ids=["text", "texts", "tokens", "lists of tokens"]
)
def test_completions_take_prompts_in_four_forms(server: Running, prompt: Any) -> None:
    found = server.client().completions.create(model="scripted", prompt=prompt, echo=True, seed=2, n=2)
    prompts = ["ab", "c"] if isinstance(prompt, list) and isinstance(prompt[0], list | str) else ["ab"]
    each = [prompt for prompt in prompts for _ in range(2)]  # the draws are numbered over all prompts
    assert [choice.text for choice in found.choices] == [f"{p}answer 2 {draw}." for draw, p in enumerate(each)]
    assert found.usage.prompt_tokens == sum(map(len, prompts))


def test_a_prompt_that_comes_twice_is_answered_by_two_draws(server: Running) -> None:
    found = server.client().completions.create(model="scripted", prompt=["ab", "ab"], seed=2)
    assert [choice.text for choice in found.choices] == ["answer 2 0.", "answer 2 1."]


def test_echo_gives_the_log_probabilities_of_the_prompt(server: Running) -> None:
    create = server.client().completions.create
    [choice] = create(model="scripted", prompt=[72, 105], echo=True, logprobs=2, max_tokens=0).choices
    assert choice.text == "Hi"
    assert choice.logprobs.tokens == ["H", "i"]
    assert choice.logprobs.token_logprobs == [None, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"i": -0.5, "A": -2.0}]
    assert choice.logprobs.text_offset == [0, 1]
    chunks = list(create(model="scripted", prompt="Hi", echo=True, logprobs=0, max_tokens=2, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hian"
    parts = [each.choices[0].logprobs for each in chunks if each.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == ["H", "i", "a", "n"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 2, 3]


def test_echo_of_a_prompt_alone_gives_it_back_and_asks_no_model(server: Running) -> None:
    create, before = server.client().completions.create, len(server.model.generator.requests)
    found = create(model="scripted", prompt=["Hi", "there"], echo=True, max_tokens=0)
    assert [(each.text, each.finish_reason) for each in found.choices] == [("Hi", "length"), ("there", "length")]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 0)
    chunks = list(create(model="scripted", prompt=["Hi", "there"], echo=True, max_tokens=0, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert sorted((each.index, each.text, each.finish_reason) for each in parts) == [
        (0, "Hi", "length"),
        (1, "there", "length"),
    ]
    assert len(server.model.generator.requests) == before
    server.settled()


def test_a_stream_that_its_client_leaves_is_cancelled() -> None:
    with serving(scripted(lambda _: "endless " * 500, seconds=0.01)) as server:
        stream = chat(server, stream=True)
        next(iter(stream))
        stream.close()
        server.settled()
        assert server.model.generator.cancelled


def test_an_answer_whose_client_leaves_is_cancelled() -> None:
    with serving(scripted(lambda _: "endless " * 500, seconds=0.01)) as server:
        with pytest.raises(openai.APITimeoutError):
            chat(server, timeout=0.3)
        server.settled()
        assert server.model.generator.cancelled


def test_an_answer_that_takes_too_long_ends_with_its_reason() -> None:
    with serving(scripted(lambda _: "endless " * 500, seconds=0.01), seconds=0.2) as server:
        with pytest.raises(openai.InternalServerError, match=r"not complete after 0.2 s") as late:
            chat(server)
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"not complete after 0.2 s"):
            list(chat(server, stream=True))
        server.settled()


def test_a_model_that_fails_fails_its_answers_and_no_more() -> None:
    with serving(scripted(fails=MemoryError("no memory left"))) as server:
        with pytest.raises(openai.InternalServerError, match="no memory left"):
            chat(server)
        with pytest.raises(openai.APIError, match="no memory left"):
            list(chat(server, stream=True))
        server.settled()
        server.model.generator.fails = None
        assert chat(server, seed=1).choices[0].message.content == "answer 1 0."


def test_more_answers_than_places_are_refused_and_may_come_again() -> None:
    with serving(scripted(lambda _: "slow " * 100, seconds=0.01), most=2) as server:
        held = [chat(server, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 answers of at most 2") as busy:
            chat(server)
        assert busy.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="3 answers are asked for at once"):
            chat(server, n=3)
        for each in held:
            each.close()
        server.settled()
        assert chat(server, max_tokens=3).choices[0].message.content == "slo"


def test_models_and_adapters_are_listed_and_chosen_by_name() -> None:
    with serving(scripted(adapters=("mine",))) as server:
        client = server.client()
        assert [each.id for each in client.models.list()] == ["scripted", "mine"]
        assert client.models.retrieve("mine").id == "mine"
        client.chat.completions.create(model="mine", messages=HELLO)  # type: ignore[arg-type]
        assert server.model.generator.requests[-1].adapter == "mine"
        with pytest.raises(openai.NotFoundError, match="there is no model 'other' here; there is scripted, mine"):
            client.models.retrieve("other")


def test_metrics_count_requests_tokens_and_clients_gone(server: Running) -> None:
    def values() -> dict[str, float]:
        lines = server.ask("/metrics")[2].decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = values()
    chat(server, seed=1)
    after = values()
    assert after["drivetrain_new_tokens_total"] - before.get("drivetrain_new_tokens_total", 0) == len("answer 1 0.")
    path = 'drivetrain_requests_total{path="/v1/chat/completions",status="200"}'
    assert after[path] - before.get(path, 0) == 1
    assert after["drivetrain_answers_in_the_making"] == 0
    assert not any(math.isnan(value) for value in after.values())


def test_a_server_that_stops_lets_running_answers_end_and_takes_no_more() -> None:
    with serving(scripted(lambda _: "word " * 8, seconds=0.01)) as server:
        stream = iter(chat(server, stream=True))
        next(stream)
        server.stop()
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            chat(server)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "word " * 8
