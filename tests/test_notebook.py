"""A notebook that trains what it defines itself, plots the curve, loads and predicts, run as Jupyter runs it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'drivetrain[dev]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'drivetrain[dev]'")

CELLS = [
    """
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain

%matplotlib inline
x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
y = (x[:, :3].sum(1) > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.layers(inputs)


net = Net()
""",
    """
report = drivetrain.train(
    model=net, train_data=TensorDataset(x[:800], y[:800]), evaluation_data=TensorDataset(x[800:], y[800:]),
    loss=nn.CrossEntropyLoss(), engine="ddp", processes=2, batch_size=32, epochs=4,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), log_every=2,
)
report
""",
    """
curve, evaluations = report.curve(), report.evaluations()
plt.figure(figsize=(6, 3))
plt.plot(curve["step"], curve["loss"], label="training")
plt.plot(evaluations["step"], evaluations["loss"], "o-", label="evaluation")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend();
""",
    """
best = drivetrain.load(report, model=Net())
rows = list(drivetrain.predict(best, TensorDataset(x[800:], y[800:]), loss=nn.CrossEntropyLoss()))
print("right", sum(row["prediction"] == target for row, target in zip(rows, y[800:].tolist())))
""",
    """
second = drivetrain.train(
    model=Net(), train_data=TensorDataset(x, y), loss=nn.CrossEntropyLoss(), batch_size=64, output="runs/second",
)
""",
    """
try:
    drivetrain.train(model=net, train_data=TensorDataset(x, y), loss=nn.CrossEntropyLoss(), batch_size=0)
except drivetrain.UserError as error:
    print("refused", error.problems[0].field)
""",
]


@pytest.mark.slow
def test_a_notebook_trains_plots_loads_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    nbclient.NotebookClient(
        book, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
        for cell in book.cells
    ]
    assert "evaluation  loss" in printed[1], book.cells[1].outputs  # of the first rank, as it came
    tables = [output["data"].get("text/html", "") for output in book.cells[1].outputs if "data" in output]
    assert any("<table>" in table and "ddp on 2 ranks" in table for table in tables)
    pictures = [
        output["data"]["image/png"] for output in book.cells[2].outputs if "image/png" in output.get("data", {})
    ]
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    (tmp_path / "curve.png").write_bytes(base64.b64decode(pictures[0]))
    assert int(printed[3].split()[-1]) > 180
    shown = str(book.cells[4].outputs)
    assert "evaluation" in shown or "step" in shown
    assert printed[5].strip() == "refused batch_size"
