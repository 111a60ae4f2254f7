"""Tests that the planned peak is the measured one, and that what the engine holds decides it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config import engines as config
from drivetrain.config.load import load
from drivetrain.config.rules import judged
from drivetrain.engines import traced_ddp
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.plan import trace
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.deep_trace import Tracer
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.lines import totals
from drivetrain.plan.machines import cluster, this_machine
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import Untraceable, step_costs
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import read_workload
from tests.plan.measured import measured_peak, measured_peaks, read_run, write_run
from tests.ranks import RankPool

WORLD = 2
TABLE_BYTES = 1024  # of the values that codes of scales point into, one for the process
SCALER_BYTES = 8  # its scale and its counter, which are not among what is measured
# one process: precisions, recompute, accumulation
ALONE = [
    [],
    ["precision=bf16-mixed"],
    ["precision=bf16"],
    ["precision=bf16-master", "micro_batch_size=2"],
    ["precision=fp16-mixed", "optimizer.name=sgd", "optimizer.momentum=0.9"],
    ["recompute=true"],
    ["micro_batch_size=2", "workload.model.fused_loss=true"],
]
SPREAD = [
    ["engine=ddp"],
    ["engine={name: ddp, bucket_mb: 0.01, gradient_compression: fp16}"],
    ["engine=ddp", "micro_batch_size=2"],
    ["engine=fsdp"],
    ["engine={name: fsdp, reshard: false}", "micro_batch_size=2", "precision=bf16-mixed"],
    ["engine=fsdp", "precision=bf16-master", "recompute=true"],
    *([f"engine=zero{stage}"] for stage in range(4)),
    ["engine=zero2", "micro_batch_size=2", "precision=bf16-mixed"],
    ["engine=zero3", "precision=bf16-mixed", "recompute=true"],
    # so few tokens that the peak is where gradients are reduced, for which gloo copies them
    ["engine=zero3", "batch_size=2", "workload.data.length=4"],
    ["engine=fsdp", "batch_size=2", "workload.data.length=4"],
    ["engine=accelerate-ddp"],
    ["engine=accelerate-zero2"],
    ["engine={name: mesh, dp: 2}"],
    ["engine={name: mesh, dp: 2, shard: true}"],
    ["engine={name: mesh, tp: 2}"],
    ["engine={name: mesh, tp: 2, sequence_parallel: true}", "workload.data.length=31"],
    ["engine={name: mesh, cp: 2}"],
    ["engine={name: mesh, cp: 2, shard: true}", "micro_batch_size=2", "precision=bf16-mixed"],
    ["engine={name: mesh, cp: 2}", "recompute=true", "workload.data.length=31"],
    ["engine={name: mesh, pp: 2}", "micro_batch_size=2"],
    ["engine={name: mesh, pp: 2}", "micro_batch_size=2", "workload.model.config.tie_word_embeddings=true"],
]
# DeepSpeed's last gradient norm and, at stage 3, whether it is finite: kept, and not among what is measured
NORM_BYTES = (0, 4, 8)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players.\n" * 40)
    return write_run(folder, train=str(folder / "text.txt"), length=32)


def planned(run_file: str, overrides: list[str], rank: int = 0) -> StepCosts:
    run = read_run(run_file, overrides)
    return step_costs(run, detect(), read_workload(run, training=True), rank)


def saved(run_file: str, folder: Path) -> list[str]:
    """Writes the run's model as a folder; returns the overrides that take it from there."""
    workload: Any = read_workload(read_run(run_file, []), training=True)
    workload.build_model().save_pretrained(folder)
    workload.tokenizer.save_pretrained(folder)
    return ["workload.model.config=null", f"workload.model.path={folder}"]


def test_a_model_of_a_folder_is_planned_as_one_of_its_config(run_file: str, tmp_path: Path) -> None:
    words = saved(run_file, tmp_path)
    of_folder, of_config = (planned(run_file, each).memory.allocated for each in (words, []))
    assert of_folder == of_config


MANY = [
    ["micro_batch_size=1"],
    ["micro_batch_size=1", "precision=fp16-mixed", "recompute=true"],
    ["engine=ddp", "micro_batch_size=1", "batch_size=16"],
    ["engine=fsdp", "micro_batch_size=1", "batch_size=16", "precision=bf16-mixed"],
    ["engine=zero2", "micro_batch_size=1", "batch_size=16"],
    ["engine=zero3", "micro_batch_size=1", "batch_size=16"],
    ["engine={name: mesh, tp: 2}", "micro_batch_size=1"],
]


@pytest.mark.long
@pytest.mark.parametrize("overrides", MANY, ids=" ".join)
def test_three_of_many_micro_batches_show_the_costs_of_all(
    overrides: list[str], run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*overrides, "processes=2"] if overrides[0].startswith("engine") else overrides
    taken: list[int] = []
    step = trace._step
    monkeypatch.setattr(
        trace, "_step", lambda engine, batches, *_: taken.append(len(batches)) or step(engine, batches, *_)
    )
    few = planned(run_file, words)
    assert taken == [2, 2, 3]
    monkeypatch.setattr(trace, "FEW", 100)
    every = planned(run_file, words)
    assert taken[3:] == [2, 8]
    assert few.memory.allocated == every.memory.allocated
    assert few.memory.window == every.memory.window
    assert few.tokens == every.tokens
    for name in ("operations", "messages"):
        found, expected = totals(getattr(few, name)), totals(getattr(every, name))
        assert found.keys() == expected.keys()
        assert all(found[key] == pytest.approx(expected[key], rel=0.001) for key in expected)


@pytest.mark.parametrize("quantised", ["{format: nf4}", "{format: nf4, double: false}", "{format: int8}"])
def test_adapters_of_a_base_in_few_bits_are_planned_as_measured(quantised: str, run_file: str, tmp_path: Path) -> None:
    words = [*saved(run_file, tmp_path), f"quantised_base={quantised}", "adapter={method: lora, rank: 4}"]
    words += ["precision=bf16-mixed"]
    more = {0, TABLE_BYTES} if quantised == "{format: nf4}" else {0}  # whether an earlier run has made the table
    assert planned(run_file, words).memory.allocated - measured_peak(read_run(run_file, words))[0] in more


def all_reduces(costs: StepCosts) -> int:
    return sum(each.calls for each in costs.messages if each.collective == "all_reduce")


@pytest.mark.parametrize("overrides", ALONE, ids=" ".join)
def test_the_planned_peak_of_one_process_is_the_measured_one(run_file: str, overrides: list[str]) -> None:
    more = SCALER_BYTES if "precision=fp16-mixed" in overrides else 0
    assert planned(run_file, overrides).memory.allocated == measured_peak(read_run(run_file, overrides))[0] + more


@pytest.mark.long
def test_the_planned_peak_of_every_rank_is_the_measured_one(run_file: str) -> None:
    cases = [[*case, f"processes={WORLD}"] for case in SPREAD]
    pool = RankPool(WORLD)  # its own: in ranks that ran hundreds of other tests FSDP held one block for longer
    try:
        measured = pool.run(measured_peaks, run_file, cases)
    finally:
        pool.close()
    for number, case in enumerate(cases):
        for rank in range(WORLD):
            if "pp" in case[0] and rank == 0:
                continue  # buffers that this stage receives into are older than the steps that are measured
            costs, (peak, buckets) = planned(run_file, case, rank), measured[rank][number]
            assert costs.memory.allocated - peak in (NORM_BYTES if "zero" in case[0] else (0,)), case
            assert "ddp" not in case[0] or all_reduces(costs) == buckets + 1, case  # one more of the targets' count


def test_parts_add_up_to_the_peak_and_are_what_the_engine_holds(run_file: str) -> None:
    memory = planned(run_file, ["engine=ddp", "processes=2"]).memory
    assert sum(memory.parts.values()) == memory.allocated
    run = read_run(run_file, [])
    parameters = sum(p.numel() for p in read_workload(run, training=True).build_model().parameters())
    held = [memory.parts[part] for part in ("parameters", "gradients", "optimizer")]
    counters = 4 * len(list(read_workload(run, training=True).build_model().parameters()))  # AdamW's steps
    assert held == [4 * parameters, 4 * parameters, 8 * parameters + counters]
    phases = list(dict.fromkeys(memory.timeline.phases))
    assert [phase for phase in phases if phase != "between"] == ["forward", "backward", "optimizer"]
    assert memory.timeline.allocated.max() == memory.allocated
    assert memory.timeline.parts_at(memory.timeline.peak) == memory.parts


def test_flops_and_collectives_are_counted(run_file: str) -> None:
    run = read_run(run_file, ["engine=ddp", "processes=2"])
    costs = Tracer().fullest_step_costs(run, detect(), read_workload(run, training=True))
    sizes = {name: p.numel() for name, p in read_workload(run, training=True).build_model().named_parameters()}
    products = sum(size for name, size in sizes.items() if "norm" not in name and "embed" not in name)
    assert costs.tokens is not None
    mine = costs.tokens / WORLD
    found = sum(each.flops for each in costs.operations if each.kind == "matmul")
    assert found == 6 * products * mine  # Kaplan et al. 2020, table 1: without attention
    reduced = sum(each.bytes for each in costs.messages if each.collective == "all_reduce")
    assert reduced == pytest.approx(4 * sum(sizes.values()), abs=64)  # and counts of targets


def test_context_ranks_exchange_heads_for_parts_and_work_on_a_part_of_each_sequence(run_file: str) -> None:
    """In each of 2 blocks query, key, value and result change hands, and so do their gradients: 16 messages, each of
    all this rank has of 32 numbers for each of its tokens."""
    words = ["engine={name: mesh, cp: 2}", "processes=4", "workload.data.length=31"]
    costs, alone = planned(run_file, words), planned(run_file, ["workload.data.length=32"])
    assert costs.tokens == 8 * 31
    mine = 4 * 16  # of 8 samples over two data ranks, 31 tokens filled up to 32 over two context ranks
    [exchanged] = [each for each in costs.messages if each.collective == "all_to_all"]
    assert (exchanged.axis, exchanged.ranks, exchanged.stride, exchanged.calls) == ("cp", 2, 1, 16)
    assert exchanged.bytes == 16 * mine * 32 * 4
    products, whole = (sum(o.flops for o in each.operations if o.kind == "matmul") for each in (costs, alone))
    assert products == whole / 4


@pytest.mark.parametrize(("degrees", "world"), [("cp: 2", 2), ("cp: 2, tp: 2", 8)])
def test_to_parameters_context_ranks_are_data_ranks(run_file: str, degrees: str, world: int) -> None:
    costs = planned(run_file, [f"engine={{name: mesh, {degrees}}}", f"processes={world}"])
    by_axis = {each.axis: each.bytes for each in costs.messages if each.collective == "all_reduce" and each.bytes > 64}
    beside = costs.trained_parameters if "tp" not in degrees else costs.trained_parameters / 2
    assert {*by_axis} == {"dp", "tp"} if "tp" in degrees else {"dp"}
    assert by_axis["dp"] == pytest.approx(4 * beside, rel=0.01), "the gradients, of which norms are whole on every rank"


# --- break it and see ------------------------------------------------------------------------------------------------


def test_an_engine_that_keeps_gradients_is_seen(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, kept = planned(run_file, []).memory.allocated, list[Any]()
    step = AutogradEngine.optimizer_step

    def keeping(self: Any, *args: Any) -> Any:
        kept.extend(p.grad for p in self._model.parameters())
        return step(self, *args)

    monkeypatch.setattr(AutogradEngine, "optimizer_step", keeping)
    assert planned(run_file, []).memory.allocated > before * 1.03


def test_a_doubled_activation_is_seen(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = planned(run_file, []).memory.allocated
    product = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: product(self, x.clone()))
    assert planned(run_file, []).memory.allocated > before * 1.03


def test_a_wrong_bucket_size_is_seen(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["engine={name: ddp, bucket_mb: 0.01, gradient_compression: fp16}", "processes=2"]
    before = all_reduces(planned(run_file, overrides))
    cut = traced_ddp._cut

    def larger(trained: Any, options: config.DdpEngine) -> Any:
        return cut(trained, options.model_copy(update={"bucket_mb": 25.0}))

    monkeypatch.setattr(traced_ddp, "_cut", larger)
    assert all_reduces(planned(run_file, overrides)) < before


ASKING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 1)
    def forward(self, x):
        return self.second(torch.relu(self.first(x if x.sum() > -1e9 else -x)))
model, loss = Asking(), nn.MSELoss()
train_data = TensorDataset(torch.randn(256, 64), torch.randn(256, 1))
"""


def asking(folder: Path) -> str:
    (folder / "model.py").write_text(ASKING)
    run = {"workload": {"type": "module", "path": str(folder / "model.py")}, "batch_size": 128, "loop": {"steps": 1}}
    (folder / "run.yaml").write_text(json.dumps(run))
    return str(folder / "run.yaml")


BROKEN = """
import torch
def refuse(x):
    raise RuntimeError("broken without numbers")
library = torch.library.Library("planned", "FRAGMENT")
library.define("broken(Tensor x) -> Tensor")
library.impl("broken", lambda x: x.clone(), "CPU")
library.impl("broken", refuse, "Meta")
"""

GPT2 = "{model_type: gpt2, n_embd: 32, n_layer: 4, n_head: 2, n_positions: 64}"  # drops numbers out by default


def test_recompute_of_a_model_with_dropout_is_planned_for_gpus(run_file: str) -> None:
    estimator, parts = Traced(cluster("2xA100-80GB")), []
    for recompute in ("true", "false"):
        given = ["engine=zero2", "processes=2", "precision=fp16-master", f"recompute={recompute}"]
        run, problems = load(Path(run_file), [f"workload.model.config={GPT2}", *given])
        assert run is not None, problems
        run, problems = judged(run, problems, estimator.host)
        assert not problems
        parts.append(estimator.costs(run).memory.parts["activations"])
    assert parts[0] < 0.7 * parts[1]


EXPERTS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MIXTURES = {
    "mixtral": {**EXPERTS, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "num_key_value_heads": 2, "num_experts": 4},
}
CHOSEN = 2  # experts for each token


def mixture(kind: str) -> list[str]:
    config = {"model_type": kind, "num_experts_per_tok": CHOSEN, "vocab_size": 256, **MIXTURES[kind]}
    return [f"workload.model.config={json.dumps(config)}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_planned_for_gpus(kind: str, precision: str, run_file: str) -> None:
    estimator = Traced(cluster("2xA100-80GB"))
    run, problems = load(Path(run_file), [*mixture(kind), f"precision={precision}", "engine=ddp", "processes=2"])
    assert run is not None, problems
    run, problems = judged(run, problems, estimator.host)
    assert not problems
    costs = estimator.costs(run)
    products = sum(each.flops for each in costs.operations if each.kind == "matmul")
    of_experts = 6 * (4 * 32) * CHOSEN * 2 * (3 * 32 * 64)  # two layers of three matrices, for a rank's four samples
    assert of_experts < products < 2 * of_experts
    assert costs.memory.parts["activations"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_the_planned_peak_of_a_mixture_of_experts_is_the_measured_one(precision: str, run_file: str) -> None:
    overrides = [*mixture("mixtral"), f"precision={precision}"]
    assert planned(run_file, overrides).memory.allocated == measured_peak(read_run(run_file, overrides))[0]


def test_what_fails_without_numbers_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the reason of Untraceable, and not as PyTorch's tracebacks besides."""
    place = asking(tmp_path)
    (tmp_path / "model.py").write_text(
        BROKEN + ASKING.replace("x if x.sum() > -1e9 else -x", "torch.ops.planned.broken(x)")
    )
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(Untraceable, match=r"broken without numbers \(model\.py, line 4\)"),
    ):
        planned(place, [])
    assert caplog.records == []
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_a_model_that_asks_for_numbers_is_named(tmp_path: Path) -> None:
    with pytest.raises(Untraceable, match=r"needs the numbers of a tensor \(model.py, line 10\)"):
        planned(asking(tmp_path), [])


@pytest.mark.parametrize("overrides", [[], ["micro_batch_size=32"]], ids=str)
def test_it_is_measured_on_small_batches_instead(tmp_path: Path, overrides: list[str]) -> None:
    run = read_run(asking(tmp_path), overrides)
    costs = Traced(this_machine(catalogue())).costs(run)
    assert costs.origin == "measured"
    assert costs.memory.allocated == pytest.approx(measured_peak(run)[0], rel=0.02)
    products = sum(each.flops for each in costs.operations if each.kind == "matmul")
    assert products == pytest.approx(128 * (6 * 256 * 65 - 2 * 64 * 256))  # no gradient of the data


def test_one_that_is_spread_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(NotPlanned, match="needs the numbers of a tensor"):
        Traced(this_machine(catalogue())).costs(read_run(asking(tmp_path), ["engine=ddp", "processes=2"]))


def test_nothing_of_a_trace_stays(run_file: str) -> None:
    planned(run_file, ["engine=fsdp", "processes=2"])
    assert not torch.distributed.is_initialized()
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16
    workload = read_workload(read_run(run_file, []), training=True)
    assert not any(type(p) is not nn.Parameter for p in workload.build_model().parameters())
