"""Translates mmengine's keys that are independent of others."""

from __future__ import annotations

from typing import Any

from drivetrain.config.translation import Handler, Translation, fated, if_on, lost

LANGUAGE = fated("refused", "give the data as workload.data of type language_model, with --onto")
RUNTIME = fated("unneeded", "it is mmengine's own running")


def _sampler(key: str, value: Any, into: Translation) -> None:
    kind = str(value.get("type", "")).rsplit(".", 1)[-1]
    if kind in ("DefaultSampler", "InfiniteSampler", "SequenceParallelSampler", "") and value.get("shuffle", True):
        into.note(key, "unneeded", "the order is random, a function of seed and step")
    elif kind == "LengthGroupedSampler":
        into.note(key, "refused", "the order of data is random; workload.data.group_by_length spares padding")
    else:
        into.note(key, "refused", "the order of data is random, a function of seed and step")


LOADER: dict[str, Handler] = {
    "dataset": LANGUAGE,
    "collate_fn": LANGUAGE,
    "sampler": _sampler,
    "batch_sampler": if_on(fated("refused", "the order of data is random, a function of seed and step")),
    "drop_last": if_on(fated("refused", "the last batch of an epoch is kept: every sample counts once")),
    "persistent_workers": fated("unneeded", "workers stay for the whole run"),
    "pin_memory": fated("unneeded", "memory is pinned where there is a GPU"),
    "prefetch_factor": lambda key, value, into: into.set(key, "loader.prefetch", value),
}
CLIPPING: dict[str, Handler] = {
    "error_if_nonfinite": fated("unneeded", "a norm that is no number ends the run, or is a step skipped"),
    "norm_type": lambda key, value, into: into.note(
        key, "unneeded" if value == 2 else "refused", "the norm is the Euclidean one", alters=value != 2
    ),
}
WRAPPER: dict[str, Handler] = {
    **dict.fromkeys(("paramwise_cfg", "constructor"), if_on(lost("rates a parameter group"))),
}
LOOP: dict[str, Handler] = {
    **dict.fromkeys(("type", "by_epoch", "dynamic_intervals"), RUNTIME),
    "val_begin": if_on(fated("refused", "evaluations start with the first that is due")),
}


def _custom_hooks(key: str, value: Any, into: Translation) -> None:
    for position, hook in enumerate(value if isinstance(value, list) else [value]):
        kind = str(hook.get("type", "") if isinstance(hook, dict) else hook).rsplit(".", 1)[-1]
        if kind == "EvaluateChatHook":
            into.note(f"{key}.{position}", "refused", "workload.generate answers prompts at each evaluation")
        elif kind in ("DatasetInfoHook", "ThroughputHook", "VarlenAttnArgsToMessageHubHook"):
            into.note(f"{key}.{position}", "unneeded", "the report has the throughput, and the run its own notices")
        else:
            into.note(f"{key}.{position}", "refused", f"{kind}: a tracker of your own listens to the run's events")


def _scaled_rate(key: str, value: Any, into: Translation) -> None:
    if isinstance(value, dict) and not value.get("enable", False):
        into.note(key, "unneeded", "it is off")
    else:
        into.note(key, "refused", "optimizer.lr sets the learning rate", alters=True)


# what the Runner reads; the other names of a file only serve within it
RUNNER: dict[str, Handler] = {
    "model": LANGUAGE,
    **dict.fromkeys(("tokenizer", "image_processor", "framework", "training_args", "trainer"), LANGUAGE),
    **dict.fromkeys(("val_evaluator", "test_dataloader", "test_evaluator"), LANGUAGE),
    **dict.fromkeys(("train_dataloader", "val_dataloader", "optim_wrapper", "param_scheduler", "train_cfg"), RUNTIME),
    **dict.fromkeys(("default_hooks", "randomness", "work_dir", "experiment_name", "visualizer", "resume"), RUNTIME),
    **dict.fromkeys(("val_cfg", "test_cfg", "env_cfg", "log_level", "log_processor", "launcher"), RUNTIME),
    **dict.fromkeys(("default_scope", "runner_type", "custom_imports", "cfg", "data_preprocessor"), RUNTIME),
    "custom_hooks": _custom_hooks,
    "auto_scale_lr": _scaled_rate,
    "load_from": if_on(lost("weights are named by workload.model.path")),
    "compile": if_on(lambda key, _, into: into.set(key, "compile", True)),
    "strategy": if_on(fated("refused", "give the DeepSpeed JSON as a further file")),
    "sequence_parallel_size": if_on(fated("unneeded", "each rank has sequences of its own")),
}
