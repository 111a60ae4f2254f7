"""Answers that are labelled one by one: formats, labels, mismatched answers, and KTO's loss against TRL's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.samples import Labelled, Sample
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


def loaded(work: UnpairedWorkload) -> list[Labelled]:
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


# --- the reference's pass ---------------------------------------------------------------------------------------------


class Counted:
    """A model that counts its passes and the places that it reads."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.passes, self.places = model, 0, 0

    def __call__(self, **given: Any) -> Any:
        self.passes += 1
        self.places += given["input_ids"].numel()
        return self.model(**given)


def plain_log_probability(model: Any, sample: Sample) -> float:
    """One sequence by itself, through Transformers' own attention."""
    ids, targets = torch.from_numpy(sample[0].astype("int64")), torch.from_numpy(sample[1][1:])
    with torch.no_grad():
        found = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
    return float(found.gather(1, ids[1:, None])[:, 0][targets].sum())


def of_transformers(model: Any, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


LONG = [
    {
        "prompt": " ".join(f"{n}{word}" for word in range(4 * n + 1)),
        "completion": "so " * (n**2 % 13 + 1),
        "label": n % 2 == 0,
    }
    for n in range(9)
]
CASES = {"prompts shared": (ROWS, True), "answers apart": (ROWS, False), "prompts cut": (LONG, True)}


@pytest.mark.parametrize(("rows", "shares"), CASES.values(), ids=CASES)
def test_the_reference_reads_both_answers_before_the_step_as_transformers_reads_each_alone(
    tmp_path: Path, rows: list[dict[str, Any]], shares: bool
) -> None:
    work = workload(tmp_path, rows)
    work.shares_prompts = shares
    model = built(work)
    reference, samples = Counted(moved(model)), loaded(work)
    with torch.no_grad():
        found = work.statistics(model, work.collate(samples), LossContext({"reference": reference}))
    policy, compared = (of_transformers(each, tmp_path / "model") for each in (model, reference.model))
    own = [plain_log_probability(compared, each.own) for each in samples]
    assert found.rows["reference"].tolist() == pytest.approx(own, rel=1e-5)
    ratios = [
        plain_log_probability(policy, each.mismatched) - plain_log_probability(compared, each.mismatched)
        for each in samples
    ]
    assert found.sums["ratios"].item() == pytest.approx(sum(ratios), rel=1e-4)
    assert found.sums["answers"] == len(samples)
    places = sum(len(ids) - 1 for each in samples for ids, _ in each.sides)
    assert reference.passes == (1 if shares else 2)
    assert reference.places == places - (sum(each.shared for each in samples) if shares else 0)


def test_a_prompt_that_an_answer_of_another_sample_cuts_is_not_shared(tmp_path: Path) -> None:
    work = workload(tmp_path, LONG)
    prompts = work.train.parts[0].prompts.tolist()  # type: ignore[union-attr]
    cut, whole = [], []
    for each, prompt in zip(loaded(work), prompts, strict=True):
        begins = each.mismatched[0][:prompt].tolist() == each.own[0][:prompt].tolist()
        (whole if begins else cut).append((each.shared, prompt))
    assert cut
    assert whole
    assert all(shared == prompt - 1 for shared, prompt in whole)  # each answer's first token is predicted at the last
    assert all(shared < prompt // 2 for shared, prompt in cut)


@pytest.mark.parametrize("shares", [True, False])
def test_the_loss_finds_the_references_log_probabilities_among_those_of_the_global_batch(
    tmp_path: Path, shares: bool
) -> None:
    work = workload(tmp_path)
    work.shares_prompts = shares
    model = built(work)
    reference, samples = Counted(moved(model)), loaded(work)
    context = LossContext({"reference": reference})
    with torch.no_grad():
        whole = work.statistics(model, work.collate(samples), context)
    for places in ([7, 2, 4], [0, 8]):
        batch, own = work.collate([samples[place] for place in places]), torch.tensor(places)
        apart = LossContext(context.auxiliary, Statistics(whole.sums))
        known = LossContext(context.auxiliary, Statistics(whole.sums, whole.rows, own))
        expected = work.loss_sums(model, batch, apart)[LOSS]
        passes = reference.passes
        assert work.loss_sums(model, batch, known)[LOSS].item() == pytest.approx(expected.item(), rel=1e-6)
        assert reference.passes == passes


@pytest.mark.parametrize("shares", [True, False])
def test_an_evaluation_reads_each_answer_once_through_the_reference(tmp_path: Path, shares: bool) -> None:
    work = workload(tmp_path)
    work.shares_prompts = shares
    model = built(work)
    reference, batch = Counted(moved(model)), work.collate(loaded(work))
    context = LossContext({"reference": reference})
    with torch.no_grad():
        found = work.outputs_in(model, batch, context)
        assert reference.passes == (1 if shares else 2)
        sums = work.statistics(model, batch, context).sums
        expected = work.loss_sums(model, batch, LossContext(context.auxiliary, Statistics(sums)))[LOSS]
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)


def test_only_a_loss_with_a_reference_point_and_a_pass_of_the_reference_lays_out_both_answers(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, str]] = {
        "pass": {},
        "cached": {"reference": "cached"},
        "one": {"loss": "apo_zero_unpaired"},
    }
    both = set()
    for name, preference in kinds.items():
        work = workload(tmp_path, **preference)
        work.shares_prompts = True
        if "both_input_ids" in work.collate(loaded(work)):
            both.add(name)
    assert both == {"pass"}
