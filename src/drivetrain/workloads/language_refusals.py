"""Reports everything that is wrong with the rows of a language model's data at once: rows that cannot be read, rows
that cannot be used, and conversations that the template does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from drivetrain.config.language_data import LanguageData
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.prompt_replies import answered
from drivetrain.data.language.sets import DataSet, OpenSet, bad_row_problems, read_set
from drivetrain.errors import Problem, UserError, together

T = TypeVar("T")
MOST_RENDERED = 10_000  # conversations of a data set that is refused anyway: its user should not wait long for that


def refused_behind(earlier: Sequence[Problem], work: Callable[[], T]) -> T:
    """Returns the result of `work`. Raises UserError with its problems behind the earlier ones, which are no error by
    themselves."""
    try:
        return work()
    except UserError as error:
        raise UserError([*earlier, *error.problems]) from None


@dataclass(frozen=True)
class ReadSets:
    """The data sets of each field of the run file, all rows read. problems: of rows that may not be left out."""

    of: Mapping[str, list[DataSet]]
    problems: Sequence[Problem]

    def check(self, template: ChatTemplate | None, data: LanguageData) -> None:
        """Raises UserError if there are problems, with the conversations that the template refuses too."""
        if not self.problems:
            return
        refused = [
            problem
            for field, sets in self.of.items()
            for problem in bad_row_problems([_refused(each, template, data) for each in sets if template], field)
        ]
        raise UserError([*self.problems, *refused])


def read_sets(
    given: Mapping[str, Sequence[OpenSet]], broken: Sequence[Problem], data: LanguageData, seed: int
) -> ReadSets:
    """Reads all rows. broken: problems of rows that could not be read.

    Raises UserError at once where the template would add nothing: if bad rows are left out anyway, or no row is left.
    """
    calls = [partial(_read, field, opened, seed) for field, opened in given.items()]
    read = refused_behind(broken, partial(together, calls))
    named = dict(zip(given, read, strict=True))
    bad = [problem for field, sets in named.items() for problem in bad_row_problems(sets, field, data.bad_rows)]
    problems = [*broken, *bad]
    if problems and not (data.bad_rows == "error" and any(each.texts or each.conversations for each in read[0])):
        raise UserError(problems)
    return ReadSets(named, problems)


def _read(field: str, opened: Sequence[OpenSet], seed: int) -> list[DataSet]:
    return together([partial(read_set, each, seed, field) for each in opened])


def _refused(dataset: DataSet, template: ChatTemplate, data: LanguageData) -> DataSet:
    whole = [answered(each) for each in dataset.conversations[:MOST_RENDERED]]
    refused = template.refused(whole, data.train_on)
    return DataSet(dataset.name, dataset.rows, bad=[BadRow(where, why) for where, why in refused])
