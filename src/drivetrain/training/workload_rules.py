"""Rules that need the data: does this run fit the workload that was built?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from drivetrain.config.run import RunConfig
from drivetrain.data.streams.endless import known_length
from drivetrain.errors import Problem, UserError
from drivetrain.generation.text_metrics import WIN_RATE, TextMetrics
from drivetrain.workloads.base import BestMetric, Workload
from drivetrain.workloads.generating import AnswersBeside, Generates, MakesSamples
from drivetrain.workloads.user_file import UserFile
from drivetrain.workloads.user_metrics import metrics_of

DERIVED = {"perplexity": False, "reward_margin": True}  # metrics by Workload.derived: whether more is better


def check_workload(run: RunConfig, workload: Workload) -> None:
    """Raises UserError with everything about the run that these data and this loss cannot do."""
    problems = [*_batch(run, workload), *_loss(run, workload), *_evaluation(run, workload)]
    if problems:
        raise UserError(problems)


def metric_direction_of_file(run: RunConfig) -> list[Problem]:
    """Returns a problem if the metric that decides, a function of the user's file, has no stated direction.

    For a file whose workload cannot be built, so that what is wrong beside its loss is reported with it.
    """
    name, file = run.evaluation.metric, run.workload.code_file
    if name is None or file is None:
        return []
    try:
        metric = metrics_of(UserFile(file.path, file.options).get("metrics"))[name]
        undirected = getattr(metric, "higher_is_better", None) is None
    except Exception:  # the failure that is being reported comes first
        return []
    return [_no_direction(name)] if undirected else []


def _no_direction(name: str) -> Problem:
    why = f"{name} does not state which direction is better"
    return Problem("evaluation.metric", why, f"set it: {name}.higher_is_better = True, or False")


def best_metric(run: RunConfig, workload: Workload) -> BestMetric:
    """Returns the run file's choice, else the workload's."""
    name = run.evaluation.metric
    if name is None or name == workload.best_metric.name:
        return workload.best_metric
    if name == "loss":
        return BestMetric("loss", higher_is_better=False)
    return BestMetric(name, higher_is_better=bool(_directions(run, workload)[name]))


def metric_directions(run: RunConfig, workload: Workload, names: Iterable[str]) -> dict[str, bool]:
    """Returns whether more is better, of those of the named metrics of which that is known."""
    best = best_metric(run, workload)
    own = {"loss": False, **DERIVED, **_directions(run, workload), best.name: best.higher_is_better}
    return {name: higher for name in names if (higher := own.get(name)) is not None}


def _directions(run: RunConfig, workload: Workload) -> dict[str, bool | None]:
    """Returns whether more is better, of each metric that an evaluation gives beside the loss."""
    own = {name: metric.higher_is_better for name, metric in workload.metrics().items()}
    of_texts = TextMetrics(run.evaluation.generation).directions
    is_paired = isinstance(workload, AnswersBeside) and workload.reference_answers != "never"
    return {**own, **of_texts, **{f"{WIN_RATE}{name}": True for name in of_texts if is_paired}}


def _batch(run: RunConfig, workload: Workload) -> Iterator[Problem]:
    batch, samples = run.global_batch, known_length(workload.train)
    if samples is not None and batch > samples:
        yield Problem(
            "batch_size", f"the batch ({batch}) > the training data ({samples} samples)", f"give at most {samples}"
        )
    if not workload.splits_batches and (run.micro_batch_size == "auto" or (run.micro_batch_limit or batch) < batch):
        given = "auto may be" if run.micro_batch_size == "auto" else f"{run.micro_batch_size}"
        yield Problem(
            "micro_batch_size",
            f"{given} < the batch ({batch}), but this loss does not decompose over samples",
            "leave micro_batch_size out",
        )
    if run.micro_batch_tokens is not None and workload.lengths is None and not _makes_texts(workload):
        why = "the lengths of samples are not known before they are read, or all are the same"
        yield Problem("micro_batch_tokens", why, "give micro_batch_size instead")
    if not workload.splits_batches and run.data_parallel_size > 1:
        yield Problem(
            "engine",
            f"{run.engine.label} spreads the batch over {run.data_parallel_size} devices, but this loss does not "
            "decompose over samples",
            "give engine=single",
        )
    elif not workload.splits_batches and run.micro_batch_size is None and run.micro_batch < batch:
        why = f"{run.engine.label} cuts the batch into micro-batches, but this loss does not decompose over samples"
        yield Problem("engine.pp", why, "leave pp out")


def _makes_texts(workload: Workload) -> bool:
    """Returns whether samples have tokens that can be counted once the model has made them."""
    return isinstance(workload, MakesSamples) and workload.made_sizes([]) is not None


def _loss(run: RunConfig, workload: Workload) -> Iterator[Problem]:
    """Reports needs of the loss beside one forward pass of the model, where the engine allows no more."""
    axis = run.engine.single_pass_axis
    needs = [f"auxiliary models ({', '.join(workload.auxiliary)})"] if workload.auxiliary else []
    needs += [workload.second_pass] if workload.second_pass is not None and axis == "pp" else []
    needs += ["statistics of the whole batch"] if workload.has_statistics else []
    needs += ["samples that the model makes"] if isinstance(workload, MakesSamples) else []
    if axis is not None and needs:
        what = {"pp": "a pipeline's step is one pass of one model", "cp": "context ranks see parts of each sequence"}
        why = f"this loss needs {' and '.join(needs)}, and {what[axis]}"
        yield Problem(f"engine.{axis}", why, f"leave {axis} out: tp, dp, fsdp and deepspeed have more passes")
    moved = [name for name, each in workload.auxiliary.items() if each.role == "moved" and each.mixing < 1]
    if moved and (run.precision_spec.cast or run.precision_spec.parameters != "float32"):
        why = f"{', '.join(moved)} follows the model in small steps, which 16 bits would round away"
        yield Problem("precision", why, "give bf16-mixed or fp32, whose weights stay in 32 bits")


def _evaluation(run: RunConfig, workload: Workload) -> Iterator[Problem]:
    evaluation = run.evaluation
    directions = _directions(run, workload)
    known = ["loss", *directions]
    prompts = workload.prompts if isinstance(workload, Generates) else ()
    if evaluation.generation and all(prompt.reference is None for prompt in prompts):
        why = "no prompt has a reference: texts have none, nor have prompts of your own"
        yield Problem("evaluation.generation", why, "evaluate on conversations (stage=sft), or leave it out")
    if evaluation.metric is not None and evaluation.metric not in known:
        near = difflib.get_close_matches(evaluation.metric, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"this workload has: {', '.join(known)}"
        yield Problem("evaluation.metric", f"there is no metric {evaluation.metric}", fix)
    elif evaluation.metric not in (None, "loss") and directions[evaluation.metric] is None:
        yield _no_direction(evaluation.metric)
    if workload.evaluation is None and evaluation.early_stopping is not None:
        yield Problem("evaluation.early_stopping", "there are no evaluation data to watch", "give evaluation data")
