"""`drivetrain.engine`: a training loop of your own over any engine and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.objects import sorted_out
from drivetrain.api.settings import RunFile, on_this_machine, raw_of, with_arguments
from drivetrain.checkpoint.directory import check_fits, newest_good, read, read_manifest, verify
from drivetrain.checkpoint.saving import save
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.engines.base import Engine, StepResult
from drivetrain.errors import RunError, UserError, problem
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.group import group_of_one, join, leave
from drivetrain.launch.prepare import judged_here
from drivetrain.launch.variables import of_the_run, variables
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.objects import held
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.run_folder import refuse_code_of_folders
from drivetrain.training.assemble import assemble_around
from drivetrain.workloads.example_batch import ExampleWorkload, batch_of
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_metrics import metrics_of

Batches = Sequence[Any] | Mapping[str, Tensor]


def engine(
    config: RunFile,
    model: nn.Module | Callable[[], nn.Module],
    *,
    loss: Any = None,
    loss_sum: Callable[..., Any] | None = None,
    count: Callable[..., int] | None = None,
    optimizer: Any = None,
    metrics: Any = None,
    tensor_parallel: Mapping[str, str] | None = None,
    trust: bool = False,
    set: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LoopEngine:
    """Returns an engine for a loop of your own. It works in the process that calls it: plain `python` has one, and
    `torchrun --nproc-per-node 4 script.py` has four, each of which calls it alike.

    config: an engine's name ("fsdp"), the path of a run file or its address in a store, or a mapping of its keys; of a
    run file what an engine reads is taken: engine, precision, scaler, recompute, compile, loop.max_grad_norm, seed and
    the like. settings: keys of the run file, as in drivetrain.train; max_grad_norm clips.

    model: a copy of it is trained (`weights` gives the result). loss: a function of (output, target) that returns a
    mean; or loss_sum and count, as in docs/how-to/own-code.md.

    optimizer: a function of parameters, a name, a class or a mapping; left out, the engine only evaluates. One that is
    made already is refused: sharding replaces the parameters that it holds.

    trust: run Python that the run.yaml of a run's folder names (docs/reference/security.md).

    The model is wrapped at the first batch, whose shapes some engines need. Raises UserError for a combination that
    cannot work.
    """
    arguments = {
        "model": model,
        "loss": loss,
        "loss_sum": loss_sum,
        "count": count,
        "optimizer": optimizer,
        "metrics": metrics,
        "tensor_parallel": tensor_parallel,
        "train_data": (),
    }
    with as_a_caller_reads_them(has_objects=True):
        keys, objects = sorted_out(arguments)
        del objects["train_data"]
        config = on_this_machine(config, "config")
        run = _run(config, {**keys, **settings}, set)
        if run[0] is not None and not _is_name(config) and not isinstance(config, Mapping):
            refuse_code_of_folders(run[0], Path(config), trust)
        if objects.get("loss") is not None:
            SummedLoss(objects["loss"])  # raises for one that is no plain mean, before any batch
        with held.holding(objects):
            ready = judged_here(*run)
        return LoopEngine(ready.run, objects, trains=optimizer is not None)


def _run(
    config: RunFile, given: Mapping[str, Any], dotted: Mapping[str, Any] | None
) -> tuple[RunConfig | None, list[Any]]:
    """Returns the run file that an engine reads. Data and length in it are placeholders: the caller has them."""
    raw: dict[str, Any] = {"engine": config} if _is_name(config) else raw_of(config)[0]
    problems = with_arguments(raw, {**given, **(dotted or {})})
    outer = OuterLauncher.here()
    if outer is None and (raw.get("processes") or 1) > 1:
        why = f"{raw['processes']} were given, and a loop of your own runs in the processes that there are"
        fix = f"leave it out, and start torchrun --nproc-per-node {raw['processes']} script.py"
        raise problem("processes", why, fix)
    if outer is None:
        raw["processes"] = None if _alone(raw) else 1
    raw |= {"workload": {"type": "objects"}, "batch_size": None, "batch_size_per_device": 1, "micro_batch_size": None}
    loop = raw.get("loop")
    limits = {"max_grad_norm": loop.get("max_grad_norm")} if isinstance(loop, dict) else {}
    raw["loop"] = {**limits, "steps": 1}
    return validate(raw, problems)


def _is_name(config: RunFile) -> bool:
    """Returns whether an engine's name was passed, not the path of a run file."""
    return isinstance(config, str) and not config.endswith((".yaml", ".yml"))


def _alone(raw: Mapping[str, Any]) -> bool:
    """Returns whether the engine always runs in one process and takes no number of processes."""
    given = raw.get("engine", "single")
    return (given.get("name") if isinstance(given, Mapping) else given) in ("single", "dp")


class LoopEngine:
    """An engine of `drivetrain.engine`. With several processes, all of them call its methods alike."""

    def __init__(self, run: RunConfig, objects: Mapping[str, Any], trains: bool) -> None:
        self.run, self.steps = run, 0
        self._objects, self._trains = dict(objects), trains
        self._machine, self._within = detect(run.device), ExitStack()
        self._within.enter_context(variables(of_the_run(run, self._machine.device)))
        if OuterLauncher.here() is not None and not dist.is_initialized():
            join(self._machine.device)
            self._within.callback(leave)
        self._within.enter_context(group_of_one(run.engine.traits.spreads))
        self._within.enter_context(arithmetic(run.precision_spec, self._machine))
        self._ranks = Communicator()
        self._engine: Engine | None = None
        self._closed = False
        self._workload: ExampleWorkload
        self._to_load: Path | None = None

    # --- who this process is -----------------------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        """The number of this process's share among the `data_world` shares of each global batch. Known before the first
        batch for engines that do not split the model; of a mesh, after it."""
        return self._ranks.rank if self._engine is None else self._engine.data_rank

    @property
    def data_world(self) -> int:
        return self.run.data_parallel_size if self._engine is None else self._engine.data_world

    @property
    def is_first(self) -> bool:
        """Whether this process is the one to print and to write."""
        return self._ranks.is_first

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward_backward(self, batches: Batches) -> Tensor:
        """Runs this process's batches of one step forward and backward; returns the mean loss of the global batch.

        batches: one batch or a list of them, (input, target) or dicts of tensors, on any device. Losses are divided by
        the number of valid targets in all batches of all processes, so that the cut of a global batch changes nothing;
        processes may have different numbers of batches, and batches different sizes.
        """
        with as_a_caller_reads_them(has_objects=True):
            mine = [MicroBatch(batch_of(each)) for each in _listed(batches)]
            engine = self._ready(mine)
            self._check_trains()
            mine = self._evened(mine)
            return engine.summed(engine.forward_backward(mine))

    def optimizer_step(self, lr_factor: float = 1.0) -> StepResult:
        """Unscales, clips, updates at lr_factor times the optimizer's own rate, and clears the gradients. Returns
        grad_norm (a tensor: the global norm before clipping), skipped (fp16's overflow) and scale."""
        with as_a_caller_reads_them(has_objects=True):
            if self._engine is None:
                raise RunError("there is no gradient yet: call forward_backward first")
            result = self._engine.optimizer_step(lr_factor)
            self.steps += 1
            return result

    def evaluate(self, batches: Iterable[Any], metrics: Any = None) -> dict[str, float]:
        """Returns mean loss and metrics over the batches of all processes, each sample once; the same on each process.

        metrics: as in a file of your own; left out, those of `drivetrain.engine`, or defaults that suit the loss and
        the outputs.
        """
        with as_a_caller_reads_them(has_objects=True):
            mine = [MicroBatch(batch_of(each)) for each in batches]
            engine = self._ready(mine)
            mine = self._evened(mine)
            return engine.evaluate(mine, self._workload.metrics() if metrics is None else metrics_of(metrics))

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Writes a checkpoint into the folder, whole or not at all, and returns its path (step-00000100): weights,
        optimizer, loss scale, random generators. Any other engine and number of processes loads it."""
        with as_a_caller_reads_them(has_objects=True):
            if self._engine is None:
                raise RunError("there is nothing to save before the first batch")
            self._check_trains()
            state, ranks = self._engine.state_dict(), self._ranks
            generators = ranks.gather((self._engine.random_stream, rng_state()))
            training: dict[str, Any] = {}
            if generators is not None:
                streams, states = [number for number, _ in generators], [own for _, own in generators]
                training = {"engine": state["engine"], "streams": streams, "generators": states}
            parts = {"model": state["model"], "optimizer": state["optimizer"], "training": training}
            facts = {"run": self.run.name, "precision": self.run.precision, "engine": self.run.engine.label}
            return save(Path(folder), self.steps, parts, facts, self._engine.save_assets, ranks)

    def load(self, folder: str | Path) -> int:
        """Goes on from the newest good checkpoint in the folder, or from the folder if it is a checkpoint; returns its
        step.

        On as many processes random numbers go on exactly; on others dropout draws other masks.
        """
        with as_a_caller_reads_them(has_objects=True):
            given = Path(folder)
            path = given if (given / "manifest.json").is_file() else newest_good(given, verify)[0]
            if path is None:
                raise problem("folder", f"{folder} holds no good checkpoint", "save one first")
            self._to_load, self.steps = path, read_manifest(path).step
            if self._engine is not None:
                self._restore(self._engine)
            return self.steps

    def _restore(self, engine: Engine) -> None:
        """Loads the checkpoint that `load` named. Before the first batch this waits until the model is wrapped."""
        path, self._to_load = self._to_load, None
        if path is None:
            return
        state = read(path)
        training = state["training"]
        check_fits(engine.shapes(), state["model"], path)
        if self._trains:
            engine.load_state_dict({**state, "engine": training["engine"]})
        else:
            engine.load_weights(state["model"])
        if self._ranks.all_gather(engine.random_stream) == training["streams"]:
            restore_rng_state(training["generators"][self._ranks.rank])

    def weights(self) -> dict[str, Tensor]:
        """Returns whole weights by the model's own names, for model.load_state_dict: on the first process, empty on
        others. All processes call it."""
        if self._engine is None:
            raise RunError("the model is wrapped at the first batch: there are no weights but its own yet")
        return {name: tensor.detach().cpu().clone() for name, tensor in self._engine.weights().items()}

    def close(self) -> None:
        """Frees the engine, and leaves the group of processes if the engine joined it."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._within.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _evened(self, mine: list[MicroBatch]) -> list[MicroBatch]:
        """Returns as many micro-batches as the process with the most has; those added do not count."""
        most = max(self._ranks.all_gather(len(mine)))
        if not most:
            raise _no_batch()
        spare = mine[-1].tensors if mine else self._workload.collate([0])
        return mine + [MicroBatch(spare, counts=False)] * (most - len(mine))

    def _ready(self, mine: Sequence[MicroBatch]) -> Engine:
        """Returns the engine, which is set up at the first batch; a process without a batch takes the first process's.
        Raises RunError once it is closed: a new engine would start from the model's first weights."""
        if self._closed:
            raise RunError("this engine is closed: call it within its `with` block, or make another and load a save")
        if self._engine is None:
            example = mine[0].tensors if mine else None
            found = [each for each in self._ranks.all_gather(example) if each is not None]
            if not found:
                raise _no_batch()
            with held.holding(self._objects):
                self._workload = ExampleWorkload(self._objects, found[0], self.run.global_batch, self.run.seed)
                engine = assemble_around(self._workload, self.run, self._machine, self._ranks, self._trains)
            self._engine = engine
            self._restore(engine)
        return self._engine

    def _check_trains(self) -> None:
        if not self._trains:
            fix = "give optimizer=lambda parameters: AdamW(parameters, lr=3e-4)"
            raise problem("optimizer", "this engine was made without one, and only evaluates", fix)


def _no_batch() -> UserError:
    return problem("batches", "no process gave a batch", "give at least one")


def _listed(batches: Batches) -> Sequence[Any]:
    """Returns a list for a single batch."""
    is_pair = isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(p, torch.Tensor) for p in batches)
    return [batches] if is_pair or isinstance(batches, Mapping) else list(batches)
