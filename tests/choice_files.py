"""Small files of questions as MMLU, C-Eval and CMMLU ship them, and as lm-evaluation-harness reads local ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from drivetrain.data.language.choice_sets import Subject

Row = tuple[str, list[str], str]  # question, choices, answer


def made(count: int, seed: int, chinese: bool = False) -> list[Row]:
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        one, other = dice.integers(2, 60, 2).tolist()
        sums = [one + other, *(int(each) for each in one + other + dice.permutation([-3, 1, 7]))]
        order = dice.permutation(4)
        question = f"{one} 加 {other} 等于多少？ " if chinese else f"What is {one}, plus {other}? "
        found.append((question, [str(sums[place]) for place in order], "ABCD"[int(np.argmin(order))]))
    return found


def mmlu(folder: Path, subjects: Sequence[str], count: int = 12) -> Path:
    for number, name in enumerate(subjects):
        for split, size in (("test", count + number), ("val", 2), ("dev", 5)):
            rows = [[text, *choices, answer] for text, choices, answer in made(size, 10 * number + len(split) + size)]
            write(folder / split / f"{name}_{split}.csv", rows)
    return folder


def ceval(folder: Path, subjects: Sequence[str], count: int = 10) -> Path:
    """Its test/ has no answers; its dev/ explains them."""
    for number, name in enumerate(subjects):
        for split, size in (("test", 4), ("val", count), ("dev", 5)):
            made_rows = enumerate(made(size, 7 * number + size, chinese=True))
            rows = [[str(n), text, *choices, answer, "因为"] for n, (text, choices, answer) in made_rows]
            width = {"test": 6, "val": 7, "dev": 8}[split]
            head = ["id", "question", *"ABCD", "answer", "explanation"]
            write(folder / split / f"{name}_{split}.csv", [row[:width] for row in [head, *rows]])
    names = {name: [name.title(), f"科目{name}", "STEM" if number else "Other"] for number, name in enumerate(subjects)}
    (folder / "subject_mapping.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    return folder


def cmmlu(folder: Path, subjects: Sequence[str], count: int = 10) -> Path:
    for number, name in enumerate(subjects):
        for split, size in (("test", count), ("dev", 5)):
            made_rows = enumerate(made(size, 3 * number + size, chinese=True))
            rows = [[str(n), text, *choices, answer] for n, (text, choices, answer) in made_rows]
            write(folder / split / f"{name}.csv", [["", "Question", *"ABCD", "Answer"], *rows])
    return folder


def write(file: Path, rows: Sequence[Sequence[str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows(rows)


def harness_task(folder: Path, layout: str, subject: Subject) -> str:
    """Writes a task of lm-evaluation-harness over local files, and returns its name. The questions go through JSON; the
    prompt is put together by the harness."""
    folder.mkdir(exist_ok=True)
    for split, questions in (("test", subject.questions), ("dev", subject.shots)):
        lines = [{"q": each.text, "c": list(each.choices), "a": each.right} for each in questions]
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        (folder / f"{subject.name}-{split}.json").write_text(text, encoding="utf-8")
    files = {split: str(folder / f"{subject.name}-{split}.json") for split in ("test", "dev")}
    answer = "Answer:" if layout == "mmlu" else "答案："
    task: dict[str, Any] = {
        "task": f"{layout}_{subject.name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice",
        "description": subject.layout.description.format(subject=subject.title),
        "doc_to_text": "{{q.strip()}}\nA. {{c[0]}}\nB. {{c[1]}}\nC. {{c[2]}}\nD. {{c[3]}}\n" + answer,
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    with (folder / f"{subject.name}.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(task, file)
    return str(task["task"])
