"""Tries that a CPU can make: gloo in NCCL's place, and answers of processes that fail, crash and hang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drivetrain.doctor import devices, findings, tries
from drivetrain.doctor.devices import KINDS, NEVER, present, table
from drivetrain.doctor.tries import NAMES, compiled, joined, tried


def test_without_a_gpu_nothing_is_tried_and_that_is_reported() -> None:
    assert tried("cpu", 1) == {name: ("not tried", "PyTorch sees no GPU here") for name in NAMES}


def test_ranks_sum_a_tensor(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    state, why = joined(backend, device, 1 if device == "cuda" else 2)
    assert state == "yes", why
    assert "summed over" in why


@pytest.mark.slow
def test_a_compiled_function_gives_what_the_uncompiled_one_does(device: str) -> None:
    assert compiled(device)[0] == "yes"


def test_a_rank_that_fails_is_reported_with_its_last_line() -> None:
    state, why = joined("no such backend", "cpu", 1)
    assert state == "no"
    assert "no such backend" in why.lower()


def test_a_try_that_does_not_come_back_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time; time.sleep(600)"
    real = tries.subprocess.Popen
    children = []

    def sleeping(command: list[str], **options: object) -> object:
        children.append(real([command[0], "-c", script], **options))  # type: ignore[call-overload]
        return children[-1]

    monkeypatch.setattr(tries, "subprocess", SimpleNamespace(**{**vars(tries.subprocess), "Popen": sleeping}))
    assert joined("gloo", "cpu", 2, seconds=0.5) == ("no", "hangs: no answer within 0 s")
    assert [child.poll() is None for child in children] == [False, False]


def test_the_table_of_devices_marks_what_was_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "an Arc")
    found = table()
    assert found.keys() == KINDS.keys()
    assert found["cpu"]["here"]
    assert found["xpu"]["here"] == "an Arc"
    assert {key for key, row in found.items() if row["tried"] == NEVER} == {"rocm", "xpu", "mps"}
    assert "tf32" in found["cuda"]["abilities"]
    assert "tf32" not in found["rocm"]["abilities"]
    assert "fp8-mixed" not in found["cpu"]["abilities"]


@pytest.mark.parametrize(("hip", "kind"), [(None, "cuda"), ("7.0", "rocm")])
def test_amds_gpus_are_distinguished_from_nvidias(hip: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert present()[kind] == "a GPU"
    assert {"cuda", "rocm"} - present().keys() == {"cuda", "rocm"} - {kind}


def test_a_rank_that_fails_while_the_others_wait_for_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.stderr.write('NCCL error: unhandled system error\\n'); sys.exit(3)"
    real, children = tries.subprocess.Popen, []

    def started(command: list[str], **options: object) -> object:
        script = failing if children else "import time; time.sleep(600)"
        children.append(real([command[0], "-c", script], **options))  # type: ignore[call-overload]
        return children[-1]

    monkeypatch.setattr(tries, "subprocess", SimpleNamespace(**{**vars(tries.subprocess), "Popen": started}))
    assert joined("gloo", "cpu", 2, seconds=60) == ("no", "rank 1: exit code 3: NCCL error: unhandled system error")
    assert all(child.poll() is not None for child in children)


def test_a_package_that_cannot_be_imported_for_any_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("built for another version\nof torch")

    monkeypatch.setattr(findings.importlib, "import_module", broken)
    assert findings._optional("psutil" if "psutil" in findings.OPTIONAL else "tensorboard") == (
        "no",
        "installed but broken: RuntimeError: of torch",
    )
