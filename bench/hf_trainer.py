"""The Transformers Trainer's side of a bench: `python bench/hf_trainer.py RUN.yaml RESULT.json`.

Written as its users write it: images opened with PIL in `__getitem__`, transformed with NumPy; texts tokenised ahead
and padded per batch by DataCollatorWithPadding; TrainingArguments' defaults but for what a task needs (batch size,
length, learning rate, seed, folder, precision). The run file is read for the task only: data, model, batch, lr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from PIL import Image
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main(run_file: Path, result_file: Path) -> None:
    run = json.loads(run_file.read_text())
    workload, seed = run["workload"], run["seed"]
    warm_imports()
    start = time.perf_counter()
    transformers.set_seed(seed)
    parts = images(workload) if workload["type"] == "image_classification" else texts(workload)
    arguments = TrainingArguments(
        output_dir=run["output"] + "-trainer",
        per_device_train_batch_size=run["batch_size"],
        per_device_eval_batch_size=run["batch_size"],
        num_train_epochs=run["loop"]["epochs"],
        learning_rate=run["optimizer"]["lr"],
        seed=seed,
        bf16=run["precision"] == "bf16-mixed",
        fp16=run["precision"] == "fp16-mixed",
    )
    trainer = Trainer(args=arguments, compute_metrics=accuracy, **parts)
    done = trainer.train()
    wall = time.perf_counter() - start
    samples = len(parts["train_dataset"]) * run["loop"]["epochs"]
    result = {
        "rate": samples / wall,
        "loop_seconds": done.metrics["train_runtime"],
        "samples": samples,
        "metrics": {"accuracy": trainer.evaluate()["eval_accuracy"]},
    }
    result_file.write_text(json.dumps(result))


def warm_imports() -> None:
    """Transformers imports lazily: what a training uses, before the clock starts."""
    for name in ("ResNetForImageClassification", "BertForSequenceClassification", "TrainerCallback"):
        getattr(transformers, name)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


# --- images ----------------------------------------------------------------------------------------------------------


def images(workload: dict[str, Any]) -> dict[str, Any]:
    data = workload["data"]
    train, evaluation = Images(data["train"], data, augment=True), Images(data["evaluation"], data, augment=False)
    config = AutoConfig.for_model(**workload["model"]["config"], num_labels=len(train.classes))
    model = AutoModelForImageClassification.from_config(config)
    return {"model": model, "train_dataset": train, "eval_dataset": evaluation}


class Images(Dataset):
    def __init__(self, folder: str, data: dict[str, Any], augment: bool) -> None:
        self.classes = sorted(os.listdir(folder))
        self.files = [
            (os.path.join(folder, name, file), label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(os.path.join(folder, name)))
        ]
        self.mean = torch.tensor(data["mean"]).view(3, 1, 1)
        self.std = torch.tensor(data["std"]).view(3, 1, 1)
        self.padding, self.augment = data["crop_padding"], augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.files[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        if self.augment:
            pixels = self.random_crop(pixels)
            if np.random.random() < 0.5:
                pixels = pixels[:, ::-1]
        values = torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255
        return {"pixel_values": (values - self.mean) / self.std, "labels": label}

    def random_crop(self, pixels: np.ndarray) -> np.ndarray:
        height, width, _ = pixels.shape
        padded = np.pad(pixels, ((self.padding, self.padding), (self.padding, self.padding), (0, 0)))
        top, left = np.random.randint(0, 2 * self.padding + 1, 2)
        return padded[top : top + height, left : left + width]


# --- texts -----------------------------------------------------------------------------------------------------------


def texts(workload: dict[str, Any]) -> dict[str, Any]:
    data = workload["data"]
    words = Path(workload["model"]["tokenizer"]).read_text(encoding="utf-8").rstrip("\n").split("\n")
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    train, evaluation = (Texts(data[part], data, tokenizer) for part in ("train", "evaluation"))
    config = AutoConfig.for_model(
        **workload["model"]["config"], vocab_size=len(tokenizer), num_labels=len(set(train.labels))
    )
    model = AutoModelForSequenceClassification.from_config(config)
    collator = DataCollatorWithPadding(tokenizer)
    return {"model": model, "train_dataset": train, "eval_dataset": evaluation, "data_collator": collator}


class Texts(Dataset):
    def __init__(self, file: str, data: dict[str, Any], tokenizer: BertTokenizerFast) -> None:
        frame = pd.read_csv(file)
        self.labels = frame[data["label_column"]].tolist()
        self.encoded = tokenizer(frame[data["text_column"]].tolist(), truncation=True, max_length=data["max_length"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**{name: values[index] for name, values in self.encoded.items()}, "label": self.labels[index]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
