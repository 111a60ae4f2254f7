"""Answers that are labelled one by one: formats, labels, mismatched answers, and KTO's loss against TRL's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.sets import bad_row_problems, open_sets, read_set
from drivetrain.errors import UserError
from drivetrain.workloads.loss_contract import LOSS, LossContext, Statistics
from drivetrain.workloads.unpaired import UnpairedWorkload
from tests.tiny_language import config, write_lines
from tests.workloads.test_preference_losses import built, compare, gradients, moved

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and those of what it imports
ASKED, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FORMS: dict[str, Mapping[str, Any]] = {
    "trl": {"prompt": "Hi", "completion": "Hello", "label": True},
    "trl, messages": {"prompt": [ASKED], "completion": [ANSWER], "label": True},
    "alpaca": {"instruction": "Hi", "output": "Hello", "label": True},
    "openai": {"messages": [ASKED, ANSWER], "label": True},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": True},
}
ROWS = [
    {
        "prompt": f"ask {n}",
        "completion": "yes " * (n % 3 + 1) + str(n) if n % 2 else "never " * (n % 4) + str(n),
        "label": n % 2 == 1,
    }
    for n in range(9)
]


def read(folder: Path, rows: list[Mapping[str, Any]], **source: Any) -> tuple[list[Any], list[str]]:
    data = LanguageData.model_validate({"train": {"path": write_lines(folder / "rows.jsonl", rows), **source}})
    [opened] = open_sets(data.train, data, "labelled", "F")
    found = read_set(opened, 0, "F")
    return list(found.conversations), [each.why for each in bad_row_problems([found], "F")]


@pytest.mark.parametrize("name", FORMS)
def test_each_format_gives_the_same_labelled_answer(tmp_path: Path, name: str) -> None:
    found, bad = read(tmp_path, [FORMS[name], {**FORMS[name], "label": False}])
    assert bad == []
    assert [[(each.role, each.content) for each in talk.messages] for talk in found] == 2 * [
        [("user", "Hi"), ("assistant", "Hello")]
    ]
    assert [talk.desirable for talk in found] == [True, False]


def test_a_registry_names_the_label_and_only_the_last_reply_is_trained(tmp_path: Path) -> None:
    rows = [{"talk": [ASKED, ANSWER, ASKED, ANSWER], "good": label} for label in (1, "false")]
    columns = {"messages": "talk", "kto_tag": "good"}
    found, _ = read(tmp_path, rows, columns=columns)
    assert [each.desirable for each in found] == [True, False]
    assert [each.trained for each in found[0].messages] == [False, False, False, True]
    data = LanguageData.model_validate({"train": {"path": str(tmp_path / "rows.jsonl"), "columns": columns}})
    with pytest.raises(UserError, match=r"(?s)its column good distinguishes replies .*give workload\.stage: kto"):
        open_sets(data.train, data, "conversations", "F")


@pytest.mark.parametrize(
    ("label", "why"), [(None, "label is missing"), ("maybe", "label is 'maybe', neither"), (3, "3")]
)
def test_a_label_that_is_none_is_named(tmp_path: Path, label: Any, why: str) -> None:
    _, bad = read(tmp_path, [FORMS["trl"], {**FORMS["trl"], "label": label}])
    assert len(bad) == 1
    assert why in bad[0]


def workload(folder: Path, rows: list[dict[str, Any]] = ROWS, **preference: Any) -> UnpairedWorkload:
    path = write_lines(folder / "rows.jsonl", rows)
    made = config(folder, stage="kto", train=path, template="plain", evaluation_fraction=0)
    block = made.preference.model_validate({"reference": "copy", **preference})
    return UnpairedWorkload(made.model_copy(update={"preference": block}), 0)


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_are_refused(tmp_path: Path, label: bool) -> None:
    with pytest.raises(UserError, match="every answer is labelled as"):
        workload(tmp_path, [{**row, "label": label} for row in ROWS])


def test_each_prompt_is_mismatched_with_the_answer_of_one_other_sample(tmp_path: Path) -> None:
    work = workload(tmp_path)
    decode = work.tokenizer.decode
    met = []
    for index in range(len(ROWS)):
        own, mismatched, *_ = work.train.load(index, 0)
        text, answers = decode(mismatched[0].tolist()), decode(mismatched[0][mismatched[1]].tolist())
        assert text.startswith(f"ask {index}")
        assert own[0].tolist() != mismatched[0].tolist()
        met.append(answers.strip())
    assert sorted(met) == sorted(decode(ids[targets].tolist()).strip() for (ids, targets), *_ in loaded(work))


def loaded(work: UnpairedWorkload) -> list[Any]:
    return [work.train.load(index, 0) for index in range(len(work.train))]


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("trl")
    work = workload(folder)
    model = built(work)
    work.save_assets(model, folder / "model")
    for name, each in {"model": model, "reference": moved(model)}.items():
        each.save_pretrained(folder / name)  # type: ignore[operator]
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    models = [load(folder / name, attn_implementation="sdpa") for name in ("model", "reference")]
    given = {"report_to": [], "use_cpu": True, "bf16": False, "train_sampling_strategy": "sequential"}
    arguments = trl.KTOConfig(output_dir=str(folder / "out"), per_device_train_batch_size=3, **given)
    rows = datasets.Dataset.from_list(ROWS)
    return trl.KTOTrainer(*models, args=arguments, train_dataset=rows, processing_class=work.tokenizer)


def their_inputs(work: UnpairedWorkload) -> dict[str, Tensor]:
    samples = loaded(work)
    found: dict[str, Tensor] = {"label": torch.tensor([each.desirable for each in samples])}
    for prefix, side in (("", 0), ("KL_", 1)):
        rows = [each[side] for each in samples]
        shape = len(rows), max(len(ids) for ids, _ in rows)
        ids, mask, answers = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        for number, (tokens, targets) in enumerate(rows):
            ids[number, : len(tokens)] = torch.from_numpy(tokens.astype("int64"))
            mask[number, : len(tokens)] = 1
            answers[number, : len(tokens)] = torch.from_numpy(targets.astype("int64"))
        found |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask, f"{prefix}completion_mask": answers}
    return found


@pytest.mark.parametrize(
    "ours",
    [{}, {"desirable_weight": 1.5, "undesirable_weight": 0.5, "beta": 0.3}, {"loss": "apo_zero_unpaired"}],
    ids=str,
)
def test_ktos_loss_and_its_gradient_are_those_of_trls_trainer(
    tmp_path: Path, trl_trainer: Any, ours: dict[str, Any]
) -> None:
    work = workload(tmp_path, **ours)
    model = built(work)
    batch, context = work.collate(loaded(work)), LossContext({"reference": moved(model)})
    if work.has_statistics:
        with torch.no_grad():
            sums = work.statistics(model, batch, context).sums
        assert sums["ratios"] != 0
        context = LossContext(context.auxiliary, Statistics(sums=sums))
    loss = work.loss_sums(model, batch, context)[LOSS] / work.count(batch)
    loss.backward()
    trl_trainer.loss_type, trl_trainer.beta = ours.get("loss", "kto"), ours.get("beta", 0.1)
    trl_trainer.calculate_KL = work.has_statistics
    trl_trainer.desirable_weight = ours.get("desirable_weight", 1.0)
    trl_trainer.undesirable_weight = ours.get("undesirable_weight", 1.0)
    trl_trainer.model.zero_grad()
    expected = trl_trainer._compute_loss(trl_trainer.model, their_inputs(work), False)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    compare(gradients(model), gradients(trl_trainer.model))
