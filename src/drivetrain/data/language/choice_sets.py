"""Reads questions of multiple choice from local files as MMLU, C-Eval and CMMLU ship them, and writes their prompts.

A folder has test/, val/ and dev/ with a CSV a subject: `anatomy_test.csv` without a header (MMLU, Hendrycks et al.
2021, arXiv:2009.03300), `law_val.csv` with id, question, A to D, answer (C-Eval, Huang et al. 2023, arXiv:2305.08322),
or `anatomy.csv` with Question, A to D, Answer (CMMLU, Li et al. 2023, arXiv:2306.09212). Subjects' names and categories
come from `subject_mapping.json` or `mapping.json`, if one lies there.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import Problem, UserError, problem

LETTERS = "ABCD"
FIELD = "--multiple-choice"
SHOTS = "dev"  # whose questions stand answered before the one that is asked
MAPPINGS = ("subject_mapping.json", "mapping.json")


@dataclass(frozen=True)
class Layout:
    """How a benchmark's prompts are written. description: before all, with {subject}."""

    answer: str
    description: str


MMLU = Layout("Answer:", "The following are multiple choice questions (with answers) about {subject}.\n\n")
CEVAL = Layout("答案：", "以下是中国关于{subject}的单项选择题，请选出其中的正确答案。\n\n")
CMMLU = Layout("答案：", "以下是关于{subject}的单项选择题，请直接给出正确答案的选项。\n\n")


@dataclass(frozen=True)
class Question:
    """right: the number of the right choice."""

    text: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Subject:
    """shots: answered examples, in the file's order. title: its name in the prompt."""

    name: str
    title: str
    category: str | None
    layout: Layout
    questions: tuple[Question, ...]
    shots: tuple[Question, ...]

    def prompt(self, question: Question, shots: int) -> str:
        """Returns the text that a letter, after a space, continues."""
        examples = (f"{self._asked(each)} {LETTERS[each.right]}\n\n" for each in self.shots[:shots])
        return self.layout.description.format(subject=self.title) + "".join(examples) + self._asked(question)

    def _asked(self, question: Question) -> str:
        choices = (f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, question.choices, strict=True))
        return f"{question.text.strip()}\n{''.join(choices)}{self.layout.answer}"


def read_subjects(folder: Path, only: Sequence[str], shots: int) -> list[Subject]:
    """Returns the subjects in a folder in the order of their names. only: names of those wanted; none for all.

    Raises UserError with all that is wrong with the files, and for fewer examples than `shots`.
    """
    split = next((each for each in ("test", "val") if _has_answers(folder / each)), None)
    if split is None:
        why = f"{folder} has no test/ or val/ with CSV files that have answers"
        raise problem(FIELD, why, "give the folder of MMLU, C-Eval or CMMLU that holds test/, val/ and dev/")
    files = {_subject_of(file, split): file for file in sorted((folder / split).glob("*.csv"))}
    problems = [
        Problem("--subject", f"{folder / split} has no {name}", f"it has: {', '.join(sorted(files))[:300]}")
        for name in only
        if name not in files
    ]
    titles, found = _titles(folder), list[Subject]()
    for name in [name for name in files if not only or name in only]:
        try:
            found.append(_subject(name, files[name], folder, titles.get(name, (name.replace("_", " "), None)), shots))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return found


def _subject(name: str, file: Path, folder: Path, named: tuple[str, str | None], shots: int) -> Subject:
    layout, questions = _read(file)
    places = (folder / SHOTS / f"{name}_{SHOTS}.csv", folder / SHOTS / f"{name}.csv")
    of_shots = next((place for place in places if place.is_file()), None)
    examples = () if of_shots is None or not shots else _read(of_shots)[1]
    if len(examples) < shots:
        why = f"{name} has {len(examples)} answered examples in {folder / SHOTS}, and {shots} were asked for"
        raise problem("--shots", why, f"give --shots {len(examples)}")
    return Subject(name, *named, layout, questions, examples)


def _subject_of(file: Path, split: str) -> str:
    return file.stem.removesuffix(f"_{split}")


def _has_answers(folder: Path) -> bool:
    file = min(folder.glob("*.csv"), default=None)
    if file is None:
        return False
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            head = [cell.lower() for cell in next(csv.reader(lines), [])]
    except (OSError, UnicodeDecodeError, csv.Error):
        return True  # reading it reports what is wrong
    return "question" not in head or "answer" in head


def _read(file: Path) -> tuple[Layout, tuple[Question, ...]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise problem(FIELD, f"{file} cannot be read: {error}", "give the CSV files as they ship, in UTF-8") from None
    head = rows[0] if rows else []
    lower = [cell.strip().lower() for cell in head]
    if {"question", "answer", *"abcd"} <= set(lower):
        layout = CMMLU if "Question" in head else CEVAL
        places = [lower.index(name) for name in ("question", *"abcd", "answer")]
        return layout, tuple(_questions(file, rows, 1, places))
    return MMLU, tuple(_questions(file, rows, 0, range(6)))


def _questions(file: Path, rows: Sequence[Sequence[str]], first: int, places: Sequence[int]) -> Iterator[Question]:
    count = 0
    for number, row in enumerate(rows[first:], first + 1):
        if not any(row):
            continue
        cells = [row[place] if place < len(row) else "" for place in places]
        right = cells[5].strip().upper()
        if len(right) != 1 or right not in LETTERS:
            why = f"row {number} of {file} has {cells[5][:40]!r} for its answer"
            raise problem(FIELD, why, "give question, four choices and A, B, C or D in each row")
        count += 1
        yield Question(cells[0], tuple(cells[1:5]), LETTERS.index(right))
    if not count:
        raise problem(FIELD, f"{file} has no question", "take it away, or give the whole file")


def _titles(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Returns subject → (its name, category). C-Eval's file has lists of English name, Chinese name and category."""
    file = next((folder / name for name in MAPPINGS if (folder / name).is_file()), None)
    if file is None:
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return {name: _title(one) for name, one in raw.items()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        why = f"{file} cannot be read: {type(error).__name__}: {error}"
        raise problem(FIELD, why, "correct it, or take it away: then files' names are taken") from None


def _title(entry: Any) -> tuple[str, str | None]:
    if isinstance(entry, list):
        return str(entry[1]), str(entry[2])
    return str(entry["name"]), str(entry["category"])
