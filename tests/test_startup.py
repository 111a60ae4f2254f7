"""Tests what is imported before the first step: each import is paid at every start, on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKLOAD = """
import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

train_data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))


def build_model():
    return nn.Linear(4, 3)


def loss(output, target):
    Path("modules.txt").write_text(chr(10).join(sys.modules))
    Path("collector.json").write_text(json.dumps([gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())]))
    return nn.functional.cross_entropy(output, target)
"""
RUN = """
workload: {type: module, path: workload.py}
batch_size: 8
loop: {steps: 1}
output: run
"""
HEAVY = {
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "matplotlib", "pandas", "peft", "pyarrow", "scipy"),
    *("sklearn", "tensorboard", "torchao", "torchvision", "transformers"),
}

OF_OTHER_VERBS = (
    *(
        "drivetrain.cli.compare",
        "drivetrain.cli.fields",
        "drivetrain.cli.serve",
        "drivetrain.compare",
        "drivetrain.web",
    ),
    *("drivetrain.inference", "drivetrain.profile", "drivetrain.prove", "drivetrain.training.batch_size_finder"),
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of one step, with what its first loss saw of the process."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "workload.py").write_text(WORKLOAD)
    (folder / "run.yaml").write_text(RUN)
    command = [sys.executable, "-m", "drivetrain", "train", "run.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_users_own_module_is_trained_without_packages_that_it_does_not_use(started: Path) -> None:
    loaded = {name.partition(".")[0] for name in (started / "modules.txt").read_text().splitlines()}
    assert "torch" in loaded
    assert loaded & HEAVY == set()


def test_a_training_loads_nothing_of_other_verbs(started: Path) -> None:
    loaded = (started / "modules.txt").read_text().splitlines()
    assert "drivetrain.cli.train" in loaded
    assert [name for name in loaded if name.startswith(OF_OTHER_VERBS)] == []


def test_pythons_collector_passes_over_no_module_again_and_again(started: Path) -> None:
    is_enabled, apart, passed_over = json.loads((started / "collector.json").read_text())
    assert is_enabled
    assert apart > 10 * passed_over


def test_texts_in_a_csv_are_read_without_pandas_and_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\ngood hotel,1\nbad room,0\n")
    script = (
        "import sys\n"
        "import drivetrain.workloads.text_classification\n"
        "from pathlib import Path\n"
        "from drivetrain.config.workload import TextData\n"
        "from drivetrain.data.texts import read_texts\n"
        "texts = read_texts(TextData(train='train.csv', cache=Path('cache')), 'train.csv', 'workload.data.train')\n"
        "assert list(texts.first) == ['good hotel', 'bad room']\n"
        "print({'pandas', 'pyarrow'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_launcher_of_ranks_takes_no_compiler_no_models_and_no_engines() -> None:
    script = (
        "import sys\n"
        "from drivetrain.launch import elastic, restarts, start\n"
        "from torch.distributed.launcher.api import elastic_launch\n"
        "print(*sys.modules, sep=chr(10))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "drivetrain.launch.elastic" in loaded
    unwanted = ("torch._dynamo", "torch.distributed.tensor", "sympy", "drivetrain.engines", "drivetrain.models")
    assert [name for name in loaded if name.startswith(unwanted)] == []


def test_the_command_line_makes_no_json_schema_before_one_is_asked_for() -> None:
    script = (
        "import pydantic\n"
        "made = []\n"
        "pydantic.BaseModel.model_json_schema = classmethod(lambda block, **_: made.append(block.__name__) or {})\n"
        "import drivetrain.cli\n"
        "print(made)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
