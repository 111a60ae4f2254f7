"""The same data through Hugging Face datasets: `python bench/data_hf.py KIND PATH TOKENIZER PROCESSES RESULT.json`.

load_dataset and map, as its users write it; times are from behind the imports to the mapped data set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import psutil
from transformers import AutoTokenizer

MAX_LENGTH, BLOCK = 128, 256


def main(kind: str, path: str, tokenizer_path: str, processes: int, result: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    before, imports = psutil.Process().memory_full_info().pss, time.process_time()
    start = time.perf_counter()
    held = loaded(kind, path, processes)
    read = time.perf_counter() - start
    work = mapped(kind, tokenizer)
    if work is not None:
        held = held.map(work, batched=True, num_proc=processes, remove_columns=removed(held))
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "read": read, "rows": len(held)}
    result.write_text(json.dumps({**found, "imports_bytes": before, "imports_cpu_seconds": imports}))


def loaded(kind: str, path: str, processes: int) -> Any:
    given: dict[str, Any] = {"split": "train"}
    match kind:
        case "conversations":
            return datasets.load_dataset("json", data_files=path, **given)
        case "reviews":
            return datasets.load_dataset("csv", data_files=path, **given)
        case "text":
            return datasets.load_dataset("text", data_files=path, sample_by="paragraph", **given)
        case "pictures":
            return datasets.load_dataset("imagefolder", data_dir=path, num_proc=processes, **given)
        case "shards":
            files = sorted(str(file) for file in Path(path).iterdir())
            return datasets.load_dataset("json", data_files=files, num_proc=processes, **given)
    raise ValueError(kind)


def removed(held: Any) -> list[str]:
    return [name for name in held.column_names if name != "label"]


def mapped(kind: str, tokenizer: Any) -> Any:
    if kind == "conversations":

        def rendered(rows: Any) -> Any:
            texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in rows["messages"]]
            return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

        return rendered
    if kind == "reviews":
        return lambda rows: {"input_ids": tokenizer(rows["text"], truncation=True, max_length=MAX_LENGTH)["input_ids"]}
    if kind in {"text", "shards"}:

        def grouped(rows: Any) -> Any:
            ids = list(chain(*tokenizer(rows["text"])["input_ids"]))
            return {"input_ids": [ids[at : at + BLOCK] for at in range(0, len(ids) - BLOCK + 1, BLOCK)]}

        return grouped
    return None


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
