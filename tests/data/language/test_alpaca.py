from __future__ import annotations

from typing import Any

import pytest

from drivetrain.data.language.alpaca import read_alpaca
from drivetrain.data.language.conversations import Message
from drivetrain.data.language.row_schema import RowError, RowSchema

ROW = {"instruction": "Add", "input": "2 and 3", "output": "5"}
WITH_HISTORY = RowSchema("alpaca", {"history": "history"})


def words(row: dict[str, Any], form: RowSchema) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in read_alpaca(row, form)]


def test_input_follows_the_instruction_on_a_line_of_its_own() -> None:
    assert read_alpaca(ROW, RowSchema("alpaca")) == [Message("user", "Add\n2 and 3"), Message("assistant", "5")]
    for nothing in ({"input": ""}, {"input": None}, {"input": " "}):
        assert words({**ROW, **nothing}, RowSchema("alpaca"))[0] == ("user", "Add")


def test_columns_that_are_named_replace_the_defaults_as_in_llama_factory() -> None:
    """Its entry firefly: the prompts stand in the column "input", which must not be added to itself."""
    firefly = RowSchema("alpaca", {"prompt": "input", "response": "target"})
    assert words({"input": "2 and 3", "target": "5"}, firefly) == [("user", "2 and 3"), ("assistant", "5")]
    assert words(ROW, RowSchema("alpaca", {"response": "output"})) == [("user", "Add\n2 and 3"), ("assistant", "5")]
    assert words({**ROW, "target": "6"}, firefly) == [("user", "2 and 3"), ("assistant", "6")]


def test_history_comes_before_the_row() -> None:
    row = {**ROW, "history": [["Hi", "Hello"], ("Ready?", "Yes")]}
    before = [("user", "Hi"), ("assistant", "Hello"), ("user", "Ready?"), ("assistant", "Yes")]
    assert words(row, WITH_HISTORY)[:4] == before
    assert all(each.trained for each in read_alpaca(row, WITH_HISTORY))
    assert words(row, RowSchema("alpaca")) == words(ROW, RowSchema("alpaca"))  # not named, so not read
    for nothing in (None, []):
        assert words({**ROW, "history": nothing}, WITH_HISTORY) == words(ROW, RowSchema("alpaca"))


@pytest.mark.parametrize("chosen", ["better", {"from": "gpt", "value": "better"}, {"role": "x", "content": "better"}])
def test_of_preferences_the_chosen_answer_is_the_reply(chosen: Any) -> None:
    row = {"instruction": "Hi", "output": "not this", "chosen": chosen, "rejected": "worse"}
    assert words(row, RowSchema("alpaca", ranking=True)) == [("user", "Hi"), ("assistant", "better")]


BAD = {
    "no output": ({"instruction": "a"}, "output is missing"),
    "null": ({"instruction": "a", "output": None}, "output is missing"),
    "empty output": ({"instruction": "a", "output": " \n"}, "output is empty"),
    "no instruction": ({"output": "a"}, "instruction is missing"),
    "empty instruction": ({"instruction": "", "input": "x", "output": "a"}, "instruction is empty"),
    "a list": ({"instruction": "a", "output": ["b"]}, "output is a list, not a text"),
    "an input that is no text": ({**ROW, "input": {}}, "input is an object, not a text"),
    "a history that is no list": ({**ROW, "history": "x"}, "history is a text, not a list of pairs"),
    "a history of texts": ({**ROW, "history": ["ab"]}, "pair 1 of the history is no list"),
    "three in a pair": ({**ROW, "history": [["a", "b"], ["a", "b", "c"]]}, "pair 2 of the history is no list"),
    "half a pair": ({**ROW, "history": [["a", None]]}, "the response in pair 1 of the history is missing"),
}


@pytest.mark.parametrize(("row", "why"), BAD.values(), ids=BAD)
def test_a_row_that_lacks_something_says_what(row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError) as caught:
        read_alpaca(row, WITH_HISTORY if "history" in row else RowSchema("alpaca"))
    assert str(caught.value).startswith(why)


def test_preferences_without_a_chosen_answer_say_so() -> None:
    for row, why in [({}, "chosen is missing"), ({"chosen": [1]}, "chosen is a list"), ({"chosen": {}}, "is missing")]:
        with pytest.raises(RowError, match=why):
            read_alpaca({**ROW, **row}, RowSchema("alpaca", ranking=True))
