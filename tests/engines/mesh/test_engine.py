"""The mesh as a user meets it: reports, plans that do not fit, what a memory limit lets through."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.config.training import Loader
from drivetrain.data.loader import evaluation_batches
from drivetrain.errors import UserError
from drivetrain.workloads.base import Layout
from drivetrain.workloads.metrics import Accuracy
from tests.launch.test_start import finished_here
from tests.launch.test_start import report as report_of
from tests.parity.mesh_cases import Declared, MeshCase, columns, engine_of, workload
from tests.parity.mesh_promises import steps
from tests.ranks import RankPool
from tests.tiny_workload import Rows

RUN = """
workload:
  type: language_model
  model:
    config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 2,
             num_key_value_heads: 2, max_position_embeddings: 8192, HEAD}
  data: {train: text.txt, length: 64}
batch_size: 16
loop: {steps: 6, max_grad_norm: 1.0}
optimizer: {lr: 1.0e-3}
evaluation: {every_steps: 6}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 107, (20000,), generator=generator).tolist()
    (tmp_path / "text.txt").write_bytes(bytes(letters))
    (tmp_path / "run.yaml").write_text(RUN.replace(", HEAD", ""))
    return tmp_path


def train(folder: Path, name: str, *settings: str, data_limit: int | None = None) -> Any:
    """The report, or what the command said if it failed. data_limit: bytes a process may allocate."""

    def limit() -> None:
        if data_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))

    command = [sys.executable, "-m", "drivetrain", "train", "run.yaml", f"output={name}", *settings]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, preexec_fn=limit
    )
    report = folder / name / "report.json"
    return json.loads(report.read_text()) if done.returncode == 0 else " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_a_pipeline_reports_its_bubble_and_what_it_sends(folder: Path) -> None:
    report = train(folder, "pp", "engine={name: mesh, pp: 2}", "micro_batch_size=4")
    assert report["engine"] == "mesh-pp2"
    first, last = report["ranks"]
    assert [first["stage"], last["stage"]] == [0, 1]
    assert first["bubble"] == last["bubble"] == pytest.approx(1 / 5)  # (p-1)/(m+p-1) of 2 stages, 4 micro-batches
    assert all(0 < rank["waiting_share"] < 1 for rank in report["ranks"])
    hidden = 16 * 64 * 32 * 4  # bytes of what 16 windows of 64 positions, 32 wide, hand on
    assert first["sent_bytes_per_step"]["send"] == last["sent_bytes_per_step"]["send"] == hidden
    whole = train(folder, "single")
    assert report["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)
    assert report["flops_per_sample"] == pytest.approx(whole["flops_per_sample"], rel=1e-6)


@pytest.mark.long
def test_tied_embeddings_over_stages_are_trained_as_on_one_process_and_saved_once(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace("HEAD", "tie_word_embeddings: true"))
    stages = train(folder, "stages", "engine={name: mesh, pp: 2}")
    finished_here(folder, "train", "run.yaml", "output=single")
    assert stages["metrics"]["loss"] == pytest.approx(report_of(folder / "single")["metrics"]["loss"], rel=1e-5)
    sizes = {name: file_sizes(folder / name / "checkpoints" / "last") for name in ("stages", "single")}
    assert sizes["stages"] == pytest.approx(sizes["single"], rel=0.01), "the tied weight, 256 x 32, would be a third"


def file_sizes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_mesh_of_one_rank_says_so() -> None:
    engine = engine_of(MeshCase({}), workload(MeshCase({"name": "single"})))
    assert engine.engaged().wrapper == "LlamaForCausalLM on one rank"


# --- plans -----------------------------------------------------------------------------------------------------------


class Wrong(Declared):
    """Splits the second layer of each pair as if it were a first one."""

    @property
    def layout(self) -> Layout:
        return Layout(tensor_parallel={"layers.*.wide": "colwise", "layers.*.back": "colwise_gather_output"})


class Mixing(Declared):
    """Mixes features between the layers of a pair, where each rank has a part of them."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for pair in model.layers:  # type: ignore[union-attr]
            pair.act = nn.Softmax(-1)
        return model


class Misspelt(Declared):
    @property
    def layout(self) -> Layout:
        return Layout(tensor_parallel={"layers.*.wide": "colwise", "layers.*.bak": "rowwise"})


def words(kind: type[Declared]) -> str:
    try:
        engine_of(MeshCase({"tp": 2}, model="columns"), kind(columns, Rows(62), Rows(10)))
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "engaged"


def test_a_plan_that_changes_what_the_model_computes_is_refused(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(words, Declared) == ["engaged"] * 2
    for reported in ranks(2).run(words, Mixing):
        assert reported.startswith("UserError: engine.tp: the loss of the model spread over tp=2 is")
        assert "correct tensor_parallel in the workload's file" in reported
    for reported in ranks(2).run(words, Wrong):
        assert reported.startswith(
            "UserError: workload.path (tensor_parallel): layers.*.wide (colwise) gives each rank"
        )
    for reported in ranks(2).run(words, Misspelt):
        assert reported.startswith("UserError: workload.path (tensor_parallel): layers.*.bak is the name of no layer")


# --- evaluation ------------------------------------------------------------------------------------------------------


class OwnRank(Accuracy):
    """Differs from rank to rank, as the last bit of a metric may."""

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        """Looks at neither."""

    def compute(self) -> torch.Tensor:
        return torch.tensor(float(dist.get_rank()))


def own_metric(degrees: dict[str, Any]) -> float:
    case = MeshCase(degrees)
    work = workload(case)
    engine = engine_of(case, work)
    assert work.evaluation is not None
    batches = evaluation_batches(work.evaluation, work.collate, 2, Loader(), engine.data_rank, engine.data_world)
    return engine.evaluate(batches, {"own": OwnRank()})["own"]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=str)
def test_all_ranks_hear_the_same_metrics_to_the_last_bit(
    ranks: Callable[[int], RankPool], degrees: dict[str, Any]
) -> None:
    first, second = ranks(2).run(own_metric, degrees)
    assert first == second


# --- memory ----------------------------------------------------------------------------------------------------------


def kept_bytes(case: MeshCase) -> tuple[int, int]:
    """Of parameters and AdamW's two moments between steps, and the parameters that this rank holds."""
    work = workload(case)
    engine = engine_of(case, work)
    steps(engine, work, range(2))
    kept = [t for t in engine.tensors() if t.is_floating_point() and t.ndim]
    return sum(t.numel() * t.element_size() for t in kept), engine.engaged().local_parameters


@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"tp": 2}, {"dp": 2}, {"dp": 2, "shard": True}, {"cp": 2, "shard": True}], ids=str
)
def test_a_rank_keeps_twelve_bytes_for_each_parameter_that_it_holds(
    ranks: Callable[[int], RankPool], degrees: dict[str, Any]
) -> None:
    whole, total = kept_bytes(MeshCase({"name": "single"}, optimizer="adamw"))
    assert whole == pytest.approx(12 * total, rel=0.01)
    found: Sequence[tuple[int, int]] = ranks(2).run(kept_bytes, MeshCase(degrees, optimizer="adamw"))
    for kept, held in found:
        assert kept == pytest.approx(12 * held, rel=0.01)  # buffers
    halved = degrees != {"dp": 2}
    assert max(held for _, held in found) < (0.6 if halved else 1.01) * total


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits are set as on Linux")
def test_eight_times_the_sequence_fits_a_limit_only_with_context_ranks_and_recompute(folder: Path) -> None:
    sizes = "hidden_size: 128, intermediate_size: 344, num_hidden_layers: 12"
    text = RUN.replace(", HEAD", "").replace("hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4", sizes)
    (folder / "run.yaml").write_text(text.replace("batch_size: 16", "batch_size: 1").replace("steps: 6", "steps: 2"))
    limit, long = 1100 * 2**20, "workload.data.length=8192"
    context = "engine={name: mesh, cp: 2}"
    assert train(folder, "short", "workload.data.length=1024", data_limit=limit)["status"] == "completed"
    for name, settings in {"alone": [], "recompute": ["recompute=true"], "context": [context]}.items():
        assert "shorter samples" in train(folder, name, long, *settings, data_limit=limit), name
    both = train(folder, "both", long, context, "recompute=true", data_limit=limit)
    assert both["status"] == "completed"
    whole = train(folder, "whole", long)
    assert both["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)
    assert both["peak_memory"]["tensor"] < whole["peak_memory"]["tensor"] / 6
