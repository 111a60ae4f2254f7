"""The order of the layers, read off the imports: a layer imports only what stands before it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import drivetrain
from drivetrain.config.engines import KINDS

SOURCE = Path(drivetrain.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 350

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
    ["measure"],
    ["workloads"],
    ["engines", "tracking", "checkpoint"],
    ["generation"],
    ["training"],
    ["init"],
    ["inference", "doctor"],
    ["prove"],
    ["launch"],
    ["compare", "importing", "replay"],
    ["checkpoint/convert"],
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
        *("models", "data/tokenised.py", "data/token_cache.py", "engines/mesh/context_parallel.py"),
        *("data/language/chat.py", "data/language/vocabularies.py"),
    },
    "peft": {"models"},
    "tokenizers": {
        *("data/tokenised.py", "data/token_cache.py", "data/language/vocabularies.py", "data/word_pieces.py"),
    },
    "cloudpickle": {"objects/carry.py"},
    "datasets": {"data/tables.py", "data/image_tables.py"},
    "tensorboard": {"tracking/tensorboard.py"},
    "pynvml": {"measure/nvml.py", "compare/live.py"},
    "sklearn": {"data"},
    "pandas": {"data", "api/comparing.py"},
    "pyarrow": {"data"},
    "PIL": {"data"},
    "rich": {
        *("cli", "launch/diagnostics/hang_report.py"),
        *("tracking/progress.py", "compare/live.py", "compare/table.py"),
    },
    "matplotlib": {"compare/plots.py", "compare/page.py"},
    "jinja2": {"compare/page.py", "data/language/chat.py"},
    "pytorch_optimizer": {"optim/low_rank.py"},
    "filelock": {
        "compare/runner.py",
        "data/array_store.py",
        "data/cache_entries.py",
        "data/token_cache.py",
        "engines/deepspeed/native_build.py",
    },
    "typer": {"cli"},
    "safetensors": {"checkpoint", "models"},
    "bitsandbytes": {"models/quantised_base.py"},
    "torchao": {"models/torchao_base.py", "models/fake_quantised.py", "models/fp8.py"},
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


def test_the_loop_names_no_engine_no_precision_and_no_tracker() -> None:
    text = (SOURCE / "training/loop.py").read_text()
    for name in ("single", "fsdp", "ddp", "bf16", "fp32", "fp16-mixed", "float16", "tensorboard"):
        assert f'"{name}"' not in text
    assert not {
        m for m in imported(SOURCE / "training/loop.py") if m.startswith("drivetrain.tracking.") and "events" not in m
    }


def asks_for_a_kind(file: Path) -> list[str]:
    """Where a file names the class of an engine's block, or compares an engine's name with a word."""
    classes, found = {kind.__name__ for kind in KINDS.values()}, []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in classes:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_name = any(re.search(r"(engine|driver|driving)\.name$", ast.unparse(side)) for side in sides)
            if is_name and any(isinstance(side, ast.Constant) for side in sides):
                found.append(ast.unparse(node))
    return found


ANSWERING = ("config/engines/", "engines/")


def test_only_engines_ask_which_kind_of_engine_it_is() -> None:
    others = [file for file in FILES if not relative(file).startswith(ANSWERING)]
    assert not {relative(file): asked for file in others if (asked := asks_for_a_kind(file))}


def test_the_search_for_such_questions_finds_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = isinstance(run.engine, FsdpEngine)\nb = run.engine.name == 'single'\n")
    (tmp_path / "b.py").write_text("a = run.engine.gives_pieces\nb = run.engine.name\n")
    assert asks_for_a_kind(tmp_path / "a.py") == ["run.engine.name == 'single'", "FsdpEngine"]
    assert asks_for_a_kind(tmp_path / "b.py") == []


def test_a_file_fits_a_readers_head() -> None:
    lines = {relative(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: number for name, number in lines.items() if number > MOST_LINES}
