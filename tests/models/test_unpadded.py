"""Texts end to end in one row against plain Transformers over each text alone, which needs no padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from drivetrain.models.unpadded import Places, row_inputs, use_unpadded

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
MODELS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": {**SIZES, "bos_token_id": 0, "eos_token_id": 2},
    "electra": {**SIZES, "embedding_size": 8},
    "distilbert": {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "vocab_size": 50},
}
LENGTHS = (7, 1, 12)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def model_of(model_type: str, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **{**MODELS.get(model_type, SIZES), **more})
    built: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    return built


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 50, (length,), generator=generator) for length in LENGTHS]


def in_a_row(model: nn.Module, places: Places) -> Tensor:
    positions = torch.from_numpy(np.concatenate([places.of(text.numpy()) for text in texts()]))
    logits: Tensor = model(**row_inputs(torch.cat(texts())[None], positions[None], torch.tensor(LENGTHS), None)).logits
    return logits


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor]:
    (logits * torch.arange(1.0, logits.numel() + 1).view_as(logits)).sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("model_type", list(MODELS))
def test_logits_and_gradients_are_those_of_each_text_alone(model_type: str) -> None:
    plain, ours = model_of(model_type), model_of(model_type)
    wanted = torch.cat([plain(input_ids=text[None]).logits for text in texts()])
    places = use_unpadded(ours, trusted=False)
    assert places is not None
    found = in_a_row(ours, places)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for own, other in zip(gradients(ours, found), gradients(plain, wanted), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=2e-6)


def test_tokens_of_a_last_layer_that_no_head_reads_are_not_computed() -> None:
    model, seen = model_of("bert"), []
    places = use_unpadded(model, trusted=False)
    assert places is not None
    for layer in model.bert.encoder.layer:  # type: ignore[union-attr]
        layer.intermediate.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    in_a_row(model, places)
    assert seen == [(1, 20, 16), (1, 20, 16), (3, 1, 16)]


def test_a_padded_batch_goes_through_the_model_as_before() -> None:
    plain, ours = model_of("bert"), model_of("bert")
    use_unpadded(ours, trusted=False)
    inputs = {"input_ids": torch.full((2, 5), 7), "attention_mask": torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])}
    torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits, rtol=0, atol=0)


def test_positions_skip_the_padding_token_where_the_model_does() -> None:
    ids = np.array([0, 9, 1, 9])
    table = model_of("roberta").roberta.embeddings  # type: ignore[union-attr]
    wanted = table.create_position_ids_from_input_ids(torch.from_numpy(ids)[None], table.padding_idx)
    assert Places(2, 1).of(ids).tolist() == wanted[0].tolist()
    assert Places().of(ids).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("model_type", "more", "word"),
    [
        ("albert", {"embedding_size": 8}, "stack of layers"),
        ("deberta-v2", {}, "cannot be replaced"),
        ("modernbert", {"pad_token_id": 0, "local_attention": 8, "layer_types": ["full_attention"] * 3}, "window"),
        ("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 3, "pad_token_id": 0}, "other gradients"),
    ],
)
def test_a_model_that_cannot_is_left_as_it_was_and_named(model_type: str, more: dict[str, Any], word: str) -> None:
    given = {key: value for key, value in SIZES.items() if model_type != "gpt2" or key == "vocab_size"}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    kwargs = {**given, **more, **(special if model_type in ("modernbert", "gpt2") else {})}
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model(model_type, **kwargs)
    )
    before, state, words = model.config._attn_implementation, torch.random.get_rng_state(), list[str]()
    assert use_unpadded(model, False, words.append) is None
    assert word in words[0]
    assert model.config._attn_implementation == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_code_beside_the_weights_is_not_trusted_with_it() -> None:
    words: list[str] = []
    assert use_unpadded(model_of("bert"), True, words.append) is None
    assert "own code" in words[0]


def test_a_model_that_averages_over_all_places_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert")
    pooler = type(model.bert.pooler)  # type: ignore[union-attr]

    def mean(self: Any, hidden_states: Tensor) -> Tensor:
        found: Tensor = self.activation(self.dense(hidden_states.mean(1)))
        return found

    monkeypatch.setattr(pooler, "forward", mean)
    words: list[str] = []
    assert use_unpadded(model, False, words.append) is None
    assert "other gradients" in words[0]


def test_a_padding_token_that_is_the_vocabulary_s_last_is_taken() -> None:
    """As in a vocabulary made from data, whose special tokens stand behind all others."""
    assert use_unpadded(model_of("bert", vocab_size=300, pad_token_id=299), trusted=False) is not None
