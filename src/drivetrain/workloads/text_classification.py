"""Texts, or pairs of texts, into classes: any AutoModelForSequenceClassification."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.config.workload import TextClassification, TextData
from drivetrain.data.row_names import RowNames
from drivetrain.data.split import limit_note, limited, stratified_split
from drivetrain.data.texts import Texts, class_names, encode, num_shared, read_texts
from drivetrain.data.token_blocks import stored_tokens
from drivetrain.data.tokenised import Tokens, load_tokenizer, tokenise
from drivetrain.errors import Problem, UserError, problem, together
from drivetrain.models.model_folders import save_description
from drivetrain.models.transformers_classifiers import build_classifier, config_accepts
from drivetrain.workloads.base import Batch, NamedSamples
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.classification import Classifier


class TextSamples:
    """Tokenised texts; a sample is (ids, segments or None, label or -1). texts: kept where they are shown again.

    indices: which of the tokens' texts these are; None: all.
    """

    def __init__(
        self,
        tokens: Tokens,
        indices: np.ndarray | None,
        labels: np.ndarray | None,
        names: Sequence[str],
        texts: Texts | None = None,
    ) -> None:
        self.tokens, self.labels, self.names, self.texts = tokens, labels, names, texts
        self._indices = indices

    def __len__(self) -> int:
        return len(self.names)

    def load(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        del epoch  # nothing here is random
        place = index if self._indices is None else int(self._indices[index])
        part = slice(self.tokens.offsets[place], self.tokens.offsets[place + 1])
        segments = None if self.tokens.segments is None else self.tokens.segments[part]
        return self.tokens.ids[part], segments, -1 if self.labels is None else int(self.labels[index])

    @property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of each."""
        lengths = self.tokens.lengths
        return lengths if self._indices is None else lengths[self._indices]

    @property
    def truncated(self) -> int:
        """Texts longer than max_length."""
        cut = self.tokens.cut
        return int((cut if self._indices is None else cut[self._indices]).sum())


class TextClassificationWorkload(Classifier):
    train: TextSamples
    evaluation: TextSamples

    def __init__(self, config: TextClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self._warnings: list[str] = []
        self._tokenizer, (train, evaluation) = together([self._load_tokenizer, lambda: self._read(config.data)])
        self.train = self._samples(train, "train")
        self.evaluation = self._samples(evaluation, "evaluation")
        assert self.train.labels is not None
        self._loss = ClassificationLoss(config.loss, self._classes, self.train.labels)
        self._warnings += self._class_warnings()

    def _load_tokenizer(self) -> Any:
        model = self._config.model
        if model.tokenizer is not None:
            return load_tokenizer(model.tokenizer, "workload.model.tokenizer", model.trust_tokenizer_code)
        assert model.path is not None, "rules.check lets no run without a tokenizer pass"
        return load_tokenizer(model.path, "workload.model.path", model.trust_remote_code)

    def _read(self, data: TextData) -> tuple[Texts, Texts]:
        """Training and evaluation texts, limited; no row is in both."""
        if data.evaluation is None:
            train = read_texts(data, data.train, "workload.data.train")
            dropped = train.bad
            parts = stratified_split(
                train.numbers, data.evaluation_fraction, self._seed, "workload.data.train", train.label_names
            )
            train, evaluation = train.take(parts[0]), train.take(parts[1])
        else:
            given = data.evaluation
            train, evaluation = together(
                [
                    lambda: read_texts(data, data.train, "workload.data.train"),
                    lambda: read_texts(data, given, "workload.data.evaluation", split="test"),
                ]
            )
            dropped = train.bad + evaluation.bad
            self._warn_of_shared(train, evaluation)
        for texts in (train, evaluation):
            if texts.warning:
                self._warn(texts.warning)
        self._dropped = len(dropped)
        if dropped:
            self._warn(f"{self._dropped} row{'s' * (self._dropped > 1)} without text dropped, {dropped[0].where} first")
        present = [train.label_names[number] for number in np.unique(train.numbers)]
        self._classes = class_names(present, "workload.data.label_column", len(train.numbers))
        return self._limited(train, "limit_train"), self._limited(evaluation, "limit_evaluation")

    def _warn_of_shared(self, train: Texts, evaluation: Texts) -> None:
        shared = num_shared(train, evaluation)
        if shared:
            self._warn(
                f"{shared} of {len(evaluation.first)} evaluation texts are also training texts: metrics will flatter"
            )

    def _limited(self, texts: Texts, key: str) -> Texts:
        """The texts that are used. key: the field that limits them."""
        limit = getattr(self._config.data, key)
        if limit is None:
            return texts
        kept = limited(texts.numbers, limit, self._seed)
        if len(np.unique(texts.numbers[kept])) < len(np.unique(texts.numbers)):
            note = limit_note(texts.labels.astype(str), kept, f"workload.data.{key}")
            assert note is not None
            self._warn(note)
        return texts.take(kept)

    def _samples(self, texts: Texts, name: str) -> TextSamples:
        given = getattr(self._config.data, name) or self._config.data.train
        present, places = np.unique(texts.numbers, return_inverse=True)
        found = np.array([texts.label_names[number] for number in present])
        labels = encode(found, self._classes, given, f"workload.data.{name}")[places]
        shown = texts if name == "evaluation" else None  # predictions are asked for these
        return TextSamples(*self._tokens(texts), labels, RowNames(texts.rows), shown)

    def _tokens(self, texts: Texts) -> tuple[Tokens, np.ndarray | None]:
        """Their tokens, and which of them where those of all the file's texts were made."""
        data = self._config.data
        indices = texts.indices
        if texts.store is None:
            tokens, warning = tokenise(self._tokenizer, texts.first, texts.second, data.max_length, data.cache)
            indices = None
        elif data.limit_train is None and data.limit_evaluation is None:
            tokens, warning = stored_tokens(self._tokenizer, texts.store, None, data.max_length, data.cache)
        else:
            tokens, warning = stored_tokens(self._tokenizer, texts.store, indices, data.max_length, data.cache)
            indices = None
        if warning:
            self._warn(warning)
        return tokens, indices

    @property
    def _pad(self) -> int:
        """A tokenizer without any padding token pads with 0: the attention mask hides it."""
        return self._tokenizer.pad_token_id or 0

    def build_model(self) -> nn.Module:
        model = self._config.model
        config = None if model.config is None else self._completed(model.config)
        built = build_classifier(
            "AutoModelForSequenceClassification",
            model.path,
            config,
            self._classes,
            "workload.model",
            self._warn,
            trusted=model.trust_remote_code,
        )
        self._check_fit(built)
        # GPT-2 and its like find a text's last token by the padding token, and refuse batches without one
        built.config.pad_token_id = self._pad  # type: ignore[union-attr]
        # GPT-2 takes them too, but adds the embedding of token 0 or 1: its own tokenizer gives none
        given = "token_type_ids" in self._tokenizer.model_input_names
        self._takes_segments = given and "token_type_ids" in inspect.signature(built.forward).parameters
        return self._adapted(built)

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The run file's model config, with what follows from the tokenizer where it is left out."""
        derived = {"vocab_size": len(self._tokenizer), "pad_token_id": self._pad}
        if given.get("pad_token_id", self._pad) != self._pad:
            raise problem(
                "workload.model.config.pad_token_id",
                f"pad_token_id ({given['pad_token_id']}) is not the tokenizer's ({self._pad})",
                "leave it out: it is taken from the tokenizer",
            )
        return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}

    def _check_fit(self, model: nn.Module) -> None:
        """UserError if some token or some position would lie outside the model's tables."""
        problems = []
        scratch = self._config.model.config is not None
        known, tokens = model.get_input_embeddings().num_embeddings, len(self._tokenizer)  # type: ignore[operator]
        if known < tokens:
            field = "workload.model.config.vocab_size" if scratch else "workload.model.tokenizer"
            fix = "leave it out: it is taken from the tokenizer" if scratch else "give the model's own tokenizer"
            problems.append(Problem(field, f"vocab_size ({known}) < the tokenizer's tokens ({tokens})", fix))
        places, length = _positions(model), self._config.data.max_length
        if places is not None and places < length:
            why = f"max_length ({length}) > the model's positions ({places}; see max_position_embeddings)"
            fix = "shorten max_length" + (" or raise workload.model.config.max_position_embeddings" if scratch else "")
            problems.append(Problem("workload.data.max_length", why, fix))
        if problems:
            raise UserError(problems)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:  # a model may be built more than once
            self._warnings.append(message)

    def collate(self, samples: Sequence[Any]) -> Batch:
        """input_ids, attention_mask, labels, and token_type_ids for pairs: (B, L) and (B,), int64."""
        data = self._config.data
        longest = data.max_length if data.padding == "fixed" else max(1, *(len(ids) for ids, _, _ in samples))
        ids = np.full((len(samples), longest), self._pad, dtype=np.int64)
        mask = np.zeros((len(samples), longest), dtype=np.int64)
        segments = np.zeros((len(samples), longest), dtype=np.int64)
        for row, (tokens, kinds, _) in enumerate(samples):
            ids[row, : len(tokens)] = tokens
            mask[row, : max(1, len(tokens))] = 1  # attention over nothing would be NaN
            if kinds is not None:
                segments[row, : len(tokens)] = kinds
        batch = {"input_ids": ids, "attention_mask": mask, "labels": np.array([label for *_, label in samples])}
        if samples[0][1] is not None:
            batch["token_type_ids"] = segments
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(B, classes)."""
        left_out = {"labels"} if self._takes_segments else {"labels", "token_type_ids"}
        inputs = {name: tensor for name, tensor in batch.items() if name not in left_out}
        logits: Tensor = model(**inputs).logits
        return logits

    @property
    def lengths(self) -> Sequence[int] | None:
        data = self._config.data
        grouped = data.group_by_length and data.padding == "dynamic"
        return self.train.lengths.tolist() if grouped else None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "train_samples": len(self.train),
            "evaluation_samples": len(self.evaluation),
            "classes": len(self._classes),
            "rows_without_text": self._dropped,
            "vocabulary": len(self._tokenizer),
            "truncated": round(self.train.truncated / len(self.train), 4),
            "mean_tokens": round(float(self.train.lengths.mean()), 1),
            **self._weighted(),
        }

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is None:
            return self.evaluation
        texts = read_texts(self._config.data, path, "--data", labelled=False)
        if texts.bad:
            self._warn(f"{len(texts.bad)} rows of {path} have no text and no prediction, {texts.bad[0].where} first")
        if texts.warning:
            self._warn(texts.warning)
        return TextSamples(*self._tokens(texts), None, RowNames(texts.rows), texts)

    def text_samples(self, texts: Sequence[str]) -> NamedSamples:
        if self._config.data.text_pair_column is not None:
            raise problem("--text", "this model takes pairs of texts", "give --data, a file with both columns")
        if empty := [number for number, text in enumerate(texts, start=1) if not text.strip()]:
            raise problem("--text", f"number {empty[0]} is empty", "give a text")
        given = Texts(list(texts), None, np.zeros(len(texts), np.int32), [""], np.arange(1, len(texts) + 1))
        return TextSamples(*self._tokens(given), None, RowNames(given.rows, "text"), given)

    def described(self, samples: TextSamples, index: int) -> dict[str, Any]:
        if samples.texts is None:
            return super().described(samples, index)
        first, second = samples.texts.first[index], samples.texts.second
        pair = {} if second is None else {"text_pair": second[index]}
        return {"text": first, **pair, **super().described(samples, index)}

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        self._tokenizer.save_pretrained(folder)


def _positions(model: nn.Module) -> int | None:
    """Positions a text may take; RoBERTa and its like keep the first of theirs for padding. None: no bound is known."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    table = next((m for m in tables if isinstance(m, nn.Embedding)), None)
    if table is not None:
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return getattr(model.config, "max_position_embeddings", None)
