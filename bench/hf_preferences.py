"""Preferences and rewards as TRL's users write them: `python bench/hf_preferences.py RUN.json RESULT.json`.

The run names the stage: dpo, kto, reward or grpo. `arguments` are what the case sets of the trainer's configuration;
the rest is left at its defaults.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import datasets
import transformers
import trl
from answer_rewards import distinct
from memory import Resident

TRAINERS = {
    "dpo": ("DPOTrainer", "DPOConfig"),
    "kto": ("KTOTrainer", "KTOConfig"),
    "reward": ("RewardTrainer", "RewardConfig"),
    "grpo": ("GRPOTrainer", "GRPOConfig"),
}


def main(run_file: Path, result_file: Path) -> None:
    run = json.loads(run_file.read_text())
    kind, configuration = (getattr(trl, name) for name in TRAINERS[run["stage"]])  # imported before the clock starts
    for name in ("LlamaForCausalLM", "LlamaForSequenceClassification"):
        getattr(transformers, name)
    resident = Resident()
    start = time.perf_counter()
    transformers.set_seed(run["seed"])
    lines = Path(run["train"]).read_text(encoding="utf-8").splitlines()
    rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    more = {"reward_funcs": distinct} if run["stage"] == "grpo" else {}
    trainer = kind(model=run["model"], args=configuration(**run["arguments"]), train_dataset=rows, **more)
    busy = time.process_time()
    done = trainer.train()
    busy = time.process_time() - busy
    key = "completions/mean_length"
    lengths = [each[key] for each in trainer.state.log_history if key in each]
    result = {
        "rate": run["samples"] / done.metrics["train_runtime"],
        "processor_rate": run["samples"] / busy,
        "whole_seconds": time.perf_counter() - start,
        "memory": resident.added(),
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "answer_tokens": sum(lengths) / max(len(lengths), 1),
    }
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
