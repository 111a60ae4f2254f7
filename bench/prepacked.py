"""Products with prepacked weights beside those with weights as they lie: one step of a Llama, by its number of rows.

    python bench/prepacked.py

All linear layers of the model of bench/generation.py run one after another, as a step has them, so that each finds its
weights in memory and not in a cache. Both ways run in turns; the ratio is the median of the pairs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from generation import made_model
from interleaved import BENCH
from tables import machine_line, markdown_table, write
from torch import nn

from drivetrain.generation.prepacked_weights import prepacked

ROWS, PAIRS = (1, 2, 4, 8, 16, 32, 64, 256), 15


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="prepacked-") as folder:
        for dtype in (torch.float32, torch.bfloat16):
            model = made_model(Path(folder)).to(dtype)
            layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
            for count in ROWS:
                # one for all layers of a width, as those that follow each other in a block share theirs
                inputs = {each.in_features: torch.randn(count, each.in_features, dtype=dtype) for each in layers}
                given = {each: inputs[each.in_features] for each in layers}
                pairs = [_pair(model, given) for _ in range(PAIRS + 1)][1:]  # the first warms up
                plain, packed = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
                ratio = statistics.median(one / other for one, other in pairs)
                name = str(dtype).removeprefix("torch.")
                rows.append([name, str(count), f"{1e3 * plain:.1f} ms", f"{1e3 * packed:.1f} ms", f"**{ratio:.2f}**"])
    title = "# Products of a step with prepacked weights\n\n"
    text = f"`python bench/prepacked.py` repeats it. {machine_line()}\n\n"
    table = markdown_table(["type", "rows", "weights as they lie", "prepacked", "ratio"], rows)
    write(BENCH / "results" / "prepacked.md", title + text + table + "\n")


def _pair(model: nn.Module, given: dict[nn.Linear, torch.Tensor]) -> tuple[float, float]:
    """Returns the seconds of a step without and with prepacked weights."""
    plain = _seconds(given)
    with prepacked(model):
        assert all("forward" in vars(layer) for layer in given)
        _seconds(given)
        return plain, _seconds(given)


@torch.inference_mode()
def _seconds(given: dict[nn.Linear, torch.Tensor]) -> float:
    start = time.perf_counter()
    for layer, tensor in given.items():
        layer(tensor)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
