"""Between two points of the curve a step waits for nothing that the device computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.config.engines import DdpEngine, FsdpEngine
from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.config.training import Loader
from drivetrain.data.loader import Window, training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.base import Engine
from drivetrain.measure.meters import Meters
from drivetrain.measure.throughput import Stopwatch
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.loop import train
from drivetrain.training.progress import Progress
from drivetrain.workloads.base import Batch, BestMetric, Workload
from drivetrain.workloads.build import build_workload
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, ROWS, write_lines
from tests.tiny_workload import CPU, tiny_engine
from tests.waits import watched

WARM_UP, STEPS, BATCH, MICRO_BATCH = 3, 4, 8, 4
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
MODULE = """
import torch
from torch import nn
model = nn.Linear(4, 3)
train_data = [{"input": torch.randn(4), "target": torch.tensor(i % 3)} for i in range(20)]
loss = nn.CrossEntropyLoss()
"""


def language(folder: Path, stage: str = "sft", config: dict[str, Any] = LLAMA, **more: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"cache": str(folder / "cache"), "length": 64, **more.pop("data", {})}
    if stage == "sft":
        data |= {"template": "chatml", "train": write_lines(folder / "train.jsonl", ROWS)}
    else:
        (folder / "text.txt").write_text("once upon a time there was a text. " * 40)
        data |= {"train": str(folder / "text.txt")}
    return {"type": "language_model", "stage": stage, "model": {"config": config, **more}, "data": data}


def texts(folder: Path, **data: Any) -> dict[str, Any]:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "hotel"]))
    (folder / "train.csv").write_text("\n".join(["label,text", *["1,good hotel", "0,bad bad hotel", "0,bad"] * 10]))
    data = {"train": str(folder / "train.csv"), "cache": str(folder / "cache"), "max_length": 16, **data}
    model = {"tokenizer": str(folder / "vocab.txt"), "config": BERT}
    return {"type": "text_classification", "model": model, "data": data}


def compared(folder: Path, stage: str, **more: Any) -> dict[str, Any]:
    """A language model on pairs, on labelled answers, or on prompts with the longest answers in place of its own."""
    rows = {
        "dpo": {"prompt": "say it", "chosen": "yes, yes", "rejected": "no"},
        "kto": {"prompt": "say it", "completion": "yes", "label": True},
        "grpo": {"instruction": "say it", "output": "yes"},
    }[stage]
    other = {"label": False} if stage == "kto" else {}
    path = write_lines(folder / "rows.jsonl", [{**rows, **other} if n % 2 else rows for n in range(20)])
    data = {"cache": str(folder / "cache"), "length": 64, "template": "plain", "train": path}
    return {"type": "language_model", "stage": stage, "model": {"config": LLAMA}, "data": data, **more}


def distilled(folder: Path) -> dict[str, Any]:
    made: Any = build_workload(run_of(language(folder), "fp32").workload, 0)
    made.build_model().save_pretrained(folder / "teacher")
    made.tokenizer.save_pretrained(folder / "teacher")
    settings = {"teacher": str(folder / "teacher"), "loss": {"js": 1.0, "sft": 0.5}}
    return {**language(folder), "stage": "distill", "distillation": settings}


def module(folder: Path) -> dict[str, Any]:
    (folder / "tiny.py").write_text(MODULE)
    return {"type": "module", "path": str(folder / "tiny.py")}


WORKLOADS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "packed": language,
    "packed, a window": lambda folder: language(folder, config=MISTRAL),
    "packed, fused loss": lambda folder: language(folder, fused_loss=True, neftune_alpha=5.0),
    "padded": lambda folder: language(folder, data={"packing": False}),
    "padded, a window": lambda folder: language(folder, config=MISTRAL, data={"packing": False}),
    "texts": lambda folder: language(folder, stage="pretrain"),
    "text classes": texts,  # end to end, on a CPU
    "padded text classes": lambda folder: texts(folder, unpadded=False),
    "image classes": lambda _: {
        "type": "image_classification", "model": {"config": RESNET}, "data": {"source": "digits", "limit_train": 40}
    },
    "a user's module": module,
    "pairs": lambda folder: compared(
        folder, "dpo", preference={"loss": {"sigmoid": 1.0, "sft": 0.2}, "reference": "copy"}
    ),
    "pairs, cached": lambda folder: compared(folder, "dpo", preference={"reference": "cached"}),
    "pairs, over the batch": lambda folder: compared(folder, "dpo", preference={"loss": "aot", "reference": "copy"}),
    "labelled": lambda folder: compared(
        folder, "kto", preference={"loss": "apo_zero_unpaired", "reference": "copy"}
    ),
    "rewards": lambda folder: compared(
        folder, "grpo", reinforcement={"rewards": ["exact_match"], "max_new_tokens": 8, "beta": 0.1}
    ),
    "a teacher": distilled,
    "weighted tokens": lambda folder: {**language(folder), "sft": {"loss": "eaft"}},
}  # fmt: skip


def run_of(workload: dict[str, Any], precision: str, **more: Any) -> RunConfig:
    raw = {
        "workload": workload,
        "batch_size": BATCH,
        "micro_batch_size": MICRO_BATCH,
        "precision": precision,
        "loop": {"steps": WARM_UP + STEPS + 1},
        "scaler": {"init_scale": 1024.0},
        "tracking": {"log_every": 1000},
        "checkpoints": {"every_steps": 1000},
        **more,
    }
    run, problems = validate(raw, [])
    assert run is not None, problems
    return run


def ridden(
    raw: dict[str, Any],
    watch: Callable[[Engine], AbstractContextManager[Any]],
    precision: str = "fp32",
    engine: Any = None,
    change: Callable[[Workload], None] = lambda _: None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """The loop, of whose steps all but the first few and the last run under `watch`: no point of the curve is there."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = run_of(raw, precision, **{"optimizer": {"name": "adamw"}, **(more or {})})
    workload = build_workload(run.workload, run.seed)
    ways = {"config": engine, "max_grad_norm": 1.0, "scaler": run.scaler, **settings}
    made = tiny_engine(workload, precision, run.optimizer, **ways)
    change(workload)
    order, total = GlobalOrder(len(workload.train), BATCH, run.seed), WARM_UP + STEPS + 1
    mine = Slice(made.data_rank, made.data_world, MICRO_BATCH // made.data_world)
    pins = settings.get("device") == "cuda"
    windows = list(training_windows(workload.train, workload.collate, order, range(total), mine, Loader(), pins))

    def given() -> Iterator[Window]:
        """Returns what is watched begins when its first step is asked for, and ends when the step after its last is."""
        yield from windows[:WARM_UP]
        with watch(made):
            yield from windows[WARM_UP:-1]
        yield windows[-1]

    meters = Meters(CPU, run.precision_spec, made, instrument=False, stopwatch=Stopwatch(torch.device("cpu")))
    best = BestMetric("loss", higher_is_better=False)
    around = LoopHooks(None, lambda _: None, lambda _: None, lambda: False, best, meters)
    with meters:
        train(made, given(), run, total, order.steps_per_epoch, Progress(), around)


def waits_of(raw: dict[str, Any], precision: str = "fp32", engine: Any = None, **settings: Any) -> dict[str, int]:
    """Returns what would wait for a device, and how often."""
    found: dict[str, int] = {}

    @contextmanager
    def watch(made: Engine) -> Iterator[None]:
        with watched(made) as waits:
            yield
        found.update(waits.found)

    ridden(raw, watch, precision, engine, **settings)
    return found


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"padded text classes", "pairs, over the batch"}))
def test_a_step_on_one_device_waits_for_nothing(name: str, tmp_path: Path) -> None:
    assert waits_of(WORKLOADS[name](tmp_path)) == {}


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("name", ["packed", "image classes"])
def test_a_step_in_mixed_precision_waits_for_nothing(name: str, precision: str, tmp_path: Path) -> None:
    assert waits_of(WORKLOADS[name](tmp_path), precision) == {}


def test_recomputing_layers_waits_for_nothing(tmp_path: Path) -> None:
    assert waits_of(language(tmp_path), recompute=True) == {}


MICRO_BATCHES = 7  # of the steps that are watched: one of the batches has but 4 samples
EXCEPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Transformers asks whether a padding mask hides anything": (
        "padded text classes",
        {},
        {"_local_scalar_dense in _ignore_bidirectional_mask_sdpa (masking_utils.py)": MICRO_BATCHES},
    ),
    "what compares samples with the whole batch is joined on the host": (
        "pairs, over the batch", {}, {"cpu in joined_partials (window_loss.py)": 2 * MICRO_BATCHES}
    ),
    "whether a step is skipped decides about its own update": (
        "image classes", {"more": {"numerics": {"skip": True}}}, {"tolist in _skips (step_guard.py)": STEPS}
    ),
    "an optimizer without fused kernels cannot leave an overflowed step out by itself": (
        "image classes",
        {"precision": "fp16-mixed", "more": {"optimizer": {"name": "sgd", "options": {"foreach": True}}}},
        {"_local_scalar_dense in update (guarded_update.py)": STEPS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ways", "expected"), EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_what_still_waits(name: str, ways: dict[str, Any], expected: dict[str, int], tmp_path: Path) -> None:
    assert waits_of(WORKLOADS[name](tmp_path), **ways) == expected


CASES = [
    ("packed", DdpEngine(), "fp16-mixed"),
    ("image classes", DdpEngine(), "fp32"),
    ("packed", FsdpEngine(), "fp32"),
    ("padded", FsdpEngine(), "fp16-mixed"),
    ("packed", MeshEngine(dp=2), "fp32"),
    ("pairs", FsdpEngine(), "fp32"),
    ("rewards", DdpEngine(), "fp32"),
]


def of_ranks(folder: str) -> dict[str, dict[str, int]]:
    own = Path(folder) / os.environ["RANK"]
    own.mkdir()
    return {
        f"{engine.name}, {name}, {precision}": waits_of(WORKLOADS[name](own), precision, engine)
        for name, engine, precision in CASES
    }


def test_ranks_wait_for_nothing(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(of_ranks, str(tmp_path)):
        assert found == {case: {} for case in found}


def test_a_workload_that_reads_its_loss_is_found(tmp_path: Path) -> None:
    def change(workload: Workload) -> None:
        whole: Any = workload.loss_sum

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            loss: Tensor = whole(model, batch)
            assert loss.item() > 0
            return loss

        vars(workload)["loss_sum"] = loss_sum

    found = waits_of(module(tmp_path), change=change)
    assert found == {"_local_scalar_dense in loss_sum (test_waits.py)": MICRO_BATCHES}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is asked whether it is waited for")
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"padded text classes", "pairs, over the batch"}))
def test_a_gpu_is_not_waited_for(name: str, precision: str, tmp_path: Path) -> None:
    @contextmanager
    def watch(_: Engine) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    ridden(WORKLOADS[name](tmp_path), watch, precision, device="cuda")
