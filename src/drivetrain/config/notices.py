"""Remarks before the start on a run that works: settings without effect, precisions that are only emulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.config.engine_rules import foreign, is_default, is_read
from drivetrain.config.engines import SINGLE
from drivetrain.config.machine import Machine
from drivetrain.config.precision import Precision
from drivetrain.config.run import RunConfig
from drivetrain.config.training import Schedule
from drivetrain.errors import Problem, counted


def notices(run: RunConfig, machine: Machine, problems: Sequence[Problem] = ()) -> list[str]:
    """Returns remarks on a run. problems: those of a run that is refused; where its engine is not known there are no
    remarks, which would be on the engine that stands in for it."""
    if run.engine == SINGLE and any(each.field == "engine" for each in problems):
        return []
    emulation = emulation_notice(run.precision_spec, machine)
    of_the_run = [
        *_without_effect(run),
        *_spread(run, machine),
        *_workers(run, machine),
        *_casts(run, machine),
        *_foreign(run),
        *_underflow(run),
    ]
    of_the_machine = [f"{machine.unused} is not used: this run takes the CPU"] if machine.unused else []
    return [*of_the_run, *of_the_machine, *([emulation] if emulation else [])]


def _without_effect(run: RunConfig) -> Iterator[str]:
    """Yields settings that differ from their defaults and are read by nothing. (A resolved run file spells out all
    defaults.)"""
    optimizer = run.optimizer.kind
    checks = (
        (
            "processes",
            run.processes != 1 and not run.engine.takes_processes,
            "engine=single runs in one; engine=ddp or fsdp spreads it",
        ),
        ("scaler", not run.precision_spec.scaled, "only fp16-mixed and fp16-master scale the loss"),
        ("optimizer.momentum", "momentum" not in optimizer.reads, "only sgd reads it"),
        ("optimizer.betas", "betas" not in optimizer.reads, f"{optimizer.name} has none"),
        ("optimizer.eps", "eps" not in optimizer.reads, "sgd has none, adafactor's are optimizer.options.eps"),
        *_of_the_schedule(run.schedule),
        ("evaluation.every_epochs", run.evaluation.every_steps is not None, "every_steps was given and decides"),
        ("loader.prefetch", not run.loader.workers, "there are no workers"),
        ("micro_batch_size", _whole_batch(run) and not run.workload.makes_samples, "it is not smaller than the batch"),
        *((field, True, why) for field, why in run.workload.without_effect()),
    )
    for field, unread, why in checks:
        if unread and not is_default(run, field):
            yield f"{field} has no effect: {why}"


def _of_the_schedule(schedule: Schedule) -> Iterator[tuple[str, bool, str]]:
    """Yields each field of the schedule, whether nothing reads it, and why."""
    name, own = schedule.name, schedule.own
    rules_all = "a function of your own rules the whole run"
    yield "schedule.final_lr_ratio", name == "constant" or own, "constant stays" if not own else rules_all
    for field in ("warmup_steps", "warmup_ratio"):
        yield f"schedule.{field}", own, rules_all
    yield "schedule.power", name != "polynomial", "only polynomial reads it"
    for field in ("decay_ratio", "decay_steps", "decay_shape"):
        yield f"schedule.{field}", name != "wsd", "only wsd reads it"
    yield "schedule.options", not own, "only a function of your own takes them"


def _whole_batch(run: RunConfig) -> bool:
    batch = run.batch_size or run.batch_size_per_device
    return run.micro_batch_limit is not None and batch is not None and run.micro_batch_limit >= batch


def _spread(run: RunConfig, machine: Machine) -> Iterator[str]:
    engine, name = run.engine, run.engine.label
    if engine.takes_processes and run.devices == 1:
        yield f"engine={name} has one device to spread over: give processes"
    if engine.traits.spreads and machine.device == "cpu" and run.world_size > machine.cpu_cores * run.nodes:
        yield f"{run.processes} processes share {machine.cpu_cores} cores: they wait for one another"
    if machine.device == "cpu" and (run.offload_activations or engine.offloads):
        yield "offloading saves nothing here: on a CPU run everything is in CPU memory already"
    yield from run.workload.notices(run)
    if engine.splits_the_head and run.workload.may_fuse_loss:
        yield "workload.model.fused_loss has no effect: tp splits the head, and each rank has logits of its part alone"
    yield from engine.notices(run, machine)


def _workers(run: RunConfig, machine: Machine) -> Iterator[str]:
    workers = run.loader.workers
    if isinstance(workers, int) and workers > machine.cpu_cores:
        cores = counted(machine.cpu_cores, "core")
        yield f"loader.workers={workers} starts more processes than the {cores} here run at once; auto chooses a number"


def _casts(run: RunConfig, machine: Machine) -> Iterator[str]:
    quicker = run.precision_spec.casting_once
    if quicker is not None and machine.device == "cuda" and quicker not in run.engine.traits.lacks:
        yield (
            f"{run.precision} casts fp32 weights in every forward pass; precision={quicker} casts them once a step, "
            "and computes in bf16 also what autocast keeps in fp32 (docs/reference/precision.md)"
        )


def _foreign(run: RunConfig) -> Iterator[str]:
    """Remarks on keys of a foreign configuration that nothing reads, or whose translation differs a little."""
    for where, found in foreign(run):
        of_the_run = {name: value for name, value in found.settings.items() if not name.startswith("engine.")}
        given = [f"{name}={value}" for name, value in of_the_run.items() if is_read(name, run)]
        if given:
            yield f"{where} gives {', '.join(given)}"
        unread = [note.key for note in found.with_fate("unneeded")]
        if unread:
            yield f"{where}: {', '.join(unread)} have no effect here (drivetrain import says why)"
        for note in found.with_fate("changed"):
            yield f"{where}.{note.key}: {note.why}"


SMALLEST_FP16 = 2.0**-24  # the smallest positive fp16 number


def _underflow(run: RunConfig) -> Iterator[str]:
    kind, in_fp16 = run.optimizer.kind, run.precision_spec.parameters == "float16"
    eps = run.optimizer.options.get("eps", run.optimizer.eps)
    if in_fp16 and kind.is_torchs and "eps" in kind.reads and eps < SMALLEST_FP16:
        yield (
            f"optimizer.eps={eps:g} is 0 in fp16: a parameter whose gradient is 0 becomes NaN. Give "
            "at least 1e-7, or take fp16-mixed"
        )


def emulation_notice(precision: Precision, machine: Machine) -> str | None:
    """Returns the remark made wherever 16-bit products are computed by the fp32 kernels."""
    if machine.device != "cpu" or precision.compute in machine.native_dtypes:
        return None
    return (
        f"{machine.device_name} has no {precision.compute} arithmetic: products are computed in fp32 from rounded "
        "inputs and rounded back (emulated). Accuracy is what such hardware gives; time and memory are not"
    )
