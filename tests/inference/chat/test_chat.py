"""Chats through pipes and in a pseudo-terminal, with models whose answers are written down."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from pydantic import create_model
from rich.console import Console

from drivetrain.data.language.chat import ChatTemplate
from drivetrain.errors import UserError
from drivetrain.generation.replies import Call
from drivetrain.generation.requests import Request
from drivetrain.inference.chat import screen
from drivetrain.inference.chat.chat import Chat
from drivetrain.inference.chat.functions import Function, read_functions, result_of
from drivetrain.inference.chat.lines import piped_lines
from drivetrain.inference.chat.replies import Replies, Step
from drivetrain.inference.chat.screen import complete_blocks, visible, without_echo
from drivetrain.inference.chat.talk import Settings
from tests.scripted_model import ScriptedModel, scripted

TOOLS = '''
import json
from typing import Literal
from math import sqrt

def weather(town: str, unit: Literal["C", "F"] = "C") -> dict:
    """The weather of a town."""
    return {"town": town, "degrees": 20, "unit": unit}

def fails(number: int) -> str:
    raise RuntimeError("no luck")

def _private(x): ...
'''


def echo(model: ScriptedModel) -> None:
    """Makes a model answer with its whole prompt."""
    model.generator.script = lambda request: model.tokenizer.decode(list(request.ids)).replace("\n", " ")


def talked(text: str | bytes, *models: ScriptedModel, **settings: Any) -> tuple[str, str, bool, Chat]:
    """Sends lines through a pipe; returns what was printed, the notes, whether all was answered, and the chat."""
    out, notes = (Console(file=io.StringIO(), width=200, highlight=False) for _ in range(2))
    chat = Chat(list(models), Settings(**settings), lambda place: scripted(name=Path(place).name), out, notes)
    source = io.BytesIO(text.encode() if isinstance(text, str) else text)
    answered = chat.run(piped_lines(source))
    return out.file.getvalue(), notes.file.getvalue(), answered, chat  # type: ignore[attr-defined]


def test_a_pipe_is_answered_line_by_line_and_the_model_reads_all_before() -> None:
    model = scripted()
    echo(model)
    out, notes, answered, _ = talked("你好\nAnd now?\n", model, system="Be kind.")
    first, second = out.splitlines()
    assert first.startswith("<|im_start|>system Be kind.<|im_end|> <|im_start|>user 你好<|im_end|>")
    assert f"<|im_start|>assistant {first.rstrip()}<|im_end|> <|im_start|>user And now?" in second
    assert answered
    assert not notes


def test_a_line_that_ends_with_a_backslash_goes_on() -> None:
    _, _, _, chat = talked("one\\\ntwo\n//not a command\n", scripted())
    assert [each.content for each in chat.talks[0].messages if each.role == "user"] == ["one\ntwo", "/not a command"]
    _, _, _, chat = talked("the last\\", scripted())
    assert [each.content for each in chat.talks[0].messages if each.role == "user"] == ["the last"]


def test_commands_change_what_follows(tmp_path: Path) -> None:
    model, file = scripted(), tmp_path / "talk.jsonl"
    lines = f"/temperature 0.5\n/system Be brief.\nhello\n/save {file}\n/reset\nagain\n/quit\nnever\n"
    _, notes, answered, chat = talked(lines, model, seed=3)
    requests = model.generator.requests
    assert [request.sampling.temperature for request in requests] == [0.5, 0.5]
    assert [each.content for each in chat.talks[0].messages] == ["again", "answer 3 1."]
    row = json.loads(file.read_text())
    assert [each["role"] for each in row["messages"]] == ["system", "user", "assistant"]
    assert "2 messages in" in notes
    assert answered


def test_a_saved_conversation_is_data_to_train_on(tmp_path: Path) -> None:
    from drivetrain.data.language.openai_messages import read_openai
    from drivetrain.data.language.row_schema import RowSchema

    talked(f"hello\n/save {tmp_path / 'a.jsonl'}\n", scripted(lambda _: "hi"))
    messages = read_openai(json.loads((tmp_path / "a.jsonl").read_text()), RowSchema("openai"))
    assert [(each.role, each.content) for each in messages] == [("user", "hello"), ("assistant", "hi")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/temperature hot", "'hot' was given"),
        ("/temperature 3", "'3' was given"),
        ("/save", "it has no file"),
        ("/save new.jsonl", "there is nothing to save yet"),
        ("/compare", "it has no model"),
        (b"\xff\xfe", "not UTF-8"),
        (b"one\\\n\xff\\\nthree", "a message is not UTF-8: invalid start byte at byte 5"),
    ],
)
def test_a_wrong_line_gets_its_reason_and_the_chat_goes_on(line: str | bytes, why: str) -> None:
    given = line.encode() if isinstance(line, str) else line
    out, notes, answered, _ = talked(given + b"\nhello\n", scripted(lambda _: "hi"))
    assert why in notes
    assert out == "hi\n"
    assert not answered


@pytest.mark.parametrize(
    ("file", "why"), [("/nowhere/x.jsonl", "No such file or directory"), ("a\0b", "embedded null byte")]
)
def test_a_file_that_cannot_be_saved_to_gets_its_reason_and_the_chat_goes_on(file: str, why: str) -> None:
    out, notes, answered, _ = talked(f"hello\n/save {file}\nagain\n", scripted(lambda _: "hi"))
    assert why in notes
    assert out == "hi\nhi\n"
    assert not answered


def test_an_unknown_command_is_no_message() -> None:
    model = scripted()
    _, notes, _, _ = talked("/nothing\n/help\n", model)
    assert "there is no command /nothing" in notes
    assert all(name in notes for name in ("/system", "/reset", "/save", "/temperature", "/compare", "/quit"))
    assert not model.generator.requests


def test_two_models_are_asked_the_same_and_each_remembers_its_own_answers() -> None:
    one, other = scripted(lambda _: "first", name="one"), scripted(lambda _: "second", name="other")
    out, _, _, chat = talked("hello\nmore\n", one, other)
    assert out == "[one]\nfirst\n[other]\nsecond\n" * 2
    assert [talk.messages[1].content for talk in chat.talks] == ["first", "second"]
    _, _, _, chat = talked("/compare runs/third\nhello\n", scripted())
    assert [model.name for model in chat.models] == ["scripted", "third"]


def test_a_checkpoints_folder_is_of_the_first_model_alone(
    drivetrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, str]] = []

    def load(place: str | Path, *, checkpoint: str, **_: Any) -> ScriptedModel:
        loaded.append((str(place), checkpoint))
        return scripted()

    monkeypatch.setattr("drivetrain.inference.loading.load_model", load)
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):  # else the hub is asked for them
        (tmp_path / name).mkdir()
    pipe = io.TextIOWrapper(io.BytesIO(b"/compare three\n"))
    for given, others in ((str(tmp_path), "best"), ("last", "last")):
        loaded.clear()
        pipe.seek(0)
        monkeypatch.setattr("sys.stdin", pipe)
        code, _, err = drivetrain("chat", "one", "--compare", "two", "--checkpoint", given)
        assert code == 0, err
        assert loaded == [("one", given), ("two", others), ("three", others)]


def test_two_models_are_offered_no_functions(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS.replace("return {", "raise SystemExit; return {"))
    call = '<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>'
    one, other = scripted(lambda _: call), scripted(lambda _: call)
    _, notes, answered, chat = talked("Weather?\n", one, other, functions=read_functions(tmp_path / "tools.py"))
    assert answered
    assert "functions are not offered while two models are compared" in notes
    for talk in chat.talks:
        assert [(each.role, each.tool_calls) for each in talk.messages] == [("user", ()), ("assistant", ())]
        assert "weather" not in one.tokenizer.decode(list(one.generator.requests[0].ids))


@pytest.mark.parametrize("end", ["Ctrl-C", "an error"])
def test_a_reply_that_is_cut_short_calls_nothing(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    text = 'Wait.\n<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>'
    model = scripted(lambda _: text, fails=None if end == "Ctrl-C" else MemoryError("no memory left"))
    if end == "Ctrl-C":
        steps = Replies.steps

        def stopped(replies: Replies) -> Iterator[Step]:
            yield from steps(replies)
            raise KeyboardInterrupt

        monkeypatch.setattr(Replies, "steps", stopped)
    _, notes, answered, chat = talked("Weather?\n", model, functions=read_functions(tmp_path / "tools.py"))
    assert not answered
    assert "weather(" not in notes
    assert [(each.role, each.content) for each in chat.talks[0].messages] == [
        ("user", "Weather?"),
        ("assistant", "Wait."),
    ]


def test_ctrl_c_in_a_function_or_a_command_does_not_end_the_chat(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def wait() -> str:\n    raise KeyboardInterrupt\n")
    call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
    model = scripted()
    model.generator.script = lambda _: call * 2 if len(model.generator.requests) == 1 else "fine"
    out, notes, _, chat = talked("Go\nAnd?\n", model, functions=read_functions(tmp_path / "tools.py"))
    assert [each.role for each in chat.talks[0].messages] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert notes.count("wait({}) = error: the user stopped it") == 2
    assert out.endswith("fine\n")

    def stopped(_: str) -> Any:
        raise KeyboardInterrupt

    chat.load = stopped
    assert not chat.run(piped_lines(io.BytesIO(b"/compare other\n")))
    assert len(chat.models) == 1


def test_a_functions_result_that_the_context_has_no_room_for_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def book() -> str:\n    return 'word ' * 1000\n")
    call = '<tool_call>{"name": "book", "arguments": {}}</tool_call>'
    model = scripted(context_length=2000)
    model.generator.script = lambda _: call if len(model.generator.requests) == 1 else "long"
    out, _, answered, chat = talked("Read.\n", model, functions=read_functions(tmp_path / "tools.py"))
    assert (out, answered) == ("long\n", True)
    assert chat.talks[0].messages[2].content.startswith("error: the result has 5,000 characters")
    assert all(len(each.ids) < 2000 for each in model.generator.requests)


def test_a_conversation_that_fills_the_context_is_to_begin_anew() -> None:
    model = scripted(lambda _: "word " * 20, context_length=240)
    out, notes, answered, chat = talked(f"{'long ' * 20}\nhello\n/reset\nhello\n", model)
    assert out.count("word") == 40
    assert not answered
    assert "message: with it the conversation has" in notes
    assert "which fill the model's context of 240" in notes
    assert "/reset begins anew" in notes
    assert [each.content for each in chat.talks[0].messages] == ["hello", "word " * 20]


def test_a_message_that_no_context_has_room_for_is_not_blamed_on_the_conversation() -> None:
    model = scripted(lambda _: "fine", context_length=200)
    _, notes, _, chat = talked(f"hello\n{'long ' * 100}\n", model)
    assert "with it the conversation" not in notes
    assert len(model.generator.requests[-1].ids) > 500  # the generator refuses it
    assert len(chat.models) == 1


def test_what_a_template_has_no_place_for_is_refused() -> None:
    plain = scripted()
    plain.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
    plain.template = ChatTemplate(plain.tokenizer, None, "template")
    function = Function("f", str, create_model("f"))
    for model in (scripted(template=None), plain):
        with pytest.raises(UserError) as refused:
            talked("", model, system="Be kind.", functions=[function])
        assert [each.field for each in refused.value.problems] == ["--tools", "system message"]
        _, notes, answered, chat = talked("/system Be kind.\nhello\n", model)
        assert "no chat template with a place for a system message" in notes
        assert (chat.settings.system, answered) == (None, False)
        assert [each.role for each in chat.talks[0].messages] == ["user", "assistant"]


def test_a_saved_conversation_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("mine")
    _, notes, _, _ = talked(f"hello\n/save {tmp_path / 'mine.jsonl'}\n", scripted())
    assert "is there already" in notes
    assert (tmp_path / "mine.jsonl").read_text() == "mine"


def test_functions_are_called_and_their_results_read(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    model = scripted()

    def script(request: Request) -> str:
        text = model.tokenizer.decode(list(request.ids))
        if "<tool_response>\n{" not in text:
            return '<tool_call>{"name": "weather", "arguments": {"town": "Köln"}}</tool_call>'
        return "It is warm."

    model.generator.script = script
    out, notes, _, chat = talked("Weather?\n", model, functions=read_functions(tmp_path / "tools.py"))
    assert out == "It is warm.\n"
    assert 'weather({"town": "Köln"}) = {"town": "Köln", "degrees": 20, "unit": "C"}' in notes
    assert [each.role for each in chat.talks[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert '"enum": ["C", "F"]' in model.tokenizer.decode(list(model.generator.requests[0].ids))


def test_calls_that_cannot_be_made_say_why(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    functions = read_functions(tmp_path / "tools.py")
    assert [each.name for each in functions] == ["weather", "fails"]
    assert (
        result_of(Call("nothing", "{}"), functions) == "error: there is no function nothing; there are weather, fails"
    )
    assert result_of(Call("weather", "{}"), functions) == "error: town: Field required"
    assert "Extra inputs are not permitted" in result_of(Call("weather", '{"town": "a", "x": 1}'), functions)
    assert "Invalid JSON" in result_of(Call("weather", "{"), functions)
    assert result_of(Call("fails", '{"number": 1}'), functions) == "error: RuntimeError: no luck"
    circular: list[Any] = []
    circular.append(circular)
    for value, why in (({(1, 2): 3}, "keys must be"), (circular, "Circular reference")):
        odd = Function("odd", lambda value=value: value, create_model("odd"))
        assert why in result_of(Call("odd", "{}"), [odd])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(x): ...", "x has no annotation"),
        ("def f(*x: int): ...", "cannot be given by its name"),
        ("x = 1", "defines no public function"),
        ("1 / 0", "ZeroDivisionError"),
        ("class A: ...\ndef f(x: A): ...", "no JSON schema"),
    ],
)
def test_a_file_without_usable_functions_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(UserError, match=why):
        read_functions(tmp_path / "tools.py")


def test_a_model_that_fails_leaves_the_chat_alive() -> None:
    out, notes, answered, _ = talked("hello\n", scripted(lambda _: "par", fails=MemoryError("no memory left")))
    assert (out, answered) == ("par\n", False)
    assert "the model failed: MemoryError: no memory left" in notes


def test_a_model_without_a_template_continues_each_text() -> None:
    model = scripted(template=None)
    talked("Once upon\na time\n", model)
    assert [model.tokenizer.decode(list(each.ids)) for each in model.generator.requests] == ["Once upon", "a time"]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert visible("a\x1b[2Jb\x9bc\r\x07d\n\té好") == "a[2Jbcd\n\té好"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\ntwo", ""),
        ("one\n\n", ""),
        ("- one\n\n- two", ""),
        ("a\n\n```\nb\n\nc", "a\n\n"),
        ("a\n\n```\nb\n\nc\n```\n\nd", "a\n\n```\nb\n\nc\n```\n\n"),
    ],
)
def test_markdown_is_cut_where_nothing_before_can_change(text: str, complete: str) -> None:
    assert complete_blocks(text) == (complete, text[len(complete) :])


# --- in a pseudo-terminal ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from drivetrain.cli.console import errors, output
from drivetrain.inference.chat.chat import Chat
from drivetrain.inference.chat.commands import COMMANDS
from drivetrain.inference.chat.lines import history_file, terminal_lines
from drivetrain.inference.chat.talk import Settings
from tests.scripted_model import scripted

def script(request):
    text = model.tokenizer.decode(list(request.ids))
    if "endless" in text.split("user")[-1]:
        return "endless " * 2000
    return f"**Bold** and 你好, number {text.count('user')}."

model = scripted(script, seconds=0.002)
chat = Chat([model], Settings(), lambda place: scripted(name=place), output, errors)
chat.run(terminal_lines(history_file(), [*COMMANDS]))
print("ended", [message.content[:20] for message in chat.talks[0].messages])
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Any:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color"}
    environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # pexpect answers no questions about the cursor
    child = pexpect.spawn(
        sys.executable, [str(file)], env=environment, encoding="utf-8", timeout=60, dimensions=(30, 100)
    )
    child.expect(">")
    yield child
    child.close(force=True)


def test_a_chat_at_a_terminal(terminal: Any, tmp_path: Path) -> None:
    terminal.send("早上好\r")
    terminal.expect("\x1b\\[1mBold")  # bold, and no asterisks
    terminal.expect("你好, number 1")
    terminal.expect(">")
    terminal.send("endless\r")
    terminal.expect("endless endless")
    terminal.sendintr()  # stops the answer, and not the chat
    terminal.expect("stopped")
    assert "^C" not in terminal.before  # which would move the cursor in what is drawn
    terminal.expect(">")
    terminal.send("two\x1b\rlines\r")  # Esc Enter begins a line
    terminal.expect("number 3")
    terminal.expect(">")
    terminal.sendintr()  # at an empty line
    terminal.expect("/quit ends the chat")
    terminal.send("/reset\r")
    terminal.expect("begins anew")
    terminal.send("\x1b[A\x1b[A\r")  # two up in the history
    terminal.expect("number 1")
    terminal.expect(">")
    terminal.sendeof()
    terminal.expect("ended (.*)\r\n")
    assert terminal.match[1] == "['two\\nlines', '**Bold** and 你好, num']"
    history = tmp_path / "drivetrain" / "chat_history"
    assert "早上好" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_system_whose_terminals_have_no_settings_draws_replies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "termios", None)
    with without_echo():
        pass
