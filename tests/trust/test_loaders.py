"""Every loader, with a payload planted in what it reads: it never runs. docs/reference/security.md says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drivetrain.errors import UserError
from tests.trust.cases import CASES, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "security.md"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.loader}: {case.payload}")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")
def test_a_payload_never_runs(
    case: Case, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if case.refused is None:
        case.load(tmp_path / "theirs", marker)
    else:
        with pytest.raises(UserError) as caught:
            case.load(tmp_path / "theirs", marker)
        words = " ".join(str(caught.value).split())
        assert re.search(case.refused, words), words
        assert "Re-running `torch.load` with" not in words, "torch's advice to load it unsafely"
        assert all(problem.fix for problem in caught.value.problems)
    assert not marker.exists()
    assert "Do you wish to run" not in "".join(capfd.readouterr())


def test_the_page_has_each_case_and_no_other() -> None:
    _, _, section = PAGE.read_text().partition("## Every loader")
    _, _, *rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)
    assert rows == [(case.loader, case.payload, case.outcome) for case in CASES]
