"""Classifies texts, or pairs of texts: any AutoModelForSequenceClassification."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from drivetrain.config.workload import TextClassification, TextData
from drivetrain.data.bad_rows import by_reason
from drivetrain.data.lazy_texts import RowNames
from drivetrain.data.split import limit_note, limited, stratified_split
from drivetrain.data.streams.endless import known_length
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.data.texts import Texts, class_names, encode, num_shared, read_texts, subset_problems
from drivetrain.data.token_blocks import stored_tokens
from drivetrain.data.tokenised import Tokens, load_tokenizer, tokenise
from drivetrain.errors import Problem, UserError, counted, problem, together
from drivetrain.models.classifier_config import config_accepts
from drivetrain.models.model_folders import save_description
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.models.unpadded import Places, row_inputs, text_positions, use_unpadded
from drivetrain.workloads.base import Batch, NamedSamples
from drivetrain.workloads.class_loss import ClassificationLoss
from drivetrain.workloads.class_samples import class_samples
from drivetrain.workloads.classification import Classifier
from drivetrain.workloads.exporting import PlainBatch, Speaks
from drivetrain.workloads.stream_notes import travel_note
from drivetrain.workloads.text_batches import TextSamples, decoded, end_to_end, padded, plain
from drivetrain.workloads.text_streams import TextStream, stream_problems


class TextClassificationWorkload(Classifier, Speaks):
    train: TextSamples | StreamedMixture
    evaluation: TextSamples

    def __init__(self, config: TextClassification, seed: int) -> None:
        self._config, self._seed = config, seed
        self._warnings: list[str] = []
        self._places: Places | None = None  # of texts laid end to end, once a model is built that takes them
        if problems := [*subset_problems(config.data)]:
            raise UserError(problems)
        if config.data.stream:
            labels = self._stream()
        else:
            self._tokenizer, (train, evaluation) = together([self._load_tokenizer, lambda: self._read(config.data)])
            self.train = self._samples(train, "train")
            self.evaluation = self._samples(evaluation, "evaluation")
            assert self.train.labels is not None
            labels = self.train.labels
        self._loss = ClassificationLoss(config.loss, self._classes, labels)
        self._warnings += self._class_warnings()

    def _stream(self) -> np.ndarray:
        """Prepares training samples that are drawn, whose labels are not known, and evaluation samples."""
        data = self._config.data
        if problems := [*stream_problems(self._config)]:
            raise UserError(problems)
        assert data.evaluation is not None
        given = data.evaluation
        self._tokenizer, evaluation = together(
            [self._load_tokenizer, lambda: read_texts(data, given, "workload.data.evaluation", split="test")]
        )
        self._dropped = len(evaluation.bad)
        present = [evaluation.label_names[number] for number in np.unique(evaluation.numbers)]
        self._classes = data.classes or class_names(present, "workload.data.label_column", len(evaluation.numbers))
        self.evaluation = self._samples(self._limited(evaluation, "limit_evaluation"), "evaluation")
        self.train = TextStream(data, self._classes, self._tokenizer).samples(self._seed)
        self._warn(travel_note(self.train.sets[0], data.stream_buffer))
        return np.zeros(0, np.int64)

    def _load_tokenizer(self) -> Any:
        model = self._config.model
        if model.tokenizer is not None:
            return load_tokenizer(model.tokenizer, "workload.model.tokenizer", model.trust_tokenizer_code)
        assert model.path is not None, "rules.check lets no run without a tokenizer pass"
        return load_tokenizer(model.path, "workload.model.path", model.trust_remote_code)

    def _read(self, data: TextData) -> tuple[Texts, Texts]:
        """Reads training and evaluation texts, limited; no row is in both."""
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
            self._warn(f"{counted(self._dropped, 'row')} left out: {'; '.join(by_reason(dropped))}")
        present = [train.label_names[number] for number in np.unique(train.numbers)]
        self._classes = class_names(present, "workload.data.label_column", len(train.numbers), str(data.label_column))
        return self._limited(train, "limit_train"), self._limited(evaluation, "limit_evaluation")

    def _warn_of_shared(self, train: Texts, evaluation: Texts) -> None:
        shared = num_shared(train, evaluation)
        if shared:
            self._warn(
                f"{shared} of {len(evaluation.first)} evaluation texts are also training texts: metrics will flatter"
            )

    def _limited(self, texts: Texts, key: str) -> Texts:
        """Returns the texts that are used. key: the field that limits them."""
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
        """Returns their tokens, and the indices if those of all the file's texts were made."""
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
        """Pads with 0 if a tokenizer has no padding token: the attention mask hides it."""
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
            adapters=self.adapters,
        )
        self._check_fit(built)
        # GPT-2 and its like find a text's last token by the padding token, and refuse batches without one
        built.config.pad_token_id = self._pad  # type: ignore[union-attr]
        # GPT-2 takes them too, but adds the embedding of token 0 or 1: its own tokenizer gives none
        given = "token_type_ids" in self._tokenizer.model_input_names
        self._places = self._unpadded(built)
        self._takes_segments = given and "token_type_ids" in inspect.signature(built.forward).parameters
        return self._adapted(built)

    def _unpadded(self, model: nn.Module) -> Places | None:
        """Returns how positions are counted if texts are laid end to end; a model that cannot is named if the run file
        requires it."""
        data = self._config.data
        virtual = self.adapters is not None and self.adapters.positions
        if data.unpadded is False or data.padding == "fixed" or virtual:
            return None
        return use_unpadded(
            model, self._config.model.trust_remote_code, self._warn if data.unpadded is True else lambda _: None
        )

    def _completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the run file's model config, completed from the tokenizer where it leaves fields out."""
        derived = {"vocab_size": len(self._tokenizer), "pad_token_id": self._pad}
        if given.get("pad_token_id", self._pad) != self._pad:
            raise problem(
                "workload.model.config.pad_token_id",
                f"pad_token_id ({given['pad_token_id']}) is not the tokenizer's ({self._pad})",
                "leave it out: it is taken from the tokenizer",
            )
        return {**{key: value for key, value in derived.items() if config_accepts(given, key)}, **given}

    def _check_fit(self, model: nn.Module) -> None:
        """Raises UserError if some token or some position would lie outside the model's tables."""
        problems = []
        scratch = self._config.model.config is not None
        known, tokens = model.get_input_embeddings().num_embeddings, len(self._tokenizer)  # type: ignore[operator]
        if known < tokens:
            field = "workload.model.config.vocab_size" if scratch else "workload.model.tokenizer"
            fix = "leave it out: it is taken from the tokenizer" if scratch else "give the model's own tokenizer"
            problems.append(Problem(field, f"vocab_size ({known}) < the tokenizer's tokens ({tokens})", fix))
        if problems := [*problems, *self._config.context_problems(text_positions(model))]:
            raise UserError(problems)

    def _warn(self, message: str) -> None:
        self._warnings += {message}.difference(self._warnings)  # a model may be built more than once

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Returns input_ids, attention_mask, labels, and token_type_ids for pairs: (B, L) and (B,), int64. Unpadded, a
        row."""
        if self._places is not None:
            return end_to_end(samples, self._pad, self._places)
        data = self._config.data
        return padded(samples, self._pad, data.max_length if data.padding == "fixed" else None)

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths" if "lengths" in batch else "attention_mask"].sum())

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def plain_batch(self, model: nn.Module, samples: Sequence[Any]) -> PlainBatch:
        return plain(model, samples, self._pad, "token_type_ids" in self._tokenizer.model_input_names)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns (B, classes)."""
        if "lengths" in batch:
            segments = batch.get("token_type_ids") if self._takes_segments else None
            row = row_inputs(batch["input_ids"], batch["position_ids"], batch["lengths"], segments)
            found: Tensor = model(**row).logits
            return found
        left_out = {"labels"} if self._takes_segments else {"labels", "token_type_ids"}
        inputs = {name: tensor for name, tensor in batch.items() if name not in left_out}
        logits: Tensor = model(**inputs).logits
        return logits

    @property
    def lengths(self) -> Sequence[int] | None:
        data = self._config.data
        grouped = data.group_by_length and data.padding == "dynamic"
        known = grouped or self.packs
        return self.train.lengths.tolist() if known and isinstance(self.train, TextSamples) else None

    @property
    def packs(self) -> bool:
        return self._places is not None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "train_samples": known_length(self.train),
            "evaluation_samples": len(self.evaluation),
            "classes": len(self._classes),
            "unusable_rows": self._dropped,
            "vocabulary": len(self._tokenizer),
            **self._lengths_known(),
            "unpadded": self.packs,
            **self._largest_class(),
            **self._weighted(),
        }

    def _lengths_known(self) -> dict[str, Any]:
        if not isinstance(self.train, TextSamples):
            return {}
        return {
            "truncated": round(self.train.truncated / len(self.train), 4),
            "mean_tokens": round(float(self.train.lengths.mean()), 1),
        }

    @property
    def data_report(self) -> Mapping[str, Any]:
        report, labelled = self.facts, self.evaluation
        if isinstance(self.train, TextSamples):
            report, labelled = {**super().data_report}, self.train
        report |= class_samples(labelled, self._classes, self._tokenizer)
        wish = self._config.data.unpadded
        if self._places is None and wish is not False and self._config.data.padding != "fixed":
            return {**report, "unpadded": "where the model allows it, which train tries out"}
        return report

    @property
    def warnings(self) -> Sequence[str]:
        return self._warnings

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is None:
            return self.evaluation
        texts = read_texts(self._config.data, path, "--data", labelled=False)
        if texts.bad:
            have = "has" if len(texts.bad) == 1 else "have"
            lost = f"{counted(len(texts.bad), texts.kind)} of {path} {have} no prediction"
            self._warn(f"{lost}: {'; '.join(by_reason(texts.bad))}")
        if texts.warning:
            self._warn(texts.warning)
        return TextSamples(*self._tokens(texts), None, RowNames(texts.rows, texts.kind), texts)

    def text_samples(self, texts: Sequence[str]) -> NamedSamples:
        if self._config.data.text_pair_column is not None:
            raise problem("--text", "this model takes pairs of texts", "give --data, a file with both columns")
        if empty := [number for number, text in enumerate(texts, start=1) if not text.strip()]:
            raise problem("--text", f"number {empty[0]} is empty", "give a text")
        given = Texts(list(texts), None, np.zeros(len(texts), np.int32), [""], np.arange(1, len(texts) + 1))
        return TextSamples(*self._tokens(given), None, RowNames(given.rows, "text"), given)

    def preview(self, samples: Any, index: int) -> dict[str, Any]:
        text = decoded(self._tokenizer, samples.load(index, 0)[0])
        return {"text": text, **super().described(samples, index)}

    def described(self, samples: TextSamples, index: int) -> dict[str, Any]:
        if samples.texts is None:
            return super().described(samples, index)
        first, second = samples.texts.first[index], samples.texts.second
        pair = {} if second is None else {"text_pair": second[index]}
        return {"text": first, **pair, **super().described(samples, index)}

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        save_description(model, folder)
        self._tokenizer.save_pretrained(folder)
