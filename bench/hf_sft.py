"""Supervised fine-tuning as users of others write it: `python bench/hf_sft.py RUN.json RESULT.json`.

The run says which: `side` is trainer (the Transformers Trainer, conversations tokenised ahead, DataCollatorForSeq2Seq)
or trl (TRL's SFTTrainer, given prompts and completions). Both train on the replies alone. `arguments` are what the case
sets of their training arguments; the rest is left at its defaults.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import transformers
from memory import Resident
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

IGNORED = -100
Rows = list[dict[str, str]]


def main(run_file: Path, result_file: Path) -> None:
    run = json.loads(run_file.read_text())
    if run["side"] == "trl":
        import datasets  # noqa: F401 (imports come before the clock starts)
        import peft  # noqa: F401
        import trl  # noqa: F401
    for name in ("LlamaForCausalLM", "TrainerCallback"):
        getattr(transformers, name)  # imported lazily
    resident = Resident()
    start = time.perf_counter()
    transformers.set_seed(run["seed"])
    rows = [json.loads(line) for line in Path(run["train"]).read_text(encoding="utf-8").splitlines()]
    trainer = {"trainer": of_transformers, "trl": of_trl}[run["side"]](run, rows)
    done = trainer.train()
    result = {
        "rate": run["targets"] / done.metrics["train_runtime"],
        "whole_seconds": time.perf_counter() - start,
        "memory": resident.added(),
        "loss": done.metrics["train_loss"],
    }
    result_file.write_text(json.dumps(result))


def of_transformers(run: dict[str, Any], rows: Rows) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(run["model"])
    arguments = TrainingArguments(**run["arguments"])
    padding = {"padding": "max_length", "max_length": run["length"]} if run["pads_to_length"] else {}
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(run["model"]),
        args=arguments,
        train_dataset=[tokenised(tokenizer, row, run["length"]) for row in rows],
        data_collator=DataCollatorForSeq2Seq(tokenizer, **padding),
    )


def tokenised(tokenizer: Any, row: dict[str, str], length: int) -> dict[str, list[int]]:
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    labels = [IGNORED] * len(prompt) + whole[len(prompt) :]
    return {"input_ids": whole[:length], "attention_mask": [1] * len(whole[:length]), "labels": labels[:length]}


def of_trl(run: dict[str, Any], rows: Rows) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    listed = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["response"]}],
        }
        for row in rows
    ]
    config = SFTConfig(max_length=run["length"], **run["arguments"])
    model, adapter = run["model"], None
    if run["adapter"] is not None:
        from peft import LoraConfig

        rank = run["adapter"]["rank"]
        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        if run["adapter"]["nf4"]:
            model = in_four_bits(model)
    trainer: Trainer = SFTTrainer(
        model=model, args=config, train_dataset=Dataset.from_list(listed), peft_config=adapter
    )
    return trainer


def in_four_bits(folder: str) -> Any:
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
