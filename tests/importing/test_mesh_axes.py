"""Tensor, context and sequence parallel of other software on the mesh: which ranks share a sample, and the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.errors import UserError
from tests.importing.made import SMALL, imported, notes_of, of_text, run_of

CPU = Machine("cpu", "a CPU", 1, 2**33, 8, None, frozenset({"float32"}))
ACCELERATE = """
distributed_type: {kind}
mixed_precision: bf16
num_processes: {world}
num_machines: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_offload_params: {offload}
parallelism_config:
{sizes}
"""


def accelerate(kind: str = "FSDP", world: int = 16, offload: str = "false", prefix: str = "", **sizes: int) -> str:
    lines = "\n".join(f"  {prefix}{name}_size: {size}" for name, size in sizes.items())
    return ACCELERATE.format(kind=kind, world=world, offload=offload, sizes=lines)


@pytest.mark.parametrize("prefix", ["", "parallelism_config_"])
@pytest.mark.parametrize(
    ("sizes", "engine"),
    [
        ({"dp_shard": 4, "tp": 4}, {"dp": 4, "tp": 4, "shard": True}),
        ({"dp_replicate": 1, "dp_shard": 8, "tp": 1, "cp": 2}, {"dp": 8, "cp": 2, "shard": True}),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}, {"dp": 4, "tp": 2, "cp": 2, "shard": True}),
        ({"tp": 16}, {"dp": 1, "tp": 16, "shard": False}),
        ({"cp": 16}, {"dp": 1, "cp": 16, "shard": True}),  # shards lie over the ranks of cp as well
    ],
)
def test_accelerates_axes_are_the_meshs(
    sizes: dict[str, int], engine: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    raw = run_of(tmp_path, accelerate(prefix=prefix, **sizes))
    assert raw["engine"] == {"name": "mesh", **engine}
    assert (raw["processes"], raw["nodes"]) == (8, 2)
    assert raw["precision"] == "bf16-mixed"  # a mesh keeps no second copy of the weights


def test_without_axes_accelerates_fsdp_stays_as_it_is(tmp_path: Path) -> None:
    raw = run_of(tmp_path, accelerate(dp_replicate=2, dp_shard=8, tp=1, cp=1))
    assert raw["engine"]["name"] == "fsdp"
    assert raw["engine"]["hybrid"] == 8
    assert raw["precision"] == "bf16-master"


def test_what_a_mesh_has_no_word_for_is_reported(tmp_path: Path) -> None:
    notes = notes_of(tmp_path, accelerate(offload="true", dp_replicate=2, dp_shard=4, tp=2))
    assert notes["fsdp_config.fsdp_offload_params"].fate == "refused"
    assert notes["fsdp_config.fsdp_reshard_after_forward"].fate == "unneeded"
    assert "spread over all" in notes["parallelism_config.dp_shard_size"].why
    assert notes["distributed_type"].fate == notes["mixed_precision"].fate == "changed"


def test_sequence_parallel_of_deepspeed_under_accelerate_is_context_parallel(tmp_path: Path) -> None:
    text = accelerate(kind="DEEPSPEED", sp=4) + "deepspeed_config: {zero_stage: 3}\n"
    assert run_of(tmp_path, text)["engine"] == {"name": "mesh", "cp": 4, "shard": True}


def test_cp_and_sp_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both set which ranks share a sequence"):
        run_of(tmp_path, accelerate(cp=2, sp=2))


def of_deepspeed(**keys: Any) -> str:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    return json.dumps({**sizes, "bf16": {"enabled": True}, **keys})


@pytest.mark.parametrize(("stage", "shard"), [(0, False), (1, True), (2, True)])
def test_deepspeeds_autotp_is_tensor_parallel_over_groups_that_share_a_batch(
    stage: int, shard: bool, tmp_path: Path
) -> None:
    text = of_deepspeed(tensor_parallel={"autotp_size": 4}, zero_optimization={"stage": stage, "overlap_comm": True})
    onto = of_text(tmp_path, SMALL + "processes: 8\n")
    found, raw = imported(tmp_path, of_text(tmp_path, text, ".json"), onto=onto)
    assert raw["engine"] == {"name": "mesh", "tp": 4, "shard": shard}
    assert found.run is not None
    assert found.run.global_batch == 2 * 4 * (8 // 4)


def test_the_json_named_by_arguments_puts_them_on_the_mesh(tmp_path: Path) -> None:
    (tmp_path / "tp.json").write_text('{"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}')
    arguments = '{"output_dir": "o", "bf16": true, "per_device_train_batch_size": 4, "deepspeed": "tp.json"}'
    raw = run_of(tmp_path, arguments, ending=".json")
    assert raw["engine"] == {"name": "mesh", "tp": 2, "shard": True}
    assert raw["precision"] == "bf16-mixed"


def test_a_mesh_that_keeps_whole_weights_tells_so_where_the_json_has_copies(tmp_path: Path) -> None:
    note = notes_of(tmp_path, of_deepspeed(tensor_parallel={"autotp_size": 4}), ".json")["bf16.enabled"]
    assert (note.fate, note.to, note.value) == ("changed", "precision", "bf16-mixed")
    assert "in place of copies in 16 bits" in note.why


XTUNER = """
sequence_parallel_size = {ranks}
batch_size = 1
accumulative_counts = 8
accumulative_counts *= sequence_parallel_size
train_dataloader = dict(batch_size=batch_size)
optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16', accumulative_counts=accumulative_counts)
train_cfg = dict(max_iters=64)
"""


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_xtuners_sequence_parallel_leaves_the_global_batch_as_it_is(ranks: int, tmp_path: Path) -> None:
    onto = of_text(tmp_path, SMALL + "processes: 16\nengine: ddp\n")
    found, raw = imported(tmp_path, of_text(tmp_path, XTUNER.format(ranks=ranks), ".py"), onto=onto)
    assert raw["engine"] == ("ddp" if ranks == 1 else {"name": "mesh", "cp": ranks})
    assert found.run is not None
    assert found.run.global_batch == 1 * 8 * 16  # of micro-batch, accumulation before it is multiplied, world


def test_xtuner_with_a_deepspeed_json_shards_the_mesh(tmp_path: Path) -> None:
    files = of_text(tmp_path, XTUNER.format(ranks=4), ".py"), of_text(tmp_path, of_stage(3), ".json")
    assert imported(tmp_path, *files)[1]["engine"] == {"name": "mesh", "cp": 4, "shard": True}


def of_stage(stage: int) -> str:
    return json.dumps({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}})


def test_batches_of_two_files_agree_over_groups_of_ranks(tmp_path: Path) -> None:
    """The world of 16 is 4 groups of 4 ranks: 4 samples on each are 16."""
    whole = of_text(tmp_path, '{"train_batch_size": 16, "tensor_parallel": {"autotp_size": 4}}', ".json")
    each = of_text(tmp_path, '{"output_dir": "o", "per_device_train_batch_size": 4, "max_steps": 2}', ".json")
    launched = of_text(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 16\n")
    assert imported(tmp_path, whole, each, launched)[1]["batch_size"] == 16


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            {"name": "accelerate", "config": {"distributed_type": "NO", "parallelism_config": {"tp_size": 2}}},
            "tp",
        ),
        (
            {
                "name": "accelerate",
                "config": {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_cp_size": 2}},
            },
            "cp",
        ),
        ({"name": "deepspeed", "config": {"tensor_parallel": {"autotp_size": 2}}}, "tp"),
        ({"name": "deepspeed", "config": {"sequence_parallel_size": 2}}, "cp"),
    ],
)
def test_a_run_on_such_a_configuration_itself_is_refused_and_pointed_to_the_mesh(
    engine: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = of_text(tmp_path, SMALL + f"engine: {json.dumps(engine)}\nprocesses: 2\n")
    run, problems = load(path)
    assert run is not None, problems
    reported = [each for each in rules.check(run, CPU) if "mesh" in each.why]
    assert len(reported) == 1
    assert f"engine: {{name: mesh, {words}: 2}}" in reported[0].why
