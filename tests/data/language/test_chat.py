from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drivetrain.data.language.chat import ChatTemplate, ConversationTokens, missing_tokens, show
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.template_sources import SHIPPED
from drivetrain.data.language.vocabularies import bpe_tokenizer, byte_tokenizer
from drivetrain.errors import UserError
from tests.properties import examples

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BYTES = byte_tokenizer(SPECIAL)

# --- templates as others write them ----------------------------------------------------------------------------------

LLAMA = """{{ '<|endoftext|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] \
+ '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# the last turn keeps its reasoning, or says that it has none; earlier turns lose it
REWRITING = """{%- set last = namespace(user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
  {%- set said = m.content.split('</think>')[-1].lstrip('\\n') -%}
  {%- set why = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' -%}
  {{- '<think>\\n' + why + '\\n</think>\\n\\n' + said if loop.index0 > last.user else said -}}
  {%- for call in m.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

NO_SYSTEM = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m['role'] + ':' + m['content'] }}\
{% if m['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""

DEAF = """{% for m in messages %}{% if m.role in ('user', 'assistant') %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}\
{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""

UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def user(content: str) -> Message:
    return Message("user", content)


def reply(content: str, trained: bool = True, *calls: tuple[str, dict[str, Any]]) -> Message:
    functions = tuple({"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls)
    return Message("assistant", content, functions, trained)


def template_of(source: str, folder: Path | None = None, tokenizer: Any = BYTES) -> ChatTemplate:
    """Of a shipped name, or of a text, which is put into a file first."""
    if source in SHIPPED:
        return ChatTemplate(tokenizer, source, "workload.data.template")
    assert folder is not None
    (folder / "given.jinja").write_text(source)
    return ChatTemplate(tokenizer, str(folder / "given.jinja"), "workload.data.template")


def library_text(template: ChatTemplate, messages: Sequence[Message], prompt: bool = False, **options: Any) -> str:
    """Returns what Transformers renders."""
    given = [message.as_template() for message in messages]
    return BYTES.apply_chat_template(
        given, chat_template=template.text, tokenize=False, add_generation_prompt=prompt, **options
    )


def samples_of(tokens: ConversationTokens) -> list[tuple[np.ndarray, np.ndarray]]:
    pieces = tokens.offsets[1:-1]
    return list(zip(np.split(tokens.ids, pieces), np.split(tokens.targets, pieces), strict=True))


def characters(ids: np.ndarray, targets: np.ndarray) -> list[tuple[str, bool]]:
    """Of byte-level ids each character, and whether it is trained; special tokens count as one."""
    numbers, flags = ids.tolist(), targets.tolist()
    starts = [place for place, number in enumerate(numbers) if not 0x80 <= number < 0xC0]  # others continue a character
    found: list[tuple[str, bool]] = []
    for start, end in pairwise([*starts, len(numbers)]):
        assert len(set(flags[start:end])) == 1, "a character is trained in part"
        special = numbers[start] >= 256
        character = SPECIAL[numbers[start] - 256] if special else bytes(numbers[start:end]).decode()
        found.append((character, flags[start]))
    return found


def trained_text(ids: np.ndarray, targets: np.ndarray) -> str:
    return "".join(character for character, trained in characters(ids, targets) if trained)


def trained_texts(template: ChatTemplate, conversation: Conversation, train_on: Any = "responses") -> list[str]:
    tokens = template.tokenised([conversation], train_on)
    assert not tokens.problems
    assert tokens.boundary_mismatches == 0
    return [trained_text(*sample) for sample in samples_of(tokens)]


# --- real files, every character -------------------------------------------------------------------------------------


def disguised(value: Any) -> Any:
    """Every character as one of the private use planes: wherever it appears, it is the assistant's."""
    if isinstance(value, str):
        return "".join(chr(0xF0000 + ord(c)) if ord(c) < 0xFFFE else chr(0xF0000 + ord(c) % 0x10000) for c in value)
    if isinstance(value, dict):
        return {disguised(name): disguised(held) for name, held in value.items()}
    return [disguised(held) for held in value] if isinstance(value, list) else value


def is_disguised(character: str) -> bool:
    return len(character) == 1 and ord(character) >= 0xF0000


@pytest.fixture(scope="module")
def real(shared_data: Path) -> list[Conversation]:
    """Of alpaca's rows and glaive's calls, results and replies, with all that the assistant says in disguise."""
    conversations = []
    for name in ("alpaca_en_demo", "alpaca_zh_demo"):
        for number, row in enumerate(json.loads((shared_data / "sft" / f"{name}.json").read_text())[:40]):
            asked = user(f"{row['instruction']}\n{row['input']}".strip())
            conversations.append(Conversation((asked, reply(disguised(row["output"]))), (), f"{name}:{number}"))
    rows = json.loads((shared_data / "sft" / "glaive_toolcall_en_demo.json").read_text())
    return conversations + [glaive(row, number) for number, row in enumerate(rows[:30])]


def glaive(row: dict[str, Any], number: int) -> Conversation:
    messages = []
    for turn in row["conversations"]:
        words = turn["value"]
        if turn["from"] == "function_call":
            call = json.loads(words)
            messages.append(reply("", True, (disguised(call["name"]), disguised(call["arguments"]))))
        elif turn["from"] == "gpt":
            messages.append(reply(disguised(words)))
        else:
            messages.append(Message("user" if turn["from"] == "human" else "tool", words))
    tools = tuple({"type": "function", "function": tool} for tool in json.loads(row["tools"] or "[]"))
    return Conversation(tuple(messages), tools, f"glaive:{number}")


def call_texts(message: Message) -> list[str]:
    return [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]


def in_style(style: str, message: Message) -> str:
    """Returns what the assistant writes, built without Jinja."""
    if style == "chatml":
        calls = [f"<tool_call>{text}</tool_call>" for text in call_texts(message)]
        return "\n".join([*filter(None, [message.content.strip()]), *calls]) + "<|im_end|>"
    if style == "alpaca":
        return "\n".join([*filter(None, [message.content.strip()]), *call_texts(message)]) + "<|endoftext|>"
    return "".join(" " + words for words in [message.content, *call_texts(message)] if words) + "<|endoftext|>"


@pytest.mark.parametrize("style", SHIPPED)
def test_every_character_of_the_assistant_is_trained_and_no_other(style: str, real: list[Conversation]) -> None:
    template = template_of(style)
    tokens = template.tokenised(real, "responses")
    assert not tokens.problems
    assert tokens.origin.tolist() == list(range(len(real)))
    assert (tokens.split_conversations, tokens.boundary_mismatches) == (0, 0)
    for conversation, sample in zip(real, samples_of(tokens), strict=True):
        text = characters(*sample)
        replies = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        spoken = conversation.messages[: replies[-1] + 1]
        tools = list(conversation.tools) or None
        assert "".join(character for character, _ in text) == library_text(template, spoken, tools=tools)
        assert not any(is_disguised(character) and not trained for character, trained in text)
        assert trained_text(*sample) == "".join(in_style(style, conversation.messages[index]) for index in replies)


@pytest.mark.parametrize("style", SHIPPED)
def test_the_prompt_of_every_reply_is_what_inference_feeds(style: str, real: list[Conversation]) -> None:
    template = template_of(style)
    for conversation in real[70:110]:
        (ids, targets), *others = samples_of(template.tokenised([conversation], "responses"))
        assert not others
        starts = np.flatnonzero(np.diff(targets, prepend=False) & targets).tolist()
        replies = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
        assert len(starts) == len(replies)
        for start, index in zip(starts, replies, strict=True):
            before = conversation.messages[:index]
            text = library_text(template, before, prompt=True, tools=list(conversation.tools) or None)
            assert template.prompt_ids(before, conversation.tools) == ids[:start].tolist()
            assert BYTES(text)["input_ids"] == ids[:start].tolist()


# --- tokenizers of all kinds -----------------------------------------------------------------------------------------

SCRAP = ["### Response:\n\n  Hi! ASSISTANT: a  b\n\n\nassistant\n    return x?\n\n .\n.\r\n 1 2 :\n: \n \t\tx é房 "] * 4


def llama_3_like() -> Any:
    """Byte-level BPE with the pattern that Llama 3, Qwen and GPT-4 share: punctuation takes the line ends after it."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern + r"\s+(?!\S)|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SCRAP, byte_trainer())
    return finished(tokenizer)


def roberta_like() -> Any:
    """Byte-level BPE whose offsets leave out spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SCRAP, byte_trainer())
    return finished(tokenizer)


def llama_2_like() -> Any:
    """SentencePiece's way: a mark for a space, one more of it at the start and after special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    learnt.train_from_iterator(
        [text.replace("\n", "").replace("\t", "") for text in SCRAP], trainers.BpeTrainer(vocab_size=300)
    )
    held = json.loads(learnt.to_str())["model"]
    vocabulary = {token: number for number, token in enumerate([*fallback, *held["vocab"]])}
    merges = [tuple(merge) for merge in held["merges"]]
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    return finished(tokenizer)


def byte_trainer() -> Any:
    return trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )


def finished(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], bos_token=SPECIAL[0])


KINDS: dict[str, Any] = {
    "bytes": BYTES,
    "GPT-2": bpe_tokenizer(SCRAP, 400, SPECIAL),
    "Llama 3": llama_3_like(),
    "RoBERTa": roberta_like(),
    "Llama 2": llama_2_like(),
}
pieces = st.sampled_from(
    ["\n", "\n\n", " ", "  ", "\t", "?", ".", ":", "a", "Hi", "return x", "é", "房", "1", "<", "|", "'s"]
)
contents = st.one_of(
    st.lists(pieces, max_size=6).map("".join), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)


@settings(deadline=None, max_examples=examples(60))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    style=st.sampled_from(SHIPPED),
    turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=3),
    system=st.one_of(st.none(), contents),
)
def test_a_prompt_is_tokenised_alike_with_and_without_its_reply(
    kind: str, style: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [Message("system", system)] if system is not None else []
    for asked, answered in turns:
        messages += [user(asked), reply(answered)]
    template = template_of(style, tokenizer=KINDS[kind])
    tokens = template.tokenised([Conversation(tuple(messages))], "responses")
    assert not tokens.problems
    assert (tokens.boundary_checked, tokens.boundary_mismatches) == (len(turns), 0)
    prompt = library_text(template, messages[:-1], prompt=True)
    assert library_text(template, messages).startswith(prompt)


AWKWARD = ("\n\nHi", "  Hi", " \n", "", "?", ":\n", "a  ", "\tx", "Hi")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", SHIPPED)
def test_white_space_around_a_reply_joins_nothing_of_the_prompt(style: str, kind: str) -> None:
    messages = [Message("system", "\n"), user(" "), reply("Hi")]
    for asked in ("a  ", "?", ""):
        for answered in AWKWARD:
            messages += [user(asked), reply(answered)]
    tokens = template_of(style, tokenizer=KINDS[kind]).tokenised([Conversation(tuple(messages))], "responses")
    assert (tokens.boundary_checked, tokens.boundary_mismatches) == (3 * len(AWKWARD) + 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_hold_the_reply_and_its_end_in_every_kind_of_tokens(kind: str) -> None:
    template = template_of("chatml", tokenizer=KINDS[kind])
    conversation = Conversation((user("Hi 🙂?"), reply("  é房🙂 a  b\n\n x .")))
    ((ids, targets),) = samples_of(template.tokenised([conversation], "responses"))
    last = int(np.flatnonzero(targets)[-1])
    assert ids[last] == KINDS[kind].convert_tokens_to_ids("<|im_end|>")
    assert KINDS[kind].decode(ids[targets][:-1], clean_up_tokenization_spaces=False) == "é房🙂 a  b\n\n x ."
    assert not targets[last + 1 :].any()
    assert targets[int(targets.argmax()) : last + 1].all()


def test_a_prompt_that_ends_with_a_space_joins_the_reply_and_is_counted(tmp_path: Path) -> None:
    joins = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    conversations = [Conversation((user("a"), reply("Hi")), (), "")] * 500
    for kind, mismatches in (("GPT-2", 167), ("bytes", 0)):
        tokens = template_of(joins, tmp_path, KINDS[kind]).tokenised(conversations, "responses")
        assert (tokens.boundary_checked, tokens.boundary_mismatches) == (167, mismatches)


def test_a_space_that_tokens_offsets_leave_out_stays_with_the_prompt(tmp_path: Path) -> None:
    template = template_of("{% for m in messages %}{{ m.content + ' ' }}{% endfor %}", tmp_path, KINDS["RoBERTa"])
    tokens = template.tokenised([Conversation((user("a"), reply("7")))], "responses")
    assert show(tokens.ids, tokens.targets, KINDS["RoBERTa"]) == [("a ", False), ("7 ", True)]
    assert tokens.boundary_mismatches == 0


# --- templates of others ---------------------------------------------------------------------------------------------

TALK = Conversation(
    (Message("system", "Be brief."), user("Hi"), reply(" Hello \n"), user("Bye"), reply("So long")), (), "talk.json:7"
)


def test_llama_3s_template_is_one_sample_of_the_librarys_own_ids(tmp_path: Path) -> None:
    template = template_of(LLAMA, tmp_path)
    tokens = template.tokenised([TALK], "responses")
    assert tokens.ids.tolist() == BYTES(library_text(template, TALK.messages))["input_ids"]
    assert [trained_text(*sample) for sample in samples_of(tokens)] == ["Hello<|eot_id|>So long<|eot_id|>"]
    assert tokens.ids.dtype == np.int32
    assert tokens.targets.dtype == np.bool_


def test_a_template_that_rewrites_history_gives_what_inference_sees_of_each_reply(tmp_path: Path) -> None:
    template = template_of(REWRITING, tmp_path)
    messages = (user("1+1?"), reply("<think>\neasy\n</think>\n\n2"), user("2+2?"), reply("4"))
    tokens = template.tokenised([Conversation(messages), Conversation(messages[:2])], "responses")
    assert (tokens.split_conversations, tokens.origin.tolist()) == (1, [0, 0, 1])
    assert (tokens.boundary_checked, tokens.boundary_mismatches) == (3, 0)
    samples = samples_of(tokens)
    for (ids, _), end in zip(samples, (2, 4, 2), strict=True):
        assert ids.tolist() == BYTES(library_text(template, messages[:end]))["input_ids"]
    thought = "<think>\neasy\n</think>\n\n2<|im_end|>"
    assert [trained_text(*sample) for sample in samples] == [thought, "<think>\n\n</think>\n\n4<|im_end|>", thought]


def test_replies_of_a_turn_that_is_not_rewritten_stay_together(tmp_path: Path) -> None:
    call = reply("", True, ("add", {"a": 2}))
    conversation = Conversation((user("2+2?"), call, Message("tool", "4"), reply("4"), user("Thanks"), reply("!")))
    tokens = template_of(REWRITING, tmp_path).tokenised([conversation], "responses")
    empty = "<think>\n\n</think>\n\n"
    called = empty + '{"name": "add", "arguments": {"a": 2}}<|im_end|>'
    trained = [trained_text(*sample) for sample in samples_of(tokens)]
    assert trained == [called + empty + "4<|im_end|>", empty + "!<|im_end|>"]
    assert tokens.split_conversations == 1


def test_what_a_template_refuses_is_reported_with_its_place_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = Conversation((user("Hi"), reply("Ho")), (), "a.json:2")
    twice = Conversation((user("Hi"), user("Hi"), reply("Ho")), (), "a.json:3")
    half = Conversation((user("Hi"), reply("\ud83d")), (), "a.json:4")
    first = Conversation((reply("Welcome"), user("Hi"), reply("Ho")), (), "a.json:5")
    silent = Conversation((user("Hi"),), (), "a.json:6")
    tokens = template_of(NO_SYSTEM, tmp_path).tokenised([TALK, good, twice, half, first, silent], "responses")
    assert tokens.origin.tolist() == [1]
    assert trained_text(tokens.ids, tokens.targets) == "Ho<|endoftext|>"
    places, reasons = zip(*tokens.problems, strict=True)
    assert places == ("talk.json:7", "a.json:3", "a.json:4", "a.json:5", "a.json:6")
    words = [
        "System role not supported",
        "roles must alternate",
        "surrogates",
        "nothing prompts it",
        "no reply to train",
    ]
    assert all(part in reason for part, reason in zip(words, reasons, strict=True)), reasons


@pytest.mark.parametrize("error", [MemoryError, ImportError, RecursionError])
def test_what_is_no_fault_of_a_row_is_not_reported_as_one(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = template_of(NO_SYSTEM, tmp_path)

    def fail(*_: object) -> None:
        raise error("for now")

    monkeypatch.setattr(template, "rendered", fail)
    with pytest.raises(error, match="for now"):
        template.tokenised([Conversation((user("Hi"), reply("Ho")), (), "a.json:2")], "responses")


@pytest.mark.parametrize("train_on", ["responses", "last_response", "all"])
def test_a_template_that_leaves_something_out_is_found_out(train_on: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    asked = user("Rain?")
    called = reply("", True, ("weather", {}))
    cases = {
        "system's message": Conversation((Message("system", "Hello user"), user("Hello user"), reply("Hi"))),
        "a call of a function": Conversation((user("Is weather a function?"), called)),
        "tool's message": Conversation((asked, reply("It is sunny"), Message("tool", "sunny"), reply("No"))),
        "a function that can be called": Conversation((user("weather?"), reply("No")), (tool,)),
        "reasoning_content": Conversation((asked, replace(reply("No"), reasoning_content="No"))),
    }
    tokens = template_of(DEAF, tmp_path).tokenised(list(cases.values()), train_on)
    assert [part in why for part, (_, why) in zip(cases, tokens.problems, strict=True)] == [True] * 5, tokens.problems
    assert not template_of("chatml").tokenised(list(cases.values()), train_on).problems


FIRST_ONLY = "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + DEAF.replace(
    "+ m.content +", "}}{{ m.tool_calls[0].function | tojson if m.tool_calls else m.content }}{{"
)


def test_of_several_functions_and_calls_each_is_looked_for(tmp_path: Path) -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("f", "weather"))
    calls = reply("", True, ("f", {}), ("weather", {}))
    cases = [
        Conversation((user("Rain?"), reply("No")), tools[:1]),
        Conversation((user("Rain?"), reply("No")), tools),
        Conversation((user("Rain?"), reply("", True, ("f", {"a": 1})))),
        Conversation((user("Rain?"), calls)),
    ]
    problems = (
        template_of(FIRST_ONLY, tmp_path)
        .tokenised([replace(case, where=str(n)) for n, case in enumerate(cases)], "responses")
        .problems
    )
    assert [where for where, _ in problems] == ["1", "3"]
    names_only = DEAF.replace("+ m.content +", "+ (m.tool_calls[0].function.name if m.tool_calls else m.content) +")
    ((_, why),) = template_of(names_only, tmp_path).tokenised(cases[2:3], "responses").problems
    assert "leaves out arguments of a call" in why


def test_a_template_may_write_what_it_is_given_in_capitals(tmp_path: Path) -> None:
    talk = Conversation((Message("system", "be brief"), user("Rain?"), reply("No")))
    capitals = "+ (m.content | upper if m.role == 'system' else m.content) +"
    hearing = DEAF.replace("('user', ", "('system', 'user', ")
    tokens = template_of(hearing.replace("+ m.content +", capitals), tmp_path).tokenised([talk], "responses")
    assert not tokens.problems
    assert "BE BRIEF" in BYTES.decode(tokens.ids)
    ((_, why),) = template_of(DEAF, tmp_path).tokenised([talk], "responses").problems
    assert "leaves out the system's message" in why


def test_thoughts_that_a_template_cuts_out_of_the_reply_are_found_out(tmp_path: Path) -> None:
    """As DeepSeek-R1's own does."""
    cutting = DEAF.replace("+ m.content +", "+ m.content.split('</think>')[-1] +")
    thinking = Conversation((user("a"), reply("<think>why</think>because")))
    ((_, why),) = template_of(cutting, tmp_path).tokenised([thinking], "responses").problems
    assert "leaves out what a reply has before </think>" in why
    assert not template_of(DEAF, tmp_path).tokenised([thinking], "responses").problems


def test_words_beside_a_call_that_a_template_drops_are_found_out(tmp_path: Path) -> None:
    """As Llama 3.1's own does."""
    either = "{{ m.tool_calls[0].function | tojson if m.tool_calls else m.content }}"
    template = template_of(DEAF.replace("+ m.content +", "}}" + either + "{{"), tmp_path)
    talk = Conversation((user("Rain?"), reply("Let me see", True, ("weather", {}))))
    ((_, why),) = template.tokenised([talk], "responses").problems
    assert "leaves out the text beside a call" in why
    assert not template.tokenised([Conversation((user("Rain?"), reply("", True, ("weather", {}))))], "all").problems


def test_chatml_puts_reasoning_before_the_answer() -> None:
    thinking = replace(reply("42"), reasoning_content="six by seven")
    (text,) = trained_texts(template_of("chatml"), Conversation((user("6 * 7?"), thinking)))
    assert text == "<think>\nsix by seven\n</think>\n\n42<|im_end|>"


def test_marks_that_leave_out_the_end_of_replies_are_counted(tmp_path: Path) -> None:
    unended = "{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    marked = MARKED.replace("{{ m.content + '<|im_end|>' }}{% endgeneration %}", unended)
    assert marked != MARKED
    assert template_of(marked, tmp_path).tokenised([TALK, TALK], "responses").unended == 2
    both = MARKED.replace("{% if add_generation_prompt %}", "{{ '<|endoftext|>' }}{% if add_generation_prompt %}")
    for ended in (MARKED, both, LLAMA, "chatml"):
        assert not template_of(ended, tmp_path).tokenised([TALK], "responses").unended


def test_a_template_that_cannot_tell_replies_is_refused_unless_it_marks_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"given\.jinja does not tell replies from prompts: for talk\.json:7") as caught:
        template_of(UNMARKED, tmp_path).tokenised([TALK], "responses")
    assert "choose chatml" in caught.value.problems[0].fix
    template = template_of(MARKED, tmp_path)
    tokens = template.tokenised([TALK], "responses")
    assert trained_text(tokens.ids, tokens.targets) == " Hello \n<|im_end|>So long<|im_end|>"
    assert (tokens.boundary_checked, tokens.boundary_mismatches) == (2, 2)  # its prompt ends with <think>


def test_marks_of_a_template_agree_with_the_librarys_own_mask(tmp_path: Path) -> None:
    template = template_of(MARKED.replace("<think>", ""), tmp_path)
    given = [message.as_template() for message in TALK.messages]
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    theirs = BYTES.apply_chat_template(given, chat_template=template.text, **options)
    ours = template.tokenised([TALK], "responses")
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.targets.tolist() == [bool(mask) for mask in theirs["assistant_masks"]]
    assert trained_texts(template, TALK) == trained_texts(template_of(DEAF + "{# #}", tmp_path), without_system(TALK))


def test_marks_that_take_in_the_prompt_are_cut_to_the_reply(tmp_path: Path) -> None:
    marked = LLAMA.replace("{% for message in messages %}", "{% for message in messages %}{% generation %}")
    marked = marked.replace("{% endfor %}", "{% endgeneration %}{% endfor %}")
    assert trained_texts(template_of(marked, tmp_path), TALK) == ["Hello<|eot_id|>So long<|eot_id|>"]


def without_system(conversation: Conversation) -> Conversation:
    return Conversation(conversation.messages[1:], conversation.tools)


# --- which replies ---------------------------------------------------------------------------------------------------


def test_only_the_last_reply_or_everything_is_trained_when_asked() -> None:
    template = template_of("chatml")
    assert trained_texts(template, TALK) == ["Hello<|im_end|>So long<|im_end|>"]
    assert trained_texts(template, TALK, "last_response") == ["So long<|im_end|>"]
    assert trained_texts(template, TALK, "all") == [library_text(template, TALK.messages)]


def test_a_reply_that_is_not_to_be_trained_is_context_only() -> None:
    template = template_of("chatml")
    messages = (user("a"), reply("b", False), user("c"), reply("d"), user("e"), reply("f", False), user("g"))
    conversation = Conversation(messages)
    assert trained_texts(template, conversation) == ["d<|im_end|>"]
    tokens = template.tokenised([conversation], "responses")
    assert BYTES.decode(tokens.ids) == library_text(template, messages[:4])  # what follows would teach nothing
    everything = library_text(template, messages)
    expected = everything.replace("b<|im_end|>", "").replace("f<|im_end|>", "")
    assert trained_texts(template, conversation, "all") == [expected]
    assert "no reply" in template.tokenised([conversation], "last_response").problems[0][1]


def test_everything_but_a_reply_that_is_rewritten_later_cannot_be_trained(tmp_path: Path) -> None:
    messages = (user("1+1?"), reply("<think>x</think>2", False), user("2+2?"), reply("4"))
    tokens = template_of(REWRITING, tmp_path).tokenised([Conversation(messages)], "all")
    assert "rewrites it later" in tokens.problems[0][1]


def test_consecutive_replies_and_calls_with_words_are_all_trained() -> None:
    messages = (user("a"), reply("Let me see.", True, ("f", {"x": "é"}), ("g", {})), Message("tool", "1"), reply("b"))
    conversation = Conversation((*messages, reply("c")))
    for style in SHIPPED:
        expected = "".join(in_style(style, message) for message in conversation.messages if message.role == "assistant")
        assert trained_texts(template_of(style), conversation) == [expected]


def test_no_conversations_are_no_tokens() -> None:
    tokens = template_of("chatml").tokenised([], "responses")
    assert (len(tokens.ids), tokens.offsets.tolist(), len(tokens.origin)) == (0, [0], 0)


# --- the template itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("chatmal", "there is no template chatmal\n    did you mean chatml?"),
        ("llama3", "there is no template llama3\n    give one of alpaca, vicuna, chatml, plain"),
        ("nowhere/own.jinja", "nowhere/own.jinja does not exist"),
        (None, "has no chat template\n    give one of alpaca, vicuna, chatml, plain"),
    ],
)
def test_a_template_that_is_not_there_is_reported_with_those_that_are(source: str | None, words: str) -> None:
    with pytest.raises(UserError) as caught:
        ChatTemplate(BYTES, source, "workload.data.template")
    assert words in str(caught.value)
    assert caught.value.problems[0].field == "workload.data.template"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2: unexpected '}'"),
        ("\n\n{{ messages | nonsense }}", "line 3: No filter named 'nonsense'"),
    ],
)
def test_a_template_that_does_not_compile_is_reported_with_the_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"given\.jinja does not compile") as caught:
        template_of(text, tmp_path)
    assert words in str(caught.value)


def test_a_tokenizer_that_cannot_serve_is_refused() -> None:
    for style in SHIPPED:
        bare = byte_tokenizer()
        if style == "chatml":
            assert missing_tokens(ChatTemplate(bare, style, "f"), bare) == ["<|im_start|>", "<|im_end|>"]
        else:
            with pytest.raises(UserError, match="no reply would end"):
                ChatTemplate(bare, style, "f")
    assert missing_tokens(template_of("chatml"), BYTES) == []
    assert missing_tokens(template_of("alpaca"), byte_tokenizer(SPECIAL[:1])) == []


def test_missing_tokens_of_other_families_are_found(tmp_path: Path) -> None:
    bare = byte_tokenizer()
    assert missing_tokens(template_of(LLAMA, tmp_path, bare), bare) == [SPECIAL[0], SPECIAL[3], SPECIAL[4], SPECIAL[5]]
    gemma = "{# <|no|> #}{{ '<start_of_turn>user\\n' + messages[0].content + '<end_of_turn>' }}"
    assert missing_tokens(template_of(gemma, tmp_path, bare), bare) == ["<start_of_turn>", "<end_of_turn>"]


@pytest.mark.parametrize("style", SHIPPED)
def test_an_installed_template_is_saved_and_renders_the_same_elsewhere(style: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SPECIAL)
    template = ChatTemplate(tokenizer, style, "f")
    template.install()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    given = [message.as_template() for message in TALK.messages[:-1]]
    elsewhere = loaded.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
    assert elsewhere == template.prompt_ids(TALK.messages[:-1])
    own = ChatTemplate(loaded, None, "f")
    assert own.tokenised([TALK], "responses").ids.tolist() == template.tokenised([TALK], "responses").ids.tolist()


def test_of_a_tokenizers_several_templates_the_one_for_tools_is_used_for_tools() -> None:
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.chat_template = {"default": DEAF, "tool_use": template_of("chatml").text}
    template = ChatTemplate(tokenizer, None, "f")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    tokens = template.tokenised([Conversation((user("Rain?"), reply("No")), (tool,))], "responses")
    assert "weather" in tokenizer.decode(tokens.ids)
    tokenizer.chat_template = {"tool_use": DEAF}
    with pytest.raises(UserError, match="chat templates, tool_use, none is named default"):
        ChatTemplate(tokenizer, None, "f")


def test_a_slow_tokenizer_is_refused() -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(UserError, match="ByT5Tokenizer is no fast tokenizer"):
        ChatTemplate(ByT5Tokenizer(), "chatml", "f")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_shown_in_pieces_with_what_is_trained(kind: str) -> None:
    tokens = template_of("vicuna", tokenizer=KINDS[kind]).tokenised([without_system(TALK)], "responses")
    start = "" if KINDS[kind].bos_token is None else "<|endoftext|>"
    assert [(text.lstrip(), trained) for text, trained in show(tokens.ids, tokens.targets, KINDS[kind])] == [
        (f"{start}USER: Hi ASSISTANT:".replace("|>U", "|> U" if kind == "Llama 2" else "|>U"), False),
        ("Hello \n<|endoftext|>", True),
        ("USER: Bye ASSISTANT:", False),
        ("So long<|endoftext|>", True),
    ]
    assert show(tokens.ids[:0], tokens.targets[:0], KINDS[kind]) == []


def test_a_special_token_that_takes_the_white_space_after_it_is_one_target() -> None:
    """Phi-3's way: the line end after <|im_end|> becomes part of the token."""
    taking = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    taking.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=taking)
    tokens = template_of("chatml", tokenizer=tokenizer).tokenised([without_system(TALK)], "responses")
    assert tokenizer.decode(tokens.ids[tokens.targets]) == "Hello<|im_end|>So long<|im_end|>"
    assert tokens.boundary_mismatches == 0
