"""First starts over conversations: reading, templates, tokens and targets, beside Hugging Face datasets' read and map.

    python bench/data_made.py conversations made.jsonl --rows 500000
    python bench/first_start.py made.jsonl --rounds 2 [--datasets PYTHON]

Each round runs both in turn, in processes of their own with an empty cache, and prints the wall time and the CPU
seconds of all their processes. `datasets` renders each conversation once and tokenises it in batches, with as many
processes; it finds no targets. PYTHON: an interpreter that has the package datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "src/drivetrain/data/language/templates/chatml.jinja"
TOKENS = 8000

OURS = """
import sys
from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import conversation_samples
from drivetrain.data.language.sets import open_sets, read_set
from drivetrain.data.tokenised import load_tokenizer
path, cache, tokenizer = sys.argv[1:4]
loaded = load_tokenizer(tokenizer, "tokenizer")
data = LanguageData.model_validate({"train": path, "cache": cache, "length": 512})
(opened,) = open_sets(data.train, data, "conversations", "train")
read = read_set(opened, 0, "train")
print(len(conversation_samples(read.conversations, ChatTemplate(loaded, "chatml", "f"), loaded, data).samples))
"""

THEIRS = """
import sys
import datasets
from transformers import AutoTokenizer
path, cache, tokenizer, template, processes = sys.argv[1:6]
datasets.disable_progress_bars()
loaded = AutoTokenizer.from_pretrained(tokenizer)
template = open(template).read()
def tokenise(batch):
    texts = loaded.apply_chat_template(batch["messages"], chat_template=template, tokenize=False)
    return {"input_ids": loaded(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]}
rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
mapped = rows.map(tokenise, batched=True, num_proc=int(processes), remove_columns=rows.column_names)
print(len(mapped))
"""


def measured(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall and CPU seconds of a command and all its children."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(cpu, 1)}


def tokenizer_folder(path: Path, folder: Path) -> Path:
    from drivetrain.data.language.vocabularies import bpe_tokenizer

    with path.open(encoding="utf-8") as opened:
        rows = [json.loads(line) for line, _ in zip(opened, range(5000), strict=False)]
    texts = [message["content"] for row in rows for message in row["messages"]]
    bpe_tokenizer(texts, TOKENS, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--datasets", help="an interpreter that has the package datasets")
    parser.add_argument("--folder", type=Path, help="where caches lie meanwhile")
    given = parser.parse_args()
    processes = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        tokenizer = tokenizer_folder(given.path, Path(folder) / "tokenizer")
        cache = Path(folder) / "cache"
        common = [str(given.path), str(cache), str(tokenizer)]
        for number in range(given.rounds):
            ours = measured([sys.executable, "-c", OURS, *common], {})
            print(json.dumps({"round": number, "of": "drivetrain", **ours}), flush=True)
            shutil.rmtree(cache)
            if given.datasets:
                more = [str(TEMPLATE), str(processes)]
                environment = {"HF_HOME": f"{folder}/hub", "PYTHONPATH": "", "TOKENIZERS_PARALLELISM": "false"}
                theirs = measured([given.datasets, "-c", THEIRS, *common, *more], environment)
                print(json.dumps({"round": number, "of": "datasets", **theirs}), flush=True)
                shutil.rmtree(cache)


if __name__ == "__main__":
    main()
