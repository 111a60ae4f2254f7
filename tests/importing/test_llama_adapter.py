"""LLaMA-Factory's adapters and quantised bases: what each key becomes, and that what comes of it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from drivetrain.config.run import RunConfig
from tests.importing.made import Run, given, imported, notes_of, of_text, run_of, trained

LORA = "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: a/b\ndataset: one\n"
SHORT = {"stage": "sft", "dataset": "talks", "template": "alpaca", "cutoff_len": 256}
PLAIN = {"method": "lora", "targets": "all-linear", "rank": 8, "alpha": 16}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", PLAIN),
        ("lora_rank: 4\n", {**PLAIN, "rank": 4, "alpha": 8}),  # twice the rank
        ("lora_rank: 4\nlora_alpha: 4\nlora_dropout: 0.1\n", {**PLAIN, "rank": 4, "alpha": 4, "dropout": 0.1}),
        ("lora_target: q_proj, v_proj\n", {**PLAIN, "targets": ["q_proj", "v_proj"]}),
        ("lora_target: [q_proj]\n", {**PLAIN, "targets": ["q_proj"]}),
        ("lora_target: all\n", PLAIN),
        ("additional_target: embed_tokens,lm_head\n", {**PLAIN, "train_also": ["embed_tokens", "lm_head"]}),
        ("use_rslora: true\nuse_dora: true\n", {**PLAIN, "rslora": True, "dora": True}),
        ("pissa_init: true\npissa_iter: -1\n", {**PLAIN, "pissa": True}),
        ("loraplus_lr_ratio: 16\n", {**PLAIN, "lr_ratio": 16.0}),
        ("adapter_name_or_path: one\nlora_rank: 4\nloraplus_lr_ratio: 2\n", {"path": "one", "lr_ratio": 2.0}),
        ("adapter_name_or_path: one\nadapter_folder: last\n", {"path": "one/last"}),
        (
            "adapter_name_or_path: one, two\nloraplus_lr_ratio: 2\n",
            [{"path": "one", "trained": False, "name": "below-1"}, {"path": "two", "lr_ratio": 2.0}],
        ),
        (
            "adapter_name_or_path: one\ncreate_new_adapter: true\nlora_rank: 2\n",
            [{"path": "one", "trained": False, "name": "below-1"}, {**PLAIN, "rank": 2, "alpha": 4}],
        ),
    ],
)
def test_an_adapter_is_that_of_llama_factory(lines: str, expected: Any, tmp_path: Path) -> None:
    raw = run_of(tmp_path, LORA + lines)
    assert raw["adapter"] == expected
    RunConfig.model_validate(raw)


def test_lora_is_trained_by_default(tmp_path: Path) -> None:
    found, raw = imported(tmp_path, of_text(tmp_path, LORA.replace("finetuning_type: lora\n", "")))
    assert raw["adapter"] == PLAIN
    words = {note.key: note.why for _, note in found.notes}
    assert words["finetuning_type"] == "adapter.method: lora; not given: the source's default"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", None),
        ("quantization_bit: 4\n", {"format": "nf4", "double": True}),
        ("quantization_bit: 4\ndouble_quantization: false\n", {"format": "nf4", "double": False}),
        ("quantization_bit: 8\nquantization_method: bnb\ndouble_quantization: true\n", {"format": "int8"}),
    ],
)
def test_a_quantised_base_is_that_of_llama_factory(lines: str, expected: Any, tmp_path: Path) -> None:
    raw = run_of(tmp_path, LORA + lines)
    assert raw.get("quantised_base") == expected
    RunConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("lines", "key", "fate", "reason"),
    [
        ("pissa_init: true\n", "pissa_init", "changed", "a fast one of 16 rounds"),
        ("pissa_init: true\npissa_iter: -1\n", "pissa_iter", "mapped", "exact"),
        ("pissa_init: true\npissa_convert: false\n", "pissa_convert", "changed", "loads on the base as it was"),
        ("loraplus_lr_ratio: 4\nloraplus_lr_embedding: 1e-6\n", "loraplus_lr_embedding", "changed", "embedding"),
        ("loraplus_lr_ratio: 4\nuse_dora: true\n", "loraplus_lr_ratio", "changed", "the rate of A"),
        ("adapter_name_or_path: a,b\n", "adapter_name_or_path", "changed", "there they are merged"),
        ("adapter_name_or_path: a\nlora_rank: 4\n", "lora_rank", "unneeded", "has its own"),
        ("resize_vocab: true\n", "resize_vocab", "refused", "resize and save it first"),
        ("bf16: true\n", "bf16", "changed", "in fp32 (LLaMA-Factory keeps them in 16 bits)"),
        ("oft_rank: 0\n", "oft_rank", "unneeded", "of finetuning_type oft"),
        ("use_galore: true\n", "use_galore", "refused", "lora and GaLore together"),
        ("quantization_bit: 8\n", "quantization_bit", "changed", "inputs stay as they are"),
        ("quantization_bit: 8\nquantization_type: nf4\n", "quantization_type", "unneeded", "4 bits"),
        ("lora_rnk: 4\n", "lora_rnk", "refused", "did you mean lora_rank?"),
    ],
)
def test_where_the_meaning_differs_it_is_reported(lines: str, key: str, fate: str, reason: str, tmp_path: Path) -> None:
    note = notes_of(tmp_path, LORA + lines)[key]
    assert note.fate == fate
    assert reason in note.why


@pytest.mark.parametrize(
    ("lines", "key", "reason"),
    [
        ("quantization_bit: 4\nquantization_type: fp4\n", "quantization_type", "fp4: 4 bits are nf4"),
        ("quantization_bit: 4\nquantization_method: hqq\n", "quantization_method", "bitsandbytes' 4 and 8 bits"),
        ("quantization_bit: 3\n", "quantization_bit", "3: there are 4 and 8"),
        ("train_from_scratch: true\n", "train_from_scratch", "randomly made"),
    ],
)
def test_what_cannot_be_had_becomes_no_workload_and_says_why(lines: str, key: str, reason: str, tmp_path: Path) -> None:
    found, raw = imported(tmp_path, of_text(tmp_path, LORA + lines))
    assert not {"workload", "adapter", "quantised_base"} & raw.keys()
    notes = {note.key: note for _, note in found.notes}
    assert notes[key].fate == "refused"
    assert reason in notes[key].why


def test_an_adapter_of_full_fine_tuning_is_refused_and_the_rest_has_no_meaning(tmp_path: Path) -> None:
    full = LORA.replace("lora", "full") + "lora_rank: 4\nadapter_name_or_path: one\n"
    assert "adapter" not in run_of(tmp_path, full)
    notes = notes_of(tmp_path, full)
    assert (notes["lora_rank"].fate, notes["adapter_name_or_path"].fate) == ("unneeded", "refused")


def test_full_fine_tuning_takes_the_adapter_of_the_run_file_below_it_away(tmp_path: Path) -> None:
    below = tmp_path / "below.yaml"
    below.write_text(
        "workload: {type: module, path: own.py}\nadapter: {rank: 2, dora: true}\nbatch_size: 2\nloop: {steps: 1}\n"
    )
    assert "adapter" not in run_of(tmp_path, LORA.replace("lora", "full"), onto=below)
    assert run_of(tmp_path, LORA, onto=below)["adapter"] == PLAIN  # one adapter, not half of each
    args = '{"learning_rate": 0.1, "output_dir": "run"}'
    assert run_of(tmp_path, args, ending=".json", onto=below)["adapter"] == {"rank": 2, "dora": True}


def test_galore_has_llama_factorys_rank_interval_and_scale(tmp_path: Path) -> None:
    full = LORA.replace("lora", "full") + "use_galore: true\nadam_beta2: 0.95\n"
    options = {"rank": 16, "update_proj_gap": 200, "scale": 2.0, "projection_type": "std"}
    expected = {"name": "galore", "lr": 5e-5, "weight_decay": 0.0, "betas": [0.9, 0.95], "options": options}
    assert run_of(tmp_path, full)["optimizer"] == expected
    lines = "galore_rank: 4\ngalore_update_interval: 9\ngalore_scale: 0.5\ngalore_proj_type: right\n"
    options = {"rank": 4, "update_proj_gap": 9, "scale": 0.5, "projection_type": "right"}
    assert run_of(tmp_path, full + lines)["optimizer"]["options"] == options
    assert notes_of(tmp_path, full + "optim: adafactor\n")["use_galore"].fate == "refused"


# --- what comes of it trains ------------------------------------------------------------------------------------------


def saved_adapter(folder: str, rank: int) -> None:
    """As PEFT leaves one that was trained."""
    config = peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(LlamaForCausalLM.from_pretrained("model"), config).save_pretrained(folder)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_imported_adapter_is_the_one_that_peft_makes_and_loads_there(bits: int | None, drivetrain: Run) -> None:
    quantised = {} if bits is None else {"quantization_bit": bits}
    given(**SHORT, finetuning_type="lora", lora_rank=4, use_rslora="true", **quantised)
    report = trained(drivetrain)
    base = LlamaForCausalLM.from_pretrained("model")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert report["engaged"]["trained_parameters"] == theirs.get_nb_trainable_parameters()[0]
    config = json.loads((Path(report["checkpoint"]) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, True)
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("model"), report["checkpoint"])
    moved = [name for name, weight in loaded.named_parameters() if "lora_B" in name and weight.any()]
    assert len(moved) == 2 * 7  # of two blocks, each with seven linear layers


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("new", [False, True])
def test_an_imported_run_goes_on_above_saved_adapters_as_there_on_the_merged_model(new: bool, drivetrain: Run) -> None:
    for name, rank in (("one", 2), ("two", 3)):
        saved_adapter(name, rank)
    given(**SHORT, finetuning_type="lora", adapter_name_or_path="one,two", create_new_adapter=new, learning_rate=1e-9)
    saved = Path(trained(drivetrain)["checkpoint"])
    base: Any = AutoModelForCausalLM.from_pretrained("model")
    for name in ("one", "two"):
        base = peft.PeftModel.from_pretrained(base, name).merge_and_unload()
    ours: Any = LlamaForCausalLM.from_pretrained("model")
    folders = ["below-1", "below-2", "default"] if new else ["below-1", "default"]
    for folder in folders:
        ours = peft.PeftModel.from_pretrained(ours, str(saved / folder)).merge_and_unload()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, base(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    for name, folder in (("one", "below-1"), *([("two", "below-2")] if new else [])):
        kept, left = (load_file(Path(each) / "adapter_model.safetensors") for each in (name, saved / folder))
        assert all(torch.equal(kept[key], left[key]) for key in kept)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("optim", ["adafactor", "adamw_bnb_8bit"])
def test_an_imported_optimizer_of_a_small_state_trains(optim: str, drivetrain: Run) -> None:
    given(**SHORT, finetuning_type="lora", optim=optim)
    assert trained(drivetrain)["steps"] == 2


@pytest.mark.usefixtures("here")
def test_imported_galore_trains(drivetrain: Run) -> None:
    given(**SHORT, finetuning_type="full", use_galore="true", galore_rank=4)
    assert trained(drivetrain)["steps"] == 2
