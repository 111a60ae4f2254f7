"""The mesh's arithmetic, and what it says of degrees that do not fit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from drivetrain.config.engines import EngineConfig
from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.resolve import resolved
from drivetrain.config.rules import check
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem
from tests.test_waits import compared

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
GPUS = Machine("cuda", "a GPU", 8, 2**36, 16, (9, 0), frozenset({"float32", "bfloat16", "float16"}))
BERT = {"model_type": "bert", "num_attention_heads": 6, "num_hidden_layers": 3}


def run(engine: dict[str, Any], **fields: Any) -> RunConfig:
    model = {"config": fields.pop("config", BERT), "tokenizer": "vocab.txt"}
    workload = {"type": "text_classification", "model": model, "data": {"train": "owner/set"}}
    block = {"workload": workload, "batch_size": 32, "loop": {"steps": 3}, "engine": {"name": "mesh", **engine}}
    return RunConfig.model_validate({**block, **fields})


def problems(engine: dict[str, Any], machine: Machine = CPU, **fields: Any) -> list[Problem]:
    return check(resolved(run(engine, **fields), machine), machine)


def test_a_product_that_is_not_the_world_size_is_reported_with_its_arithmetic() -> None:
    [problem] = problems({"pp": 2, "dp": 2, "tp": 3}, processes=8)
    assert problem.why == "world size (8) != pp (2) * dp (2) * tp (3)"
    assert "12" in problem.fix


@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), list(itertools.product((1, 2, 3), repeat=4)))
def test_only_the_product_itself_is_a_world(pp: int, dp: int, cp: int, tp: int) -> None:
    engine = MeshEngine(pp=pp, dp=dp, cp=cp, tp=tp)
    right = [world for world in range(1, 90) if not list(engine.arithmetic(world, "engine"))]
    assert right == [pp * dp * cp * tp]


def test_adapters_that_a_mesh_cannot_spread_are_reported_with_the_degree() -> None:
    def fields(engine: dict[str, Any], adapter: Any, **others: Any) -> list[str]:
        found = problems(engine, adapter=adapter, **others)
        return [problem.field for problem in found if problem.field != "adapter"]

    assert fields({"tp": 2}, {"dora": True}) == ["adapter.dora"]
    assert fields({"pp": 2}, "prefix") == ["adapter.method"]
    assert fields({"tp": 2, "sequence_parallel": True}, {"dropout": 0.1}) == ["adapter.dropout"]
    for adapter in ("lora", {"rslora": True}, {"pissa": True}, {"dropout": 0.1}, "ia3"):
        assert not fields({"tp": 2}, adapter)
    assert not fields({"pp": 2}, {"dora": True}, compile=True)
    assert fields({"tp": 2}, "lora", compile=True) == ["compile"]


def test_dp_left_out_is_what_the_others_leave() -> None:
    left = resolved(run({"tp": 2}, processes=8), CPU)
    assert left.data_parallel_size == 4
    assert not check(left, CPU)
    [problem] = problems({"tp": 3}, processes=8)
    assert problem.why == "world size (8) is no multiple of tp (3)"


def test_processes_left_out_are_those_that_the_degrees_ask_for_or_all_gpus() -> None:
    assert resolved(run({"pp": 2, "tp": 2}), CPU).world_size == 4
    assert resolved(run({"pp": 2, "dp": 3}), CPU).world_size == 6
    assert resolved(run({"tp": 2}), GPUS).world_size == 8
    assert resolved(run({"tp": 2, "dp": 1}), GPUS).world_size == 2
    assert resolved(run({"pp": 2, "dp": 2}, nodes=2), CPU).processes == 2


def test_heads_and_layers_that_a_degree_does_not_fit_are_reported_together() -> None:
    found = {problem.field: problem.why for problem in problems({"pp": 4, "dp": 1, "tp": 4})}
    assert found["engine.tp"] == "num_attention_heads (6) is no multiple of tp (4)"
    assert found["engine.pp"] == "num_hidden_layers (3) < pp (4)"


def test_context_ranks_share_the_heads_that_tensor_ranks_have_left() -> None:
    [problem] = problems({"cp": 2, "tp": 2, "dp": 1}, config={"model_type": "llama", "num_attention_heads": 6})
    assert (problem.field, problem.why) == ("engine.cp", "num_attention_heads (6) is no multiple of cp (2) * tp (2)")
    assert not problems({"cp": 2, "tp": 2, "dp": 1}, config={"model_type": "llama", "num_attention_heads": 8})


def test_options_of_an_axis_that_is_not_there_are_refused() -> None:
    fields = [p.field for p in problems({"dp": 1, "loss_parallel": True, "schedule": "gpipe"})]
    assert fields == ["engine.loss_parallel", "engine.schedule"]


@pytest.mark.parametrize(("degrees", "shares"), [({}, False), ({"tp": 2}, False), ({"cp": 2}, True), ({"dp": 2}, True)])
def test_shards_need_data_or_context_ranks(degrees: dict[str, Any], shares: bool) -> None:
    found = [problem.field for problem in problems({**degrees, "shard": True})]
    assert found == ([] if shares else ["engine.shard"])
    assert not problems({"shard": True}, processes=2), "dp is what the others leave"


@pytest.mark.parametrize("name", ["torch.optim:Adafactor", "torch.optim:Muon"])
def test_an_optimizer_that_needs_whole_tensors_gets_them(name: str) -> None:
    optimizer = {"name": name, "lr": 0.01}
    for degrees in ({"tp": 2}, {"dp": 2, "shard": True}):
        [problem] = problems(degrees, optimizer=optimizer)
        assert problem.field == "optimizer.name"
        assert "needs whole tensors" in problem.why
    for degrees in ({"pp": 2}, {"dp": 2}):
        assert not problems(degrees, optimizer=optimizer)


def test_micro_batches_that_leave_a_stage_without_one_are_refused() -> None:
    [problem] = problems({"pp": 2}, batch_size=8, micro_batch_size=64)
    assert problem.field == "micro_batch_size"
    assert "into 1, fewer than pp (2) stages" in problem.why
    assert problem.fix == "give at most 4"
    assert not problems({"pp": 2}, batch_size=8, micro_batch_size=4)
    assert not problems({"pp": 2}, batch_size=9, micro_batch_size=5)
    assert not problems({"tp": 2}, batch_size=8, micro_batch_size=64)


def test_stages_share_the_samples_that_the_model_makes(tmp_path: Path) -> None:
    workload = compared(tmp_path, "grpo", reinforcement={"rewards": ["exact_match"], "answers": 8})
    assert not problems({"pp": 2}, workload=workload, batch_size=8, micro_batch_size=32)
    [problem] = problems({"pp": 2}, workload=workload, batch_size=8, micro_batch_size=64)
    assert "cuts the 64 samples of a data rank into 1" in problem.why
    assert not problems({"pp": 2}, batch_size=1, micro_batch_size=1), "a batch may be that small"


def test_the_batch_is_dealt_to_the_data_ranks_alone() -> None:
    mesh = resolved(run({"pp": 2, "dp": 2, "tp": 2}), CPU)
    assert (mesh.world_size, mesh.devices, mesh.data_parallel_size) == (8, 8, 2)
    per_rank = run({"pp": 2, "dp": 2}, batch_size=None, batch_size_per_device=4)
    assert resolved(per_rank, CPU).global_batch == 8


def test_a_pipeline_cuts_the_batch_where_the_user_has_not() -> None:
    assert resolved(run({"pp": 2, "dp": 1}), CPU).micro_batch == 4, "32 samples in 4 micro-batches a stage"
    assert resolved(run({"pp": 2, "dp": 1}, micro_batch_size=16), CPU).micro_batch == 16
    assert resolved(run({"tp": 2, "dp": 1}), CPU).micro_batch == 32


def test_a_mesh_is_named_by_its_degrees() -> None:
    assert run({"pp": 2, "tp": 4}).engine.label == "mesh-pp2-tp4"


@given(
    engine=st.builds(
        MeshEngine,
        **{axis: st.integers(1, 32) for axis in ("pp", "cp", "tp")},
        dp=st.none() | st.integers(2, 32),
        schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
        **{option: st.booleans() for option in ("shard", "sequence_parallel", "loss_parallel")},
    )
)
def test_what_a_mesh_is_called_can_be_typed(engine: MeshEngine) -> None:
    assert TypeAdapter(EngineConfig).validate_python(engine.label) == engine


def test_a_name_on_the_command_line_is_the_mesh_that_overrides_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "workload: {type: module, path: my.py}\nbatch_size: 4\nloop: {steps: 1}\nengine: mesh-pp2-shard\n"
    )
    found, problems = load(tmp_path / "run.yaml", ["engine.dp=3"])
    assert not problems
    assert found is not None
    assert found.engine == MeshEngine(pp=2, dp=3, shard=True)
    _, [problem] = load(tmp_path / "run.yaml", ["engine=mesh-tp2-tp4"])
    assert problem.why.startswith("mesh-tp2-tp4 was given")


def language(engine: dict[str, Any], **model: Any) -> list[str]:
    workload = {"type": "language_model", "model": model, "data": {"train": "owner/set"}}
    return [f"{each.field}: {each.why}: {each.fix}" for each in problems(engine, workload=workload)]


def test_stages_beyond_a_configs_layers_are_seen_before_ranks_start(tmp_path: Path) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": True}
    assert not language({"pp": 2}, config=config)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    [layers] = language({"pp": 2}, path=str(tmp_path))
    assert layers.startswith("engine.pp: num_hidden_layers (1) < pp (2)")
    (tmp_path / "config.json").write_text("{")
    assert not language({"pp": 2}, path=str(tmp_path)), "told when it is read"


def test_zero_bubble_and_compile_are_not_combined() -> None:
    [problem] = problems({"pp": 2, "dp": 1, "schedule": "zero_bubble"}, compile=True)
    assert problem.field == "engine.schedule"
    assert "compile" in problem.why + problem.fix
