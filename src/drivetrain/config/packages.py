"""The optional packages that a run needs, and the extra of drivetrain that brings each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import KINDS
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, problem


@dataclass(frozen=True)
class Package:
    extra: str
    purpose: str


OPTIONAL = {
    "deepspeed": Package("deepspeed", "engine=deepspeed, zero1 to zero3"),
    "accelerate": Package("accelerate", "engine=accelerate"),
    "peft": Package("adapters", "adapter"),
    "bitsandbytes": Package("bitsandbytes", "quantised_base=nf4, int8, optimizer.name=bnb-adamw8bit"),
    "torchao": Package(
        "lowbit", "optimizer.name=adamw8bit, quantised_base=int4, quantisation_aware, precision=fp8-mixed"
    ),
    "pytorch_optimizer": Package("lowrank", "optimizer.name=galore"),
    "math_verify": Package("rewards", "the reward math"),
    "tensorboard": Package("tensorboard", "the tensorboard tracker"),
    "wandb": Package("wandb", "the wandb tracker"),
    "mlflow": Package("mlflow", "the mlflow tracker"),
    "trackio": Package("trackio", "the trackio tracker"),
    "swanlab": Package("swanlab", "the swanlab tracker"),
    "kubeflow_trainer_api": Package("kubernetes", "drivetrain launch --validate"),
    "ray": Package("ray", "drivetrain train --ray"),
    "datasets": Package("hub", "data sets named by hub id"),
    "fastapi": Package("serve", "drivetrain serve, drivetrain board"),
    "uvicorn": Package("serve", "drivetrain serve, drivetrain board"),
    "opentelemetry.exporter.otlp.proto.http": Package("opentelemetry", "the opentelemetry tracker"),
    "prometheus_client": Package("serve", "drivetrain serve: /metrics; the prometheus tracker"),
}
# tracker -> the package that it needs
TRACKERS = {
    **{name: name for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")},
    "prometheus": "prometheus_client",
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http",
}


def installed() -> frozenset[str]:
    """Returns the names of the optional packages that this environment has. Imports none of them."""
    return frozenset(filter(_is_there, OPTIONAL))


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be part of
        return False


def remedy(package: str) -> str:
    return f"pip install 'drivetrain[{OPTIONAL[package].extra}]'"


def require(field: str, packages: Sequence[str], extra: str | None = None) -> None:
    """Raises UserError naming those of the optional packages that are not installed, with the command that adds them.
    field: the verb or option that needs them. extra: that brings all of them; None: that of the first."""
    missing = [name for name in packages if not _is_there(name)]
    if missing:
        fix = remedy(missing[0]) if extra is None else f"pip install 'drivetrain[{extra}]'"
        raise problem(field, f"it needs {' and '.join(missing)}, not installed here", fix)


def needed(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yields (field of the run file, feature that needs the package, package)."""
    for package in sorted(run.engine.packages):
        yield "engine", f"engine={run.engine.label}", package
    yield from run.workload.packages
    if run.adapter is not None:
        yield "adapter", "it", "peft"
    if run.quantised_base is not None:
        yield "quantised_base", run.quantised_base.format, run.quantised_base.library
    if run.quantisation_aware is not None:
        yield "quantisation_aware", "it", "torchao"
    if run.precision_spec.package is not None:
        yield "precision", run.precision, run.precision_spec.package
    optimizer = KINDS.get(run.optimizer.name)
    if optimizer is not None and not optimizer.is_torchs:
        yield "optimizer.name", optimizer.name, optimizer.package
    for tracker in run.tracking.trackers:
        if tracker in TRACKERS:
            yield "tracking.trackers", tracker, TRACKERS[tracker]


def package_problems(run: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Yields a problem for each package that is missing on this machine, before any process starts."""
    for field, what, package in needed(run):
        if machine.packages is not None and package not in machine.packages:
            why = f"{what} needs {package}, which is not installed"
            yield Problem(field, why, remedy(package))
