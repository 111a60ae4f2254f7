"""drivetrain.train with objects, in one process."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain.config import rules
from drivetrain.errors import RunError, UserError
from drivetrain.launch import auto_choice
from drivetrain.plan.as_asked import as_it_stands
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import this_machine
from drivetrain.plan.rows import Plan
from drivetrain.plan.step_time import StepTime
from drivetrain.tracking.events import Event, StepDone, Tracker

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA = TensorDataset(X, Y)
LOSS = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def trained(tmp_path: Path, net: nn.Module, **given: Any) -> drivetrain.RunReport:
    settings: dict[str, Any] = {"train_data": DATA, "loss": LOSS, "batch_size": 16, "quiet": True, "epochs": 2}
    return drivetrain.train(model=net, **{**settings, "output": tmp_path / "run", **given})


def by_hand(net: nn.Module, order: list[list[int]], lr: float) -> nn.Module:
    """Plain PyTorch over the same batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for rows in order:
        optimizer.zero_grad()
        LOSS(net(X[rows]), Y[rows]).backward()
        optimizer.step()
    return net


def test_the_callers_model_ends_with_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    net = network()
    trained(tmp_path, net, batch_size=64, epochs=5, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    expected = by_hand(network(), [list(range(64))] * 5, lr=0.5)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_the_curve_is_columns_and_has_the_factorys_rate(tmp_path: Path) -> None:
    report = trained(
        tmp_path,
        network(),
        evaluation_data=DATA,
        tracking={"log_every": 1},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25),
        schedule=lambda updates, total: 1 - updates / total,
    )
    curve = report.curve()
    assert curve["step"] == [*range(1, 9)]
    assert curve["lr"] == pytest.approx([0.25 * (1 - step / 8) for step in range(8)])
    evaluations = report.evaluations()
    assert evaluations["step"] == [4, 8]
    assert len(evaluations["accuracy"]) == 2


def test_a_report_reads_well(tmp_path: Path) -> None:
    report = trained(tmp_path, network(), evaluation_data=DATA)
    assert repr(report).startswith("RunReport run\n  status     completed after 8 steps (2 epochs)\n")
    assert repr(report.within(tmp_path / "mine")).startswith("RunReport mine\n"), "as its folder is called"
    assert "<caption>mine</caption>" in report.within(tmp_path / "mine")._repr_html_()
    assert str(tmp_path / "run") in repr(report)
    html = report._repr_html_()
    assert html.count("<tr>") == len(report.summary())
    assert report.folder == tmp_path / "run"
    assert report.best is not None


def test_the_callers_random_numbers_and_model_mode_stay(tmp_path: Path) -> None:
    net = network().eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(tmp_path, net)
    assert torch.equal(torch.rand(3), expected)
    assert not net.training


def test_a_run_goes_on_with_the_same_objects(tmp_path: Path) -> None:
    whole, parts = network(), network()
    trained(tmp_path, whole, epochs=4)
    trained(tmp_path, parts, epochs=2, output=tmp_path / "parts")
    with pytest.raises(UserError, match=r"resume=True.*overwrite=True"):
        trained(tmp_path, parts, epochs=4, output=tmp_path / "parts")
    trained(tmp_path, parts, epochs=4, output=tmp_path / "parts", resume=True)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_that_is_made_is_refused_with_the_line(tmp_path: Path) -> None:
    net = network()
    with pytest.raises(UserError, match=r"optimizer=lambda parameters: AdamW\(parameters, lr=0.0003\)"):
        trained(tmp_path, net, optimizer=torch.optim.AdamW(net.parameters(), lr=3e-4))
    with pytest.raises(UserError, match="other parameters than those it is called with"):
        trained(tmp_path, net, optimizer=lambda _: torch.optim.AdamW(net.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    with pytest.raises(UserError, match=r"function of \(updates, total_updates\)"):
        trained(tmp_path, net, schedule=schedule)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["adamw", {"name": "adamw", "lr": 1e-3}, torch.optim.AdamW])
def test_an_optimizer_may_be_a_name_a_mapping_or_a_class(tmp_path: Path, optimizer: Any) -> None:
    net = network()
    trained(tmp_path, net, optimizer=optimizer)
    expected = network()
    trained(
        tmp_path,
        expected,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0),
        output=tmp_path / "b",
    )
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_missing_or_cannot_work_is_reported_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        drivetrain.train(model=network(), batch_size=8)
    assert {each.field for each in caught.value.problems} == {"train_data", "loss"}
    with pytest.raises(UserError) as caught:
        drivetrain.train(model=network(), data=DATA, batchsize=8, devise="cpu", lr=-1.0)
    fixes = {each.field: each.fix for each in caught.value.problems}
    assert fixes.keys() >= {"train_data", "loss", "data", "batchsize", "devise", "optimizer.lr"}, "all at once"
    assert fixes["data"] == "did you mean train_data?"
    assert fixes["batchsize"] == "did you mean batch_size?"
    assert fixes["devise"] == "did you mean device?"
    with pytest.raises(UserError, match=r"no pair, says the data") as caught:
        trained(tmp_path, network(), train_data=Broken())
    assert "test_training.py" in str(caught.value)
    assert not (tmp_path / "run").exists()


class Broken:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise ValueError("no pair, says the data")


def test_an_exception_of_the_users_in_the_middle_is_a_run_error_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the data ends here") as caught:
        trained(tmp_path, network(), train_data=Ending(), epochs=9, loader={"workers": 0})
    assert isinstance(caught.value.__cause__, LookupError)


class Ending:
    """Its samples can be had only so often."""

    def __init__(self) -> None:
        self.left = 300

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise LookupError("the data ends here")
        return X[index], Y[index]


class Interrupting(Tracker):
    def __init__(self, folder: Path) -> None:
        del folder

    def handle(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None:
        pass


def test_ctrl_c_saves_and_raises_and_the_model_has_the_weights(tmp_path: Path) -> None:
    net, before = network(), network()
    own = {"log_every": 1}
    with pytest.raises(KeyboardInterrupt, match=r"saved at step 4 .*resume=True"):
        trained(tmp_path, net, tracking=own, trackers=[Interrupting])
    assert not torch.equal(net[0].weight, before[0].weight)  # type: ignore[index]
    report = trained(tmp_path, net, tracking=own, resume=True)
    assert (report.status, report.steps) == ("completed", 8)


def test_a_run_file_and_objects_go_together(tmp_path: Path) -> None:
    settings = {"workload": {"type": "module", "path": "nowhere.py"}, "batch_size": 8, "loop": {"steps": 3}}
    report = drivetrain.train(
        settings, model=network, train_data=DATA, loss=LOSS, quiet=True, output=tmp_path / "run", lr=0.5
    )
    assert report.steps == 3


def test_the_command_line_says_that_objects_are_python_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drivetrain.cli import main

    trained(tmp_path, network())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run/run.yaml", "--resume"])
    assert ended.value.code == 2
    assert "resume=True" in capsys.readouterr().err


def test_a_plan_leaves_the_callers_model_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = network(), []

    def planned(base: Any, asked: Any) -> Any:
        seen.append(asked)
        traced = Traced(this_machine(catalogue()))
        found = as_it_stands(rules.judged(base, [], traced.host)[0], traced)
        assert found.costs is not None, found.reason
        known = StepTime(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "compute")  # a machine may not be calibrated
        found = replace(found, timing=found.timing or known)
        return Plan("this machine", 1, (found,), found)

    monkeypatch.setattr(auto_choice, "planned", planned)
    report = trained(tmp_path, net, batch_size=64, epochs=5, engine="auto", optimizer={"name": "sgd", "lr": 0.5})
    assert seen == [["engine"]]
    assert report.engine == "single"
    expected = network()
    trained(tmp_path, expected, batch_size=64, epochs=5, optimizer={"name": "sgd", "lr": 0.5}, overwrite=True)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], weight, rtol=0, atol=0)


def test_class_numbers_with_a_fractions_dtype_are_refused_by_their_dtype(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"(?s)train_data gives targets of torch\.float32.*as torch\.int64.*target\.long"
    ) as e:
        trained(tmp_path, network(), train_data=TensorDataset(X, Y.float()))
    assert "IndexError" not in str(e.value)
