"""The part `tests`: those tests of the suite that take the `device` fixture, a file a case."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.cases import Case, environment
from bench.gpu.setting import ROOT, Setting

# file → seconds that it may need, ranks that share the GPU over gloo included
FILES = {
    "tests/engines/test_single.py": 150,
    "tests/engines/test_on_device.py": 120,
    "tests/training/test_loop.py": 60,
    "tests/measure/test_flops.py": 60,
    "tests/measure/test_memory.py": 60,
    "tests/models/test_fused_loss.py": 60,
    "tests/models/test_slab_kernels.py": 60,
    "tests/models/test_cross_entropy.py": 60,
    "tests/doctor/test_tries.py": 120,
    "tests/test_resume.py": 300,
    "tests/parity/test_curve.py": 400,
}
GPU_ONLY = (
    "tests/models/test_packed_attention.py",
    "tests/test_waits.py",
    "tests/optim/test_low_bit.py",
    "tests/memory/test_offload.py",
    "tests/generation/test_recorded_steps.py",
)
SMALL = ("tests/engines/test_on_device.py", "tests/models/test_cross_entropy.py")


def cases(setting: Setting) -> list[Case]:
    """On a GPU also the tests that are marked as needing one."""
    files = {name: FILES[name] for name in SMALL} if setting.small else FILES
    found = [_case(file, ["--only-device"], seconds) for file, seconds in files.items()]
    return found + ([] if setting.small else [_case(file, ["-m", "gpu"], 60) for file in GPU_ONLY])


def _case(file: str, options: list[str], seconds: float) -> Case:
    given = {"file": file, "options": options}
    return Case(file, "suite:tested", given, ("pytest", "hypothesis", "torchmetrics"), seconds)


def tested(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """Counts of pytest, and the names of tests that failed."""
    told = folder / "told.xml"
    selected = given["options"] if "-m" in given["options"] else [*given["options"], "-m", "not slow"]
    words = [sys.executable, "-m", "pytest", given["file"], "--device", setting.device, *selected]
    words += ["-p", "no:cacheprovider", f"--junitxml={told}", "--basetemp", str(folder / "pytest")]
    code = subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode
    if not told.exists():
        return {"missed": f"pytest ended with code {code} and told nothing"}
    found = counted(told)
    if code in (0, 5):  # 5: no test was selected
        return found
    return {**found, "missed": f"{len(found['names'])} failed: {', '.join(found['names'][:8])}"}


def counted(told: Path) -> dict[str, Any]:
    """Numbers of tests by outcome, and the names of those that failed, in pytest's JUnit file."""
    tests = list(ElementTree.parse(told).getroot().iter("testcase"))
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    skipped = [test for test in tests if test.find("skipped") is not None]
    names = [re.sub(r"\s+", " ", test.get("name") or "") for test in failed]
    passed = len(tests) - len(failed) - len(skipped)
    return {"passed": passed, "failed": len(failed), "skipped": len(skipped), "names": names}
