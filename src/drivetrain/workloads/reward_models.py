"""Reward models: sequence classifiers with one label that score a policy's answers, beside it under the same engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.config.models_of_runs import stage_of_checkpoint
from drivetrain.config.preference import REWARD
from drivetrain.config.reinforcement import FIELD, Reward
from drivetrain.data.tokenised import load_tokenizer
from drivetrain.errors import problem
from drivetrain.models.model_folders import shapes_of_weights
from drivetrain.models.transformers_classifiers import AT_RANDOM, build_classifier
from drivetrain.workloads.loss_contract import Auxiliary
from drivetrain.workloads.reward_build import LABELS

SCORER = "AutoModelForSequenceClassification"


class RewardModel:
    """One reward model. tokenizer: the policy's, which must have the same tokens."""

    def __init__(self, reward: Reward, number: int, tokenizer: Any) -> None:
        assert reward.model is not None
        self.reward, self._path, self._field = reward, reward.model, f"{FIELD}.rewards.{number}.model"
        theirs = load_tokenizer(self._path, self._field).get_vocab()
        if theirs != tokenizer.get_vocab():
            why = f"{self._path} has other tokens ({len(theirs):,}) than the model ({len(tokenizer):,})"
            raise problem(self._field, why, "give a reward model that was trained with the same tokenizer")

    @property
    def name(self) -> str:
        """Its name among the auxiliary models."""
        return f"reward_{self.reward.label}"

    @property
    def auxiliary(self) -> Auxiliary:
        return Auxiliary("frozen", self._built, self._path)

    def _built(self) -> nn.Module:
        """Raises UserError if the folder holds no scores: a head that starts at random would reward at random."""
        remarks: list[str] = []
        field = self._field.removesuffix(".model")
        model: Any = build_classifier(SCORER, self._path, None, LABELS, field, remarks.append)
        held = shapes_of_weights(str(Path(self._path).expanduser()))
        new: frozenset[str] = getattr(model, AT_RANDOM)
        if held is not None and new and not new & held.keys():
            stage = stage_of_checkpoint(self._path)
            trained = "" if stage in (None, REWARD) else f" (it was trained with stage {stage})"
            why = f"{self._path} is no reward model: it has no score head{trained}"
            raise problem(self._field, why, "train one with stage: reward, and give its folder")
        if model.config.pad_token_id is None:
            remarks.append("its config has no pad_token_id, by which a scorer finds an answer's last token")
        if remarks:
            fix = "give a folder of stage reward's, or of a sequence classifier with one label"
            raise problem(self._field, f"{self._path} is no reward model: {remarks[0]}", fix)
        self._pad = int(model.config.pad_token_id)
        return model

    def scores(self, auxiliary: Mapping[str, Callable[..., Any]], answers: Sequence[Tensor]) -> list[float]:
        """Returns the score of each sequence of ids, prompt and answer."""
        rows = nn.utils.rnn.pad_sequence(list(answers), batch_first=True, padding_value=self._pad)
        with torch.no_grad():
            found: Tensor = auxiliary[self.name](input_ids=rows, use_cache=False).logits
        return [float(score) for score in found.float().flatten().cpu()]
