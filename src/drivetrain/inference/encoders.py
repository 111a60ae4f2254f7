"""Models that read and do not write: classifiers of texts and pictures, and encoders, whose vectors stand for texts.

They are loaded from a run, a checkpoint or a Transformers folder, and prepare their inputs as training did.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.run import RunConfig
from drivetrain.data.images import EncodedPictures, with_channels
from drivetrain.data.tokenised import Tokens, keep_no_texts, load_tokenizer, tokenise_block
from drivetrain.errors import RunError, problem
from drivetrain.generation.prepacked_weights import prepack
from drivetrain.inference.run_sources import run_at
from drivetrain.inference.whole_model import loaded_model
from drivetrain.models.model_folders import config_of, located
from drivetrain.models.preprocessing import Preprocessing, expected_by
from drivetrain.models.transformers_classifiers import AT_RANDOM, build_classifier
from drivetrain.models.unpadded import text_positions
from drivetrain.runtime.hardware import detect, torch_device
from drivetrain.workloads.classification import classification_rows
from drivetrain.workloads.text_batches import padded

LOG = logging.getLogger(__name__)
FIELD = "workload.model"  # whose keys the messages about a model's folder name
TEXTS, PICTURES = "AutoModelForSequenceClassification", "AutoModelForImageClassification"
ENCODER, WRITER = "AutoModel", "AutoModelForCausalLM"
HEADS = {"ForSequenceClassification": TEXTS, "ForImageClassification": PICTURES, "ForMaskedLM": ENCODER}
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last"}
MOST_TOKENS = 8192  # of a text, where neither the model nor the tokenizer has a bound
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 50_000_000  # of a picture, decoded


def kind_of(source: Path, checkpoint: str, trust: bool) -> str:
    """Returns the Transformers class that a run, a checkpoint or a Transformers folder is for: TEXTS, PICTURES, ENCODER
    or WRITER."""
    if (found := run_at(source, checkpoint)) is not None:
        run = found[0]
        return run.workload.auto_class
    if (source.expanduser() / "adapter_config.json").is_file():
        return WRITER
    path, local = located(str(source), FIELD)
    if local and (Path(path) / "modules.json").is_file():  # sentence-transformers' description of an encoder
        return ENCODER
    [head, *_] = config_of(str(source), None, FIELD, trust).architectures or [WRITER]
    if head.endswith("Model") and not head.endswith("LMHeadModel"):
        return ENCODER
    return next((kind for ending, kind in HEADS.items() if head.endswith(ending)), WRITER)


@dataclass(frozen=True)
class TextEncoder:
    """A model of texts. classes: None where it has no head for them. pooling: mean, first or last, over a text's
    tokens."""

    name: str
    model: Any
    tokenizer: Any
    classes: tuple[str, ...] | None
    context_length: int
    pooling: str = "mean"

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Returns the tokens of texts, cut to the length that the model was trained for."""
        return tokenise_block(self.tokenizer, texts, None, self.context_length)

    @torch.no_grad()
    def classified(self, ids: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Returns {"label", "probability", "probabilities"} of each text."""
        assert self.classes is not None, "the model has classes"
        inputs = self._inputs(ids)
        return classification_rows(self.model(**inputs).logits, self.classes)

    @torch.no_grad()
    def embedded(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a vector of unit length for each text, (N, width) float32."""
        inputs = self._inputs(ids)
        body = getattr(self.model, self.model.base_model_prefix, self.model)
        states: Tensor = body(**inputs).last_hidden_state.float()
        found = _pooled(states, inputs["attention_mask"], self.pooling)
        vectors: np.ndarray = torch.nn.functional.normalize(found, dim=-1).cpu().numpy()
        return vectors

    def _inputs(self, ids: Sequence[np.ndarray]) -> dict[str, Tensor]:
        batch = padded([(each, None, -1) for each in ids], self.tokenizer.pad_token_id or 0, None)
        return {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Returns (B, width). states: (B, T, width); mask: (B, T), 1 where a text has a token; padding stands behind."""
    if pooling == "first":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    shares = (mask / mask.sum(1, keepdim=True))[..., None]
    return (states * shares).sum(1)


@dataclass(frozen=True)
class PictureClassifier:
    """A classifier of pictures, which are prepared as they were for its training. expected: with sides, mean and
    std."""

    name: str
    model: Any
    classes: tuple[str, ...]
    expected: Preprocessing

    @torch.no_grad()
    def classified(self, pixels: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Returns {"label", "probability", "probabilities"} of each picture."""
        values = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.expected.mean, self.expected.std))
        return classification_rows(
            self.model(pixel_values=((values - mean) / std).to(self.model.device)).logits, self.classes
        )

    def pixels(self, content: bytes) -> np.ndarray:
        """Returns (H, W, C) uint8 of an image file. Raises RunError for what is none, or too large."""
        pictures = EncodedPictures(lambda _: io.BytesIO(content), ["the picture"], formats=FORMATS)
        height, width = pictures.dimensions(0)
        if height * width > MOST_PIXELS:
            raise RunError(f"the picture has {height * width:,} pixels, more than {MOST_PIXELS:,}")
        found = pictures.pixels(0, self.expected.size if self.expected.crops else None)
        if found.shape[:2] != self.expected.sides:
            wanted = " x ".join(map(str, self.expected.sides or ()))
            raise RunError(f"the picture is {height} x {width}; the model takes {wanted}, and no other is resized")
        return with_channels(found, len(self.expected.mean or ()))


Reader = TextEncoder | PictureClassifier


def load_reader(source: Path, kind: str, *, checkpoint: str = "best", trust: bool = False) -> Reader:
    """Returns the model of a run, a checkpoint's folder or a Transformers folder. kind: of the source, not WRITER.

    Raises UserError for a source that holds none, for a head that was never trained, and for Python that came with the
    source, unless trust is set.
    """
    found = run_at(source, checkpoint)
    if found is None:
        name, run, path = source.name, None, str(source.expanduser())
        model: Any = _of_transformers(str(source), kind, trust)
    else:
        run, path = found[0], str(found[1])
        name, model = run.name, loaded_model(run, found[1], trust=trust)
    model = model.to(torch_device(detect())).eval().requires_grad_(False)
    prepack(model)
    names = model.config.id2label
    classes = tuple(str(names[each]) for each in sorted(names)) if kind != ENCODER else None
    if kind == PICTURES:
        assert classes is not None
        return _picture_classifier(name, model, classes, path)
    if run is not None and not run.workload.has_classes:
        raise problem("model", f"the run in {run.folder} trains no classes", "give a classifier, or a language model")
    tokenizer = load_tokenizer(path, f"{FIELD}.path", trust) if run is None else model.tokenizer
    keep_no_texts(tokenizer)
    pooling = _pooling_of(Path(path)) if run is None else "mean"
    return TextEncoder(name, model, tokenizer, classes, _length(model, tokenizer, run), pooling)


def _of_transformers(source: str, kind: str, trust: bool) -> Any:
    warn = _quiet if kind == ENCODER else LOG.warning
    model: Any = build_classifier(kind, source, None, (), FIELD, warn, trusted=trust)
    # a pooler is not used
    if new := sorted(each for each in getattr(model, AT_RANDOM) if "pooler" not in each):
        why = f"{source} has no weights for {new[0]}, which would be random numbers"
        raise problem("model", why, "train it first, or give a complete model")
    return model


def _quiet(_: str) -> None:
    """Drops the remark on a new head, which an encoder's pooler is taken for."""


def _length(model: Any, tokenizer: Any, run: RunConfig | None) -> int:
    """Returns the tokens of a text that the model takes."""
    if run is not None and (length := run.workload.text_length) is not None:
        return length
    bounds = (text_positions(model), tokenizer.model_max_length)
    return min(MOST_TOKENS, *(each for each in bounds if each is not None))


def _pooling_of(folder: Path) -> str:
    """Returns how a text's vector is made of its tokens', as sentence-transformers' files have it; else the mean."""
    try:
        given = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "mean"
    modes = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in MODES:
        why = f"{folder} pools by {' and '.join(modes) or 'nothing'}"
        raise problem("model", why, f"give a model that pools by one of {', '.join(MODES)}")
    return MODES[modes[0]]


def _picture_classifier(name: str, model: Any, classes: tuple[str, ...], path: str) -> PictureClassifier:
    expected = expected_by(path, FIELD)
    if expected.sides is None or expected.mean is None or expected.std is None:
        fix = "give a folder with preprocessor_config.json"
        raise problem("model", f"{path} does not state how its pictures are prepared", fix)
    return PictureClassifier(name, model, classes, expected)
