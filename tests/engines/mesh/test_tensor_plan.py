"""Tests which layers tensor parallelism splits, and what it says where they cannot be."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.engines.mesh.tensor_plan import check_fits, plan_of
from drivetrain.errors import UserError
from tests.tiny_language import LLAMA


def test_a_vocabulary_that_cannot_be_split_is_reported_as_such_with_the_next_that_can() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 257}))
    with pytest.raises(UserError, match=r"the vocabulary \(257 tokens\) is no multiple of tp \(2\)") as refused:
        check_fits(model, plan_of(model, None), 2, sequence_parallel=False, loss_parallel=False)
    assert len(refused.value.problems) == 1, "embedding and head have the same vocabulary"
    assert "258: vocab_size in workload.model.config" in refused.value.problems[0].fix
