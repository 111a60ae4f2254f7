"""Models of language-model runs: fitted to tokenizer and length, with the options of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from drivetrain.errors import UserError
from drivetrain.models import language_head
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.language_tokenizer import num_ids
from tests.tiny_language import END, LLAMA, ROWS, SIZES, loaded, plain_loss, workload

BERT = {"model_type": "bert", **SIZES, "max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def built(work: LanguageModelWorkload, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return work.build_model()


def refusal(folder: Path, **given: Any) -> str:
    work = workload(folder, ROWS, **given)
    with pytest.raises(UserError) as caught:
        built(work)
    assert all(each.field.startswith("workload.") for each in caught.value.problems)
    return str(caught.value)


# --- fitted to tokenizer and length -----------------------------------------------------------------------------------


def test_what_the_config_leaves_out_follows_from_the_tokenizer(tmp_path: Path) -> None:
    model = built(workload(tmp_path, ROWS))
    assert (model.config.vocab_size, model.config.eos_token_id) == (259, END)
    assert model.config.pad_token_id is None  # the embedding of the token that ends texts would not learn
    given = built(workload(tmp_path, ROWS, model={"config": {**LLAMA, "vocab_size": 300, "eos_token_id": 7}}))
    assert (given.config.vocab_size, given.config.eos_token_id) == (300, 7)


def test_a_vocabulary_smaller_than_the_tokens_is_refused_with_both_numbers(tmp_path: Path) -> None:
    words = refusal(tmp_path, model={"config": {**LLAMA, "vocab_size": 257}})
    assert "vocab_size (257) < the tokenizer's tokens (259" in words
    assert "<|im_start|>, <|im_end|> of the template among them" in words
    assert "workload.model.resize_vocabulary=true" in words


def test_a_resized_vocabulary_keeps_the_rows_that_were_there(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    torch.manual_seed(1)
    published = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA, "vocab_size": 257}))
    published.save_pretrained(folder)
    model = {"path": str(folder), "tokenizer": "bytes", "resize_vocabulary": True}
    work = workload(tmp_path, ROWS, model=model)
    found = built(work)
    for ours, theirs in (
        (found.get_input_embeddings(), published.get_input_embeddings()),
        (found.get_output_embeddings(), published.get_output_embeddings()),
    ):
        assert ours.weight.shape == (259, 32)
        assert torch.equal(ours.weight[:257], theirs.weight)
    ids, trained = loaded(work.train)[0]
    batch = work.collate([work.train.load(0, 0)])
    expected = plain_loss(found, ids, trained)[0].sum()
    torch.testing.assert_close(work.loss_sum(found, batch), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(UserError, match="resize_vocabulary"):
        built(workload(tmp_path, ROWS, model={**model, "resize_vocabulary": False}))


def test_new_rows_that_are_frozen_are_reported_to_stay_as_they_are(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 257}
    work = workload(tmp_path, ROWS, model={"config": config, "resize_vocabulary": True, "train_last_blocks": 1})
    built(work)
    assert any(warning.startswith("2 rows are added to the embedding") for warning in work.warnings)


def test_a_model_without_numbers_is_resized_too(tmp_path: Path) -> None:
    """As the other ranks build it under engine=fsdp with meta."""
    work = workload(tmp_path, ROWS, model={"config": {**LLAMA, "vocab_size": 257}, "resize_vocabulary": True})
    with torch.device("meta"):
        model = built(work)
    assert model.get_input_embeddings().weight.shape == (259, 32)
    assert model.get_input_embeddings().weight.is_meta
    assert work.packs


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_samples_longer_than_the_context_are_refused_with_both_numbers(stage: str, tmp_path: Path) -> None:
    rows = [{"text": "x" * 999}] if stage == "pretrain" else ROWS
    work = workload(tmp_path, rows, stage=stage, length=129)
    with pytest.raises(UserError, match=r"length \(129\) > the model's context \(128; max_position_embeddings\)"):
        built(work)
    fits = workload(tmp_path, rows, stage=stage, length=128)
    model = built(fits)
    fits.loss_sum(model, fits.collate([fits.train.load(0, 0)]))


def test_dynamic_scaling_does_not_reach_what_is_trained(tmp_path: Path) -> None:
    """Beyond the context a sample's loss would depend on how long those before it were."""
    scaled = {"model": {"config": LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}}
    with pytest.raises(UserError, match=r"length \(129\)(.|\n)*dynamic(.|\n)*of type linear, yarn or llama3"):
        built(workload(tmp_path, ROWS, length=129, **scaled))
    model = built(workload(tmp_path, ROWS, length=128, **scaled)).train()
    ids, places = torch.arange(128)[None], torch.arange(128)[None]
    before = model(input_ids=ids, position_ids=places).logits
    assert torch.equal(model(input_ids=ids, position_ids=places).logits, before)
    assert torch.equal(built(workload(tmp_path, ROWS, length=128))(input_ids=ids).logits, before)


def test_ids_with_gaps_get_rows_up_to_the_largest(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 400}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "a")), eos_token="b")
    tokenizer.save_pretrained(tmp_path / "tokens")
    assert (len(tokenizer), num_ids(tokenizer)) == (2, 401)
    rows = [{"text": "a b " * 99}]
    model = {"config": LLAMA, "tokenizer": str(tmp_path / "tokens")}
    assert built(workload(tmp_path, rows, stage="pretrain", model=model)).config.vocab_size == 401
    small = workload(tmp_path, rows, stage="pretrain", model={**model, "config": {**LLAMA, "vocab_size": 400}})
    with pytest.raises(UserError, match=r"vocab_size \(400\) < the tokenizer's tokens \(401"):
        built(small)


def test_a_folder_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    folder, config = tmp_path / "published", LlamaConfig(**{**LLAMA, "vocab_size": 300})
    published = AutoModelForCausalLM.from_config(config)
    kept = {name: weight for name, weight in published.state_dict().items() if "layers.1." not in name}
    published.save_pretrained(folder, state_dict=kept)
    work = workload(tmp_path, ROWS)
    work._reader.tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"published lacks weights: model\.layers\.1\."):
        built(workload(tmp_path, ROWS, model={"path": str(folder)}))


def test_all_that_does_not_fit_is_reported_at_once(tmp_path: Path) -> None:
    words = refusal(tmp_path, length=500, model={"config": {**LLAMA, "vocab_size": 10}})
    assert "length (500)" in words
    assert "vocab_size (10)" in words


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path: Path) -> None:
    assert "sees the tokens that it is to predict\n    give is_decoder: true" in refusal(
        tmp_path, model={"config": BERT}
    )
    model = built(workload(tmp_path, ROWS, model={"config": {**BERT, "is_decoder": True}}))
    assert model.training
    with pytest.raises(UserError, match="sees the tokens"):
        built(workload(tmp_path, [{"text": "x" * 999}], stage="pretrain", model={"config": BERT}))


# --- options ----------------------------------------------------------------------------------------------------------


def test_rope_scaling_reaches_the_config_and_the_frequencies(tmp_path: Path) -> None:
    scaled = {"type": "linear", "factor": 4.0}
    model = built(workload(tmp_path, ROWS, length=512, model={"config": LLAMA, "rope_scaling": scaled}))
    assert model.config.rope_parameters["rope_type"] == "linear"
    assert model.config.rope_parameters["factor"] == 4
    assert model.config.max_position_embeddings == 512
    plain = built(workload(tmp_path, ROWS))
    torch.testing.assert_close(model.model.rotary_emb.inv_freq * 4, plain.model.rotary_emb.inv_freq)


def test_rope_scaling_reaches_a_loaded_model_too(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA, "vocab_size": 300})).save_pretrained(tmp_path / "m")
    given = {"path": str(tmp_path / "m"), "tokenizer": "bytes", "rope_scaling": {"type": "linear", "factor": 2.0}}
    work = workload(tmp_path, ROWS, length=256, model=given)
    assert built(work).config.max_position_embeddings == 256
    assert built(work).config.rope_parameters["factor"] == 2


def test_frozen_blocks_do_not_change_and_the_others_all_do(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS, model={"config": {**LLAMA, "num_hidden_layers": 3}, "train_last_blocks": 2})
    model = built(work)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    work.loss_sum(model, work.collate([work.train.load(i, 0) for i in range(4)])).backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if name.startswith(("model.layers.1.", "model.layers.2."))}
    assert any(f"{sum(before[name].numel() for name in changed):,} parameters are trained" in w for w in work.warnings)


def test_neftune_changes_the_loss_in_training_and_nothing_in_evaluation(tmp_path: Path) -> None:
    plain, noisy = (workload(tmp_path, ROWS, model={"config": LLAMA, **more}) for more in ({}, {"neftune_alpha": 5}))
    models = built(plain), built(noisy)
    batch = plain.collate([plain.train.load(i, 0) for i in range(4)])

    def losses(work: LanguageModelWorkload, model: nn.Module) -> list[float]:
        return [work.loss_sum(model, batch).item() for _ in range(2)]

    assert len(set(losses(plain, models[0].train()))) == 1
    assert len({*losses(plain, models[0]), *losses(noisy, models[1].train())}) == 3
    assert losses(noisy, models[1].eval()) == losses(plain, models[0].eval())
    assert noisy.outputs(models[1], batch).loss_sum == plain.outputs(models[0], batch).loss_sum


@pytest.mark.parametrize("packing", [True, False])
def test_the_kernel_of_attention_is_the_one_that_was_asked_for(packing: bool, tmp_path: Path) -> None:
    for choice, found in (("eager", "eager"), ("sdpa", "drivetrain_packed" if packing else "sdpa")):
        work = workload(tmp_path, ROWS, packing=packing, model={"config": LLAMA, "attention": choice})
        assert built(work).config._attn_implementation == found
        assert work.packs == (packing and choice == "sdpa")
        assert [warning for warning in work.warnings if "attention=eager" in warning] == (
            ["sequences cannot be packed: attention=eager computes all pairs of a row"]
            if packing and not work.packs
            else []
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has all of them, if they are installed")
def test_a_kernel_that_is_not_here_is_refused_with_those_that_are(tmp_path: Path) -> None:
    words = refusal(tmp_path, model={"config": LLAMA, "attention": "flash"})
    assert "workload.model.attention: flash was given, but" in words
    assert "works here: eager, sdpa" in words


@pytest.mark.parametrize("fused", [True, "auto"])
def test_what_is_fused_in_vain_is_reported(fused: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_head, "AUTO_FROM", 1)
    gemma = {"model_type": "gemma2", **SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    work = workload(tmp_path, ROWS, model={"config": gemma, "fused_loss": fused})
    built(work)
    words = f"workload.model.fused_loss={str(fused).lower()}: Gemma2"
    assert any(warning.startswith(words) for warning in work.warnings)
