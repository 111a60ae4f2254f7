"""Users' own DeepSpeed and Accelerate configurations and launchers, as runs of two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_start import finished, finished_here, losses, prepared, report

ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_min_num_params: 50
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 200000000, "overlap_comm": False},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepared(tmp_path_factory.mktemp("foreign"))
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    (folder / "ds.json").write_text(json.dumps(ZERO))
    of_accelerate = ACCELERATE.replace("distributed_type: FSDP", "distributed_type: DEEPSPEED")
    of_accelerate = of_accelerate[: of_accelerate.index("fsdp_config")] + (
        "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: false}\nnum_processes: 2\n"
    )
    (folder / "accelerate-deepspeed.yaml").write_text(of_accelerate)
    finished_here(folder, "train", "run.yaml", "output=one")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "processes", "label"),
    [
        pytest.param("{name: accelerate, config: accelerate.yaml}", [], "accelerate-fsdp", marks=pytest.mark.slow),
        pytest.param(
            "{name: accelerate, config: accelerate-deepspeed.yaml}", [], "accelerate-zero2", marks=pytest.mark.slow
        ),
        ("{name: deepspeed, config: ds.json}", ["processes=2"], "zero2"),
    ],
)
def test_a_users_own_configuration_trains_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, processes: list[str], label: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    finished(place, "train", "run.yaml", f"engine={engine}", *processes, f"output={label}")
    assert losses(place / label) == pytest.approx(losses(place / "one"), rel=1e-5)
    found = report(place / label)
    assert (found["engine"], found["engaged"]["world_size"]) == (label, 2)
    assert not list(tmp_path.iterdir()), "nothing is compiled"


@pytest.mark.slow  # torchrun, which sets the same variables, is joined always
def test_the_deepspeed_launcher_is_joined(place: Path) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")  # also where the environment is not activated
    joining = ["--num_gpus", "2", "--module", "drivetrain", "train", "run.yaml", "engine=zero1", "output=joined"]
    done = subprocess.run(
        [launcher, *joining],
        cwd=place,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(place / "joined") == pytest.approx(losses(place / "one"), rel=1e-5)
    assert report(place / "joined")["engaged"]["world_size"] == 2


@pytest.mark.slow
def test_a_resumed_run_of_zero3_ends_with_the_same_curve(place: Path) -> None:
    settings = ("engine=zero3", "processes=2", "checkpoints.every_steps=6")
    finished(place, "train", "run.yaml", *settings, "output=whole")
    finished(place, "train", "run.yaml", *settings, "output=parts", "loop.steps=6")
    finished(place, "train", "run.yaml", *settings, "output=parts", "--resume")
    assert losses(place / "parts")[12] == losses(place / "whole")[12]
