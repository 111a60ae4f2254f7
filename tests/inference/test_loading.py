"""Models that answer, loaded from each kind of source: as Transformers and PEFT answer with the same files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.generation.requests import Request
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.inference import loading
from drivetrain.inference.loading import LoadedModel, load_model
from drivetrain.runtime.hardware import detect
from tests.generation.small_models import model_of
from tests.generation.test_prompts import run_file
from tests.kept_memory import kept_bytes

Run = Callable[..., tuple[int, str, str]]
PROMPTS = ["one", "say something else", "b"]


def answered(model: LoadedModel, adapter: str | None = None, count: int = 8) -> list[tuple[int, ...]]:
    requests = [Request(model.text_ids(each), count, adapter=adapter) for each in PROMPTS]
    return [each.tokens for each in model.generator.answers(requests)]


def generated(model: Any, tokenizer: Any, count: int = 8) -> list[tuple[int, ...]]:
    """Transformers' own answers, one prompt after the other."""
    found = []
    for each in PROMPTS:
        ids = tokenizer(each, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        found.append(tuple(out[0, ids.shape[1] :].tolist()))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of Transformers."""
    folder = tmp_path_factory.mktemp("models") / "base"
    model_of("llama").save_pretrained(folder)
    byte_tokenizer(["<|end|>"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tones(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of plain PEFT over it."""
    folders = []
    for number, targets in enumerate((["q_proj", "v_proj"], ["q_proj", "down_proj"])):
        torch.manual_seed(number)
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"),
        )
        folders.append(tmp_path_factory.mktemp("adapters") / f"tone{number}")
        model.save_pretrained(folders[-1])
    return folders


def test_a_folder_of_transformers_answers_as_it_does(base: Path) -> None:
    with closing(load_model(base)) as model:
        assert (model.name, model.template, model.context_length, model.adapters) == ("base", None, 96, ())
        assert answered(model) == generated(
            AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
        )
        with pytest.raises(UserError, match="has no chat template"):
            model.chat_ids([Message("user", "a")])


def test_no_prompt_is_remembered_after_its_tokens_are_there(base: Path) -> None:
    """tokenizers keeps 10,000 texts otherwise, by which a server grows."""

    def ask(first: int) -> None:
        for number in range(first, first + 1000):
            model.text_ids(f"prompt {number} " * 5)

    with closing(load_model(base)) as model:
        ask(0)
        assert kept_bytes(lambda: ask(1000)) < 100_000  # 2 MB where they are kept


def test_a_model_larger_than_the_device_is_refused_with_what_answers_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(each.numel() for each in AutoModelForCausalLM.from_pretrained(base).parameters())
    room = dataclasses.replace(detect(), memory_bytes=3 * weights)
    monkeypatch.setattr(loading, "detect", lambda: room)
    with pytest.raises(UserError, match=r"(?s)GiB of weights, and .*predict under engine=fsdp") as refused:
        load_model(base)
    assert "--backend vllm or sglang" in str(refused.value)
    load_model(base, dtype="bfloat16").close()  # two bytes each


def test_each_request_is_answered_by_its_adapter(base: Path, tones: Sequence[Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = [generated(AutoModelForCausalLM.from_pretrained(base), tokenizer)]
    plain += [
        generated(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), each), tokenizer)
        for each in tones
    ]
    assert plain[0] != plain[1] != plain[2] != plain[0]
    with closing(load_model(base, adapters={"a": tones[0], "b": tones[1]})) as model:
        assert model.adapters == ("a", "b")
        assert [answered(model, name) for name in (None, "a", "b", "a", None)] == [*plain, plain[1], plain[0]]
        mixed = [Request(model.text_ids(PROMPTS[0]), 8, adapter=name) for name in ("b", None, "a")]
        assert [each.tokens for each in model.generator.answers(mixed)] == [plain[number][0] for number in (2, 0, 1)]
    with closing(load_model(tones[1])) as alone:  # its base stands in its own file
        assert answered(alone) == plain[2]


def test_adapters_share_the_rows_and_the_memory(
    base: Path, tones: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[tuple[int, int]] = []

    class Seen(RunningBatch):
        def __init__(self, store: Any, max_rows: int, max_cells: int) -> None:
            bounds.append((max_rows, max_cells))
            super().__init__(store, max_rows, max_cells)

    monkeypatch.setattr(loading, "RunningBatch", Seen)
    monkeypatch.setattr(loading, "cells_of", lambda _: 9000)
    with closing(load_model(base, adapters={"a": tones[0], "b": tones[1]}, max_rows=60)) as model:
        asked = [Request(model.text_ids("one"), 1, adapter=name) for name in (None, "a")]
        model.generator.answers(asked)
    assert bounds == [(20, 3000)] * 2


def test_an_adapter_that_replaces_a_module_is_not_switched(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match=r"whole modules .lm_head.*requests without them have it too"):
        load_model(base, adapters={"a": tmp_path / "own"})
    load_model(tmp_path / "own").close()


def test_a_base_is_not_asked_where_there_is_none(base: Path, tones: Sequence[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base has no adapter, and so no base"):
        load_model(base, with_base=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match=r"whole modules \(lm_head"):
        load_model(tmp_path / "own", with_base=True)
    with closing(load_model(tones[0], with_base=True)) as model:
        assert answered(model, "base") != answered(model)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("adapter.train_also=[lm_head]", "weights of the base itself were trained .lm_head.weight"),
        ("adapter.pissa=true", "PiSSA lowered the weights under its adapter"),
    ],
)
def test_a_base_that_training_changed_is_not_asked(
    base: Path, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    given = ("workload.model.config=null", f"workload.model.path={base}", "data.template=chatml", "adapter=lora", more)
    code, _, printed = drivetrain("train", "run.yaml", "output=out", "--quiet", *given)
    assert code == 0, printed
    with pytest.raises(UserError, match=why):
        load_model("out", checkpoint="last", with_base=True)


def test_texts_begin_as_the_tokenizer_begins_them_and_do_not_end(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "begun")
    tokenizer = byte_tokenizer(["<|end|>"])
    mark = tokenizer.convert_tokens_to_ids("<|end|>")
    both = TemplateProcessing(single="<|end|> $A <|end|>", special_tokens=[("<|end|>", mark)])
    tokenizer.backend_tokenizer.post_processor = both
    tokenizer.save_pretrained(folder)
    with closing(load_model(folder)) as model:
        bare = tuple(tokenizer("one", add_special_tokens=False)["input_ids"])
        assert model.text_ids("one") == model.text_ids("<|end|>one") == (mark, *bare)
        assert model.text_ids("") == (mark,)


def logprobs(model: LoadedModel, adapter: str | None = None) -> torch.Tensor:
    asked = Request((65, 66, 67, 68), 0, prompt_logprobs=True, adapter=adapter)
    [answer] = model.generator.answers([asked])
    return torch.tensor([each.logprob for each in answer.prompt_logprobs if each is not None])


def test_a_base_in_4_bits_has_the_numbers_of_bitsandbytes(base: Path, tones: Sequence[Path]) -> None:
    ids = torch.tensor([[65, 66, 67, 68]])
    plain = AutoModelForCausalLM.from_pretrained(base)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            # as one row: where blocks of 64 do not fill the rows, bitsandbytes' AVX-512 kernel takes the wrong scales
            row = module.weight.data.reshape(1, -1)
            codes, state = quantize_4bit(row, blocksize=64, quant_type="nf4", compress_statistics=True)
            module.weight.data = dequantize_4bit(codes, state).reshape(module.weight.shape)
    with closing(load_model(base, adapters={"a": tones[0]}, quantised="nf4")) as model:
        for adapter in (None, "a"):
            if adapter is not None:
                plain = peft.PeftModel.from_pretrained(plain, tones[0])
            with torch.no_grad():
                known = plain(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(logprobs(model, adapter), known, rtol=1e-3, atol=1e-3)


def test_a_base_in_8_bits_stays_near_the_whole_one(base: Path, tones: Sequence[Path]) -> None:
    found = []
    for quantised in (None, "int8"):
        with closing(load_model(base, adapters={"a": tones[0]}, quantised=quantised)) as model:  # type: ignore[arg-type]
            found.append(torch.stack([logprobs(model), logprobs(model, "a")]))
    difference = (found[0] - found[1]).abs().max()
    assert 0 < difference < 0.5
    assert (found[1][0] - found[1][1]).abs().max() > difference, "the adapter has an effect"


def test_16_bits_are_what_transformers_computes(base: Path) -> None:
    with closing(load_model(base, dtype="bfloat16")) as model:
        known = generated(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(base), 1
        )
        assert answered(model, count=1) == known


def test_a_run_its_file_and_its_checkpoint_answer_as_transformers_with_the_run_files_template(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    code, _, printed = drivetrain("train", "run.yaml", "output=out", "--quiet")
    assert code == 0, printed
    last = Path("out/checkpoints/step-00000006")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    known = generated(plain, tokenizer)
    talk = [{"role": "user", "content": "say 3"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    for source, given in (("out", {"checkpoint": "last"}), (last, {}), ("out", {"checkpoint": str(last)})):
        with closing(load_model(source, **given)) as model:  # type: ignore[arg-type]
            assert answered(model) == known
            assert model.chat_ids([Message("user", "say 3")]) == tuple(ids)


def test_an_adapters_run_answers_merged_or_over_its_quantised_base(
    base: Path, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    given = (
        "workload.model.config=null",
        f"workload.model.path={base}",
        "data.template=chatml",
        "adapter=lora",
        "lr=0.1",
    )
    for name, more in (("plain", ()), ("nf4", ("quantised_base=nf4",))):
        code, _, printed = drivetrain("train", "run.yaml", f"output={name}", "--quiet", *given, *more)
        assert code == 0, printed
        file = [json.loads(line) for line in Path(name, "samples.jsonl").read_text().splitlines()][-3:]
        with closing(load_model(name, checkpoint="last")) as model:
            requests = [Request(model.text_ids(each["prompt"]), 8) for each in file]
            assert [each.text for each in model.generator.answers(requests)] == [each["answer"] for each in file]
    with pytest.raises(UserError, match="has an adapter of its own"):
        load_model("plain", adapters={"a": "plain"})
    with closing(load_model("plain", checkpoint="last")) as model:
        merged = answered(model)
    bare = generated(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base))
    with closing(load_model("plain", checkpoint="last", with_base=True)) as model:
        assert model.adapters == ("base",)
        assert [answered(model, name) for name in (None, "base", None)] == [merged, bare, merged]
        assert bare != merged
    with closing(load_model("nf4", checkpoint="last", with_base=True)) as model:
        assert answered(model, "base") != answered(model)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_virtual_tokens_are_answered_with_as_peft_does(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    tuned.save_pretrained(tmp_path / "prompt")
    with closing(load_model(tmp_path / "prompt")) as model:
        assert answered(model) == generated(tuned, AutoTokenizer.from_pretrained(base))
    with pytest.raises(UserError, match="virtual tokens cannot be switched"):
        load_model(base, adapters={"virtual": tmp_path / "prompt"})


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no base"):
        load_model(tmp_path / "lost")
