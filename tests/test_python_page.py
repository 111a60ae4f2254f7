"""docs/reference/python.md, run as it stands: as a script without a guard, from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.init.write import written

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
LOOP = next(block for block in BLOCKS if block.startswith("# loop.py"))


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_pages_examples_run_as_one_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written("linear", None, Path("linear.yaml"))
    (tmp_path / "page.py").write_text("\n".join(block for block in BLOCKS if block is not LOOP))
    out = run(tmp_path, "page.py")
    assert "precision 'fp17' was given" in out
    assert "did you mean batch_size?" in out
    accuracy = re.search(r"^tensor\((0\.\d+)\)$", out, re.M)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9  # the caller's model, trained by two other processes
    assert re.search("^(Choose (fp32|bf16-mixed)|No (winner|row can))", out, re.M)
    assert (tmp_path / "runs" / "linear-compare" / "comparison.html").is_file()


@pytest.mark.slow
def test_the_pages_loop_gives_the_same_in_one_process_and_in_two(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    alone = run(tmp_path, "loop.py")
    assert float(alone.split()[-1]) > 0.9
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "loop.py").write_text(LOOP)
    two = run(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py")
    one_loss, two_loss = (float(out.split()[1]) for out in (alone, two))
    assert two_loss == pytest.approx(one_loss, rel=1e-2)  # bf16-mixed
    assert (tmp_path / "two" / "loop-checkpoints" / "step-00000020" / "manifest.json").is_file()


def test_every_public_name_is_on_the_page() -> None:
    import drivetrain

    text = PAGE.read_text()
    for name in {*drivetrain.__all__} - {"ComparisonTable", "LoopEngine", "Problem", "RunReport"}:
        assert f"drivetrain.{name}" in text
