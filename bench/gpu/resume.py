"""The part `resume`: runs that stop, are killed, find no memory, or hang, started as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case, environment
from bench.gpu.setting import Setting

STEPS = 12
REPORTED_WITHIN = 60.0  # seconds from the hang to the end of the run with its report
HANG_SECONDS = 20
WORKLOAD = Path(__file__).with_name("workload.py")
HUNGRY = Path(__file__).with_name("hungry.py")
SAMPLE_MIB = 192  # of the hungry workload, for each sample that is there at once


def cases(setting: Setting) -> list[Case]:
    engines = ("single",) if setting.small else ("single", "ddp", "fsdp")
    found = [Case(f"stopped, {name}", "resume:stopped", {"engine": name}, seconds=90) for name in engines]
    found += [Case(f"killed, {name}", "resume:killed", {"engine": name}, seconds=120) for name in engines]
    return [
        *found,
        Case("out of memory, cut smaller", "resume:cut_smaller", seconds=150),
        Case("out of memory, told", "resume:told", seconds=60),
        Case("hang", "resume:hung", seconds=120),
    ]


# --- the same bits ---------------------------------------------------------------------------------------------------


def stopped(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """A run to 2n steps, and one to n that goes on."""
    words = _settings(given, setting, folder)
    _finished(folder, *words, "output=whole", f"loop.steps={2 * STEPS}")
    _finished(folder, *words, "output=parts", f"loop.steps={STEPS}")
    _finished(folder, *words, "output=parts", f"loop.steps={2 * STEPS}", "--resume")
    return _compared(folder / "whole", folder / "parts")


def killed(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """A run that is ended by SIGKILL after its second checkpoint, with all its processes, and goes on."""
    words = [*_settings(given, setting, folder), "checkpoints.every_steps=4", f"loop.steps={3 * STEPS}"]
    _finished(folder, *words, "output=whole")
    run = subprocess.Popen(_command(*words, "output=parts"), cwd=folder, env=environment())
    deadline = time.monotonic() + 90
    while len(_checkpoints(folder / "parts")) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    at = max((int(path.name.partition("-")[2]) for path in _checkpoints(folder / "parts")), default=0)
    run.send_signal(signal.SIGKILL)
    if run.wait() != -signal.SIGKILL:
        return {"missed": f"the run ended with code {run.returncode} before it could be killed"}
    _finished(folder, *words, "output=parts", "--resume")
    return {"killed_after_step": at, **_compared(folder / "whole", folder / "parts")}


def _compared(one: Path, other: Path) -> dict[str, Any]:
    from drivetrain.checkpoint.directory import load, newest_good
    from drivetrain.checkpoint.state import same

    paths = [newest_good(run / "checkpoints")[0] for run in (one, other)]
    assert all(paths), "both runs saved"
    states = [load(path) for path in paths if path is not None]
    differing = [part for part in ("model", "optimizer") if not same(states[0][part], states[1][part])]
    found: dict[str, Any] = {"step": paths[0].name if paths[0] else "", "bits": not differing}
    return {**found, "missed": f"{' and '.join(differing)} have other bits"} if differing else found


def _checkpoints(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob("step-*")) if (run / "checkpoints").is_dir() else []


# --- memory ----------------------------------------------------------------------------------------------------------


def cut_smaller(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """`micro_batch_size: auto` under a limit that not all of 16 samples fit into."""
    del given
    words = _limited(setting, folder, gib=3.0)
    _finished(folder, *words, "output=run", "micro_batch_size=auto")
    from drivetrain.config.files import read_yaml

    found = int(read_yaml(folder / "run" / "run.yaml")["micro_batch_size"])
    missed = {} if 1 <= found < 16 else {"missed": f"{found} samples at once cannot have fitted into 3 GiB"}
    return {"micro_batch_size": found, **missed}


def told(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """A limit that not one sample fits into: the message names what to do."""
    del given
    limit = 0.1 if setting.device == "cuda" else 0.6
    done = _started(folder, *_limited(setting, folder, gib=limit), "output=run")
    said = " ".join((done.stdout + done.stderr).split())
    message = said[said.rfind("out of memory") :][:300]  # the last one ends the run
    if done.returncode != 1 or "out of memory" not in said:
        return {"missed": f"exit code {done.returncode}: {said[-300:]}"}
    return {"message": message}


def _limited(setting: Setting, folder: Path, gib: float) -> list[str]:
    run = {
        "workload": {"type": "module", "path": str(HUNGRY), "options": {"sample_mib": SAMPLE_MIB}},
        "batch_size": 16,
        "loop": {"steps": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "memory_limit": gib,
        "device": setting.device,
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return ["--quiet"]


# --- a hang ----------------------------------------------------------------------------------------------------------


def hung(given: dict[str, Any], setting: Setting, folder: Path) -> dict[str, Any]:
    """One rank of several stays away; on a single GPU a kernel that does not end keeps NCCL's sum waiting."""
    import torch

    del given
    ranks = 2 if setting.small else torch.cuda.device_count()
    way = "rank" if ranks > 1 else "kernel"
    words = [*_settings({"engine": "ddp"}, setting, folder), f"processes={ranks}", f"loop.steps={2 * STEPS}"]
    words += [f"hang_seconds={HANG_SECONDS}", "output=run", *(["max_restarts=1"] if ranks == 1 else [])]
    begun = time.monotonic()
    log = folder / "said"
    with log.open("w") as out:
        run = subprocess.Popen(
            _command(*words), cwd=folder, env={**environment(), "BENCH_HANG": way}, stdout=out, stderr=out
        )
        hang = _reported(run, folder / "run", begun + 100)
    said = " ".join(log.read_text().split())
    if hang is None:
        return {"missed": f"no report of a hang: {said[-300:]}"}
    late = {"missed": f"reported after {hang:.0f} s"} if hang > REPORTED_WITHIN else {}
    kept = sorted((folder / "run" / "hangs").iterdir())
    return {"way": way, "ranks": ranks, "seconds": hang, "table": kept[0].read_text()[:1500], **late}


def _reported(run: subprocess.Popen[Any], folder: Path, deadline: float) -> float | None:
    """Seconds from the last sign of life, the newest point of the curve, to the report; the run is ended."""
    try:
        while time.monotonic() < deadline:
            if (folder / "hangs").is_dir() and any((folder / "hangs").iterdir()):
                return time.time() - (folder / "events.jsonl").stat().st_mtime
            if run.poll() is not None and not (folder / "hangs").is_dir():
                return None
            time.sleep(0.2)
        return None
    finally:
        run.kill()
        run.wait()


# --- starting runs ---------------------------------------------------------------------------------------------------


def _settings(given: dict[str, Any], setting: Setting, folder: Path) -> list[str]:
    run = {
        "workload": {"type": "module", "path": str(WORKLOAD)},
        "engine": given["engine"],
        "processes": 1,
        "batch_size": 16,
        "micro_batch_size": 4,
        "loop": {"steps": STEPS, "max_grad_norm": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "precision": "bf16-mixed" if setting.device == "cuda" else "fp32",
        "deterministic": True,
        "device": setting.device,
        "tracking": {"log_every": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return ["--quiet"]


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "drivetrain", "train", "run.yaml", *words]


def _started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*words), cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def _finished(folder: Path, *words: str) -> None:
    """RuntimeError with the end of what was said where the run fails."""
    done = _started(folder, *words)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: code {done.returncode}: {_end(done.stdout + done.stderr)}")


def _end(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-4:])[:600]
