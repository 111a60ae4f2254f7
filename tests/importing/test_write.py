"""The texts in a run file that an import writes are read as they were given."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from drivetrain.importing.write import as_yaml, in_yaml
from tests.properties import examples

lines = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=8)


@settings(deadline=None, max_examples=examples(100))
@example(["?x", ": x", ":", "?"])
@given(st.lists(lines, min_size=1, max_size=4))
def test_lists_of_texts_are_read_as_they_were(texts: list[str]) -> None:
    assert read(as_yaml({"stop": texts})) == {"stop": texts}
    assert read(f"[{in_yaml(texts)}]") == [texts]


def read(text: str) -> object:
    return YAML(typ="safe", pure=True).load(text)
