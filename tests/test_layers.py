"""The order of the layers, read off the imports: a layer imports only what stands before it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import drivetrain
from drivetrain.config.engines import KINDS
from drivetrain.config.language_stages import STAGES
from drivetrain.config.optimizers import KINDS as OPTIMIZERS
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.workload import KINDS as WORKLOADS

SOURCE = Path(drivetrain.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 330

# from the ground up; a name stands for a file or a folder, and what shares a line shares a layer
LAYERS = [
    ["errors"],
    ["objects"],
    ["config"],
    ["trust"],
    ["runtime"],
    ["distributed", "numerics", "optim"],
    ["memory"],
    ["data"],
    ["models"],
    ["measure", "rewards"],
    ["workloads"],
    ["engines", "tracking", "checkpoint"],
    ["generation"],
    ["training"],
    ["init"],
    ["web"],
    ["inference", "doctor"],
    ["prove", "plan"],
    ["profile"],
    ["launch"],
    ["compare", "importing", "replay", "run_page"],
    ["checkpoint/convert"],
    ["export"],
    ["board"],
    ["cli"],
    ["__main__"],
    ["recipes"],  # a script, which imports nothing of drivetrain's
    ["api"],
    ["__init__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# heavy or optional packages, and who alone may import them
OWNERS = {
    "transformers": {
        *("export/runtimes/plain_transformers.py", "export/runtimes/plain_peft.py", "export/runtimes/with_torch.py"),
        *("models", "data/tokenised.py", "data/token_cache.py", "engines/mesh/context_parallel.py"),
        *("data/language/template_renderer.py", "data/language/vocabularies.py", "generation/cache.py"),
    },
    "peft": {"models", "export/runtimes/plain_peft.py"},
    "tokenizers": {
        *("data/tokenised.py", "data/token_cache.py", "data/language/vocabularies.py", "data/word_pieces.py"),
    },
    "cloudpickle": {"objects/carry.py"},
    "datasets": {"data/tables.py", "data/image_tables.py"},
    "tensorboard": {"tracking/tensorboard.py"},
    **{name: {f"tracking/{name}.py"} for name in ("wandb", "mlflow", "trackio", "swanlab", "opentelemetry")},
    "pynvml": {"measure/nvml.py", "compare/live.py", "board/devices.py"},
    "sklearn": {"data"},
    "scipy": {"compare/noise.py"},
    "sacrebleu": {"generation/text_metrics.py"},
    "rouge_score": {"generation/text_metrics.py"},
    "nltk": {"generation/similarity.py"},
    "rouge_chinese": {"generation/similarity.py"},
    "jieba": {"generation/text_metrics.py"},
    "pandas": {"data", "api/comparing.py"},
    "pyarrow": {"data"},
    "PIL": {"data"},
    "rich": {
        *("cli", "launch/diagnostics/hang_report.py"),
        *("tracking/progress.py", "compare/live.py", "compare/table.py"),
        *("inference/chat/chat.py", "inference/chat/screen.py"),
    },
    "matplotlib": {"compare/plots.py", "compare/page.py"},
    "jinja2": {
        *("compare/page.py", "plan/page_template.py"),
        *("data/language/chat.py", "data/language/template_renderer.py"),
    },
    "pytorch_optimizer": {"optim/low_rank.py"},
    "filelock": {
        "compare/runner.py",
        "data/array_store.py",
        "data/cache_entries.py",
        "data/token_cache.py",
        "engines/deepspeed/native_build.py",
        "runtime/store_cache.py",
        "data/streams/shard_copier.py",
    },
    "onnxruntime": {"export/runtimes/onnx_runtime.py"},
    "gguf": {"export/gguf_format.py", "export/gguf_architectures.py", "export/gguf_vocabulary.py"},
    "xllamacpp": {"export/runtimes/llama_cpp.py"},
    "llguidance": {"generation/constraints.py"},
    "kubeflow_trainer_api": {"launch/manifest_check.py"},
    "ray": {"launch/on_ray.py", "launch/ray_connection.py", "compare/on_ray.py"},
    "math_verify": {"rewards/verifiers.py"},
    "typer": {"cli"},
    "prompt_toolkit": {"inference/chat/lines.py"},
    "fastapi": {"board", "inference/serve/app.py", "inference/serve/reading_app.py", "web/json_bodies.py"},
    "starlette": {
        *("web", "board", "inference/serve/app.py", "inference/serve/reading_app.py", "inference/serve/metrics.py"),
    },
    "uvicorn": {"web/server.py", "web/connections.py"},
    "h11": {"web/connections.py"},
    "prometheus_client": {"inference/serve/metrics.py", "tracking/prometheus.py"},
    "safetensors": {"checkpoint", "models", "export/runtimes/exchange.py"},
    "obstore": {"runtime/object_store.py"},
    "bitsandbytes": {"models/quantised_base.py"},
    "compressed_tensors": {"models/int4_export.py"},
    "torchao": {"models/rounded_export.py", "models/torchao_base.py", "models/fake_quantised.py", "models/fp8.py"},
}


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imported(file: Path) -> frozenset[str]:
    """Modules a file imports anywhere, also within functions."""
    found: set[str] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: imports are absolute"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "drivetrain" else {module}
    return frozenset(found)


def layer(path: str) -> str:
    """The layer of a file, or of a module's dotted name with slashes: its longest beginning that has a place above."""
    parts = path.removesuffix(".py").split("/")
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVEL), parts[0])


def relative(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def stands_below(module: str, importing: str) -> bool:
    """Whether a layer may import a module of drivetrain: one of its own, or of a layer beneath."""
    other = layer(module.removeprefix("drivetrain.").replace(".", "/"))
    return other == importing or LEVEL.get(other, 0) < LEVEL[importing]  # drivetrain.__version__ has no level


def test_a_file_imports_only_its_own_layer_and_those_below() -> None:
    upward = [
        f"{relative(file)} imports {module}"
        for file in FILES
        for module in sorted(imported(file))
        if module.startswith("drivetrain.") and not stands_below(module, layer(relative(file)))
    ]
    assert not upward


def test_an_import_from_a_layer_above_is_seen() -> None:
    assert stands_below("drivetrain.config.run", "engines")
    assert stands_below("drivetrain.engines.base", "engines")
    assert not stands_below("drivetrain.training.loop", "engines")
    assert not stands_below("drivetrain.tracking.jsonl", "engines"), "it shares the layer, and is another folder"


def test_a_heavy_package_is_imported_by_its_owners_alone() -> None:
    foreign = [
        f"{name} imports {module}"
        for name, file in ((relative(file), file) for file in FILES)
        for module in sorted(imported(file))
        if not OWNERS.get(module.split(".")[0], {name}) & {name, name.split("/")[0]}
    ]
    assert not foreign


def test_every_layer_exists() -> None:
    there = {layer(relative(file)) for file in FILES}
    assert there == set(LEVEL)


def test_the_run_file_is_read_without_torch_and_without_looking_at_the_machine() -> None:
    of_config = [file for file in FILES if relative(file).startswith("config/")]
    assert of_config
    for file in of_config:
        roots = {module.split(".")[0] for module in imported(file)}
        assert not roots & {"torch", "numpy", "transformers", "psutil", "os", "platform"}, relative(file)


@pytest.mark.parametrize("name", ["loop.py", "curve.py", "hooks.py", "progress.py"])
def test_the_loop_names_no_engine_no_precision_and_no_tracker(name: str) -> None:
    file = SOURCE / "training" / name
    for word in ("single", "fsdp", "ddp", "bf16", "fp32", "fp16-mixed", "float16", "tensorboard"):
        assert f'"{word}"' not in file.read_text()
    assert not {m for m in imported(file) if m.startswith("drivetrain.tracking.") and "events" not in m}


def test_one_loop_takes_the_steps_of_a_run() -> None:
    """The batch-size finder tries sizes on invented windows; a loop of the user's own drives an engine itself; a plan
    traces two steps without numbers."""
    takers = {relative(file) for file in FILES if not relative(file).startswith("engines/") and takes_steps(file)}
    assert takers == {"training/loop.py", "training/batch_size_finder.py", "api/own_loop.py", "plan/trace.py"}


def takes_steps(file: Path) -> bool:
    calls = [node.func for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Attribute) and called.attr == "optimizer_step" for called in calls)


def named_classes(tree: ast.AST, classes: set[str]) -> list[str]:
    """Where a file names one of these classes outside its imports."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in classes]
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in classes]
    return [ast.unparse(node) for node in (*names, *parts)]


def comparisons(tree: ast.AST, asked: str, answers: set[str]) -> list[str]:
    """Where a file decides by something that matches `asked`: it compares it with a constant, or looks it up in a
    constant table. Comparing anything with one of `answers` counts too."""
    found = []
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.subject] if isinstance(node, ast.Match) else []
        sides += [node.slice] if isinstance(node, ast.Subscript) and ast.unparse(node.value).isupper() else []
        constants = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
        decides = constants or not isinstance(node, ast.Compare)
        is_asked = decides and any(re.search(asked, ast.unparse(side)) for side in sides)
        if is_asked or (isinstance(node, ast.Compare) and constants & answers):
            found.append(ast.unparse(node))
    return found


def asks_for_an_engine(file: Path) -> list[str]:
    """Where a file names the class of an engine's block, or decides by an engine's name."""
    classes = {kind.__name__ for kind in KINDS.values()}
    return named_classes(tree(file), classes) + comparisons(tree(file), r"\b(engine|driver|driving)\.name$", set())


def asks_for_a_workload(file: Path) -> list[str]:
    """Where a file names the class of a workload's block, or decides by a workload's type or its stage of training."""
    classes = {kind.__name__ for kind in WORKLOADS}
    types = {kind.model_fields["type"].default for kind in WORKLOADS} - {"module", "objects"}  # everyday words
    return named_classes(tree(file), classes) + comparisons(
        tree(file), r"\b(workload|config)\.(type|stage)$", types | {*STAGES}
    )


def asks_for_a_precision(file: Path) -> list[str]:
    """Where a file decides by a precision's name."""
    return comparisons(tree(file), r"\b(run|config|_run)\.precision$", {*PRECISIONS} - {*FOREIGN})


def asks_for_an_optimizer(file: Path) -> list[str]:
    """Where a file decides by an optimizer's name."""
    return comparisons(tree(file), r"\boptimizer\.name$", {*OPTIMIZERS})


FOREIGN = ("fp32", "tf32", "fp16", "bf16")  # words of other software's files too
TRANSLATIONS = ("importing/", "config/accelerate.py", "config/deepspeed.py", "checkpoint/convert/onto_run.py")
ASKED = {
    "precision": (asks_for_a_precision, ("config/precision.py", *TRANSLATIONS)),
    "optimizer": (asks_for_an_optimizer, ("config/optimizers.py", "optim/", *TRANSLATIONS)),
    "engine": (asks_for_an_engine, ("config/engines/", "engines/")),
    "workload": (asks_for_a_workload, ("config/workload", "config/language", "config/run.py", "workloads/")),
}


@pytest.mark.parametrize("kind", ASKED)
def test_only_a_kinds_own_rooms_ask_which_one_it_is(kind: str) -> None:
    asks, rooms = ASKED[kind]
    found = {relative(file): asks(file) for file in FILES if not relative(file).startswith(rooms)}
    assert not {name: questions for name, questions in found.items() if questions}


@pytest.mark.parametrize(
    ("kind", "question"),
    [
        ("engine", "run.engine.name == 'single'"),
        ("engine", "FsdpEngine"),
        ("precision", "run.precision == 'bf16-mixed'"),
        ("precision", "name in ('fp8-mixed',)"),
        ("optimizer", "run.optimizer.name == 'mine'"),
        ("optimizer", "optimizer in {'sgd', 'adafactor'}"),
        ("workload", "LanguageModel"),
        ("workload", "run.workload.stage == 'dpo'"),
        ("workload", "run.workload.type in ('module', 'objects')"),
        ("workload", "stage != 'sft'"),
        ("workload", "TABLE[run.workload.type]"),
    ],
)
def test_the_search_for_such_questions_finds_them(kind: str, question: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"if {question}:\n    pass\n")
    assert ASKED[kind][0](tmp_path / "a.py") == [question]


@pytest.mark.parametrize("answer", ["run.engine.gives_pieces", "run.engine.name", "run.workload.type", "a.stage == 3"])
def test_the_search_for_such_questions_lets_answers_be(answer: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"a = {answer}\n")
    assert not any(asks(tmp_path / "a.py") for asks, _ in ASKED.values())


def test_a_file_fits_a_readers_head() -> None:
    lines = {relative(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: number for name, number in lines.items() if number > MOST_LINES}
