"""Reports everything that is wrong with the rows of a language model's data at once: rows that cannot be read, rows
that cannot be used, and conversations that the template does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from drivetrain.config.language import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.sets import DataSet, OpenSet, bad_row_problems, read_set
from drivetrain.errors import Problem, UserError, together

T = TypeVar("T")
MOST_RENDERED = 10_000  # conversations of a data set that is refused anyway: its user should not wait long for that

FindTemplate = Callable[[Sequence[DataSet]], ChatTemplate | None]


def told_behind(earlier: Sequence[Problem], work: Callable[[], T]) -> T:
    """Returns the result of `work`. Raises UserError with its problems behind the earlier ones, which are no error by
    themselves."""
    try:
        return work()
    except UserError as error:
        raise UserError([*earlier, *error.problems]) from None


def read_sets(
    given: Mapping[str, Sequence[OpenSet]],
    broken: Sequence[Problem],
    data: LanguageData,
    seed: int,
    find_template: FindTemplate,
) -> list[list[DataSet]]:
    """Returns for each field of the run file its data sets, all rows read.

    Raises UserError with the `broken` rows, with those that cannot be used and must not be left out, and, if there are
    either, with the conversations that the template refuses. find_template: for the first field's data sets.
    """
    calls = [partial(_read, field, opened, seed) for field, opened in given.items()]
    read = told_behind(broken, partial(together, calls))
    named = dict(zip(given, read, strict=True))
    strict = data.bad_rows == "error"
    bad = [problem for field, sets in named.items() for problem in bad_row_problems(sets, field, data.bad_rows)]
    if broken or bad:
        raise UserError([*broken, *bad, *(_of_template(named, data, find_template) if strict else [])])
    return read


def _read(field: str, opened: Sequence[OpenSet], seed: int) -> list[DataSet]:
    return together([partial(read_set, each, seed, field) for each in opened])


def _of_template(
    read: Mapping[str, Sequence[DataSet]], data: LanguageData, find_template: FindTemplate
) -> list[Problem]:
    first = next(iter(read.values()))
    if not any(each.texts or each.conversations for each in first):
        return []  # nothing that a tokenizer could be made of
    try:
        template = find_template(first)
        if template is None:
            return []
        return [
            problem
            for field, sets in read.items()
            for problem in bad_row_problems([_refused(each, template, data) for each in sets], field)
        ]
    except UserError as error:
        return list(error.problems)


def _refused(dataset: DataSet, template: ChatTemplate, data: LanguageData) -> DataSet:
    refused = template.refused(dataset.conversations[:MOST_RENDERED], data.train_on)
    return DataSet(dataset.name, dataset.rows, bad=[BadRow(where, why) for where, why in refused])
