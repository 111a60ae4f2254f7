"""Tests that the README and the pages are true: files, blocks, links, commands, the tree."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from ruamel.yaml import YAML
from typer.main import get_command

from drivetrain.cli import main
from drivetrain.cli.app import app
from drivetrain.config.load import load, resolve_key
from drivetrain.config.workload import UserModule
from drivetrain.data.loader import MicroBatch
from drivetrain.engines.base import Engine
from drivetrain.engines.mesh.declared_plan import STYLES
from drivetrain.engines.mesh.tensor_plan import SAME
from drivetrain.errors import UserError
from drivetrain.workloads.user_module import UserModuleWorkload
from tests.parity.mesh_cases import MeshCase, engine_of
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def blocks(text: str, language: str = "") -> list[str]:
    """Returns what stands between fences; every second fence closes."""
    parts = re.split(r"^```(.*)\n", text, flags=re.M)
    return [content for kind, content in zip(parts[1::4], parts[2::4], strict=True) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Command lines of drivetrain, in blocks and in backticks, placeholders taken out; none shown as refused."""
    text = page.read_text()
    lines = [line for block in blocks(text) for line in block.splitlines() if "# exits with 2" not in line]
    lines += re.findall(r"`(drivetrain [^`]+)`", text)
    found = [re.sub(r"\[.*?\]|>.*|#.*|\.\.\.", "", line) for line in lines if line.startswith("drivetrain ")]
    return [shlex.split(line)[1:] for line in found]


@pytest.mark.parametrize("file", ["examples/linear.py", "recipes/linear.yaml"])
def test_a_file_shown_in_the_readme_is_the_file_that_ships(file: str) -> None:
    def code(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if line and not line.startswith(("#", '"""')))

    shown = [code(block) for language in ("python", "yaml") for block in blocks(README, language)]
    assert code((ROOT / file).read_text()) in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_run_files_shown_are_run_files(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        if "workload" in YAML(typ="safe", pure=True).load(block):
            (tmp_path / "run.yaml").write_text(block)
            _, problems = load(tmp_path / "run.yaml")
            assert not problems, problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target
            if heading:
                assert heading in anchors(page.parent / target if target else page), f"{target}#{heading}"


def anchors(page: Path) -> list[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:recipes|examples|bench|tests|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_verbs_options_and_keys_that_exist(page: Path) -> None:
    for verb, *arguments in commands(page):
        assert verb in VERBS, f"drivetrain {verb}"
        found = VERBS[verb]
        if subverbs := getattr(found, "commands", None):
            assert arguments, f"drivetrain {verb}"
            assert arguments[0] in subverbs, f"drivetrain {verb} {arguments[0]}"
            found = subverbs[arguments.pop(0)]
        options = {name for parameter in found.params for name in parameter.opts}
        for argument in arguments:
            if argument.startswith("-"):
                assert argument.split("=")[0] in options, f"drivetrain {verb} {argument}"
            elif "=" in argument:
                resolve_key(argument.split("=")[0])


def test_every_page_is_in_the_index_of_docs() -> None:
    folder = ROOT / "docs"
    listed = re.findall(r"\]\(([\w-]+/[\w.-]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(folder)) for page in folder.glob("*/*.md"))


def test_every_verb_is_in_the_readme() -> None:
    verbs = set(VERBS) - {"version"}
    assert verbs <= {verb for verb, *_ in commands(ROOT / "README.md")}


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = next(block for block in blocks(README) if block.startswith("src/drivetrain/\n"))
    inside = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    inside |= {name for line in tree.splitlines() for name in re.findall(r"(\w+\.py)\b", line)}
    folders = {
        path.name for path in (ROOT / "src/drivetrain").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    files = {path.name for path in (ROOT / "src/drivetrain").rglob("*.py")}
    below = {path.name for path in (ROOT / "src/drivetrain").rglob("*") if path.is_dir()}
    assert folders <= inside
    assert inside <= below | files
    for line in tree.splitlines()[1:]:
        if not line.startswith(" "):
            assert (ROOT / line.split()[0]).exists(), line


def test_fields_named_with_their_block_exist() -> None:
    """`scaler.init_scale`, `workload.data.train`: dotted names in backticks that start with a block of the run file."""
    heads = {"scaler", "optimizer", "schedule", "loop", "evaluation", "checkpoints", "tracking", "loader", "workload"}
    for page in PAGES:
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", page.read_text()):
            if name.split(".")[0] in heads and name != "loop.py":
                try:
                    resolve_key(name)
                except UserError as error:
                    raise AssertionError(f"{page.name}: {name}") from error


def test_the_styles_of_a_plan_are_all_reported() -> None:
    section = (ROOT / "docs/reference/workloads.md").read_text().split("### tensor_parallel\n")[1]
    words = set(
        re.findall(r"`(\w+)`", " ".join(line.partition("|")[2].partition("|")[0] for line in section.splitlines()))
    )
    assert words == {*STYLES, *SAME}


def losses_of_the_plan_shown(file: Path, degrees: dict[str, Any]) -> list[float]:
    work = UserModuleWorkload(UserModule(path=file), seed=0)
    torch.manual_seed(1)
    engine = engine_of(MeshCase(degrees), work)
    batch = MicroBatch(work.collate([work.train.load(index, 0) for index in range(8)]))
    return [trained(engine, batch) for _ in range(3)]


def trained(engine: Engine, batch: MicroBatch) -> float:
    loss = engine.summed(engine.forward_backward([batch])).item()
    engine.optimizer_step(1.0)
    return loss


def test_the_plan_shown_splits_the_model_shown(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/workloads.md").read_text()
    [shown] = [block for block in blocks(page, "python") if "tensor_parallel = " in block]
    (tmp_path / "shown.py").write_text(shown)
    whole = losses_of_the_plan_shown(tmp_path / "shown.py", {"name": "single"})
    for split in ranks(2).run(losses_of_the_plan_shown, tmp_path / "shown.py", {"tp": 2}):
        assert split == pytest.approx(whole, rel=1e-5)


def test_the_readmes_own_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    block = next(block for block in blocks(README) if "recipes/linear.yaml" in block)
    for line in block.splitlines():
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(line)[1:], *(["--quiet"] if " train " in line else [])])
        assert ended.value.code == 0, line
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 201


def test_exit_codes_are_reported_by_help() -> None:
    assert isinstance(app, typer.Typer)
    for code in ("0 done", "1 failed", "2 refused", "130 / 143"):
        assert code in str(app.info.help)
