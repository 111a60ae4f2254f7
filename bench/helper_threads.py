"""Steps of a model on one thread, while another one that has computed before keeps its helpers, or has ended them.

    python bench/helper_threads.py

A server loads its model on one thread and answers on another. Each of the two has helpers of its own from GNU's
OpenMP, which sends all of them to sleep between operations as soon as there are more than cores; `end_helpers`
(runtime/openmp.py) ends those of the first thread. Both ways take turns in one process, a new thread each time: steps
of batches of 1 to 64 rows, each by a token. Beside them the same steps on the first thread itself, with no others'
helpers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import VOCABULARY, made_model
from interleaved import BENCH
from tables import machine_line, markdown_table, write
from torch import Tensor

from drivetrain.generation.cache import windows_of
from drivetrain.generation.local_forward import LocalForward
from drivetrain.generation.row_stores import CachedRows
from drivetrain.generation.sampling import Choice
from drivetrain.runtime.openmp import end_helpers

ROWS, STEPS, PROMPT = (1, 8, 32, 64), 12, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "helper-threads.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="helpers-") as folder:
        model = made_model(Path(folder))
    rows = [row(model, number, options.rounds) for number in ROWS]
    titles = ["rows", "on the first thread, ms", "on another, ms", "the first one's helpers ended, ms", "gain"]
    about = "\n".join((__doc__ or "").splitlines()[4:]).strip()
    write(
        options.output,
        f"# Helpers of two threads\n\n{about}\n\n{machine_line()}\n\n"
        f"Medians of {options.rounds} rounds of {STEPS} steps; the gain with its range.\n\n"
        + markdown_table(titles, rows)
        + "\n",
    )


def row(model: Any, number: int, rounds: int) -> list[str]:
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        alone = seconds(model, number)
        kept = on_a_thread(lambda: seconds(model, number))
        end_helpers()
        found.append((alone, kept, on_a_thread(lambda: seconds(model, number))))
        print(number, *(f"{1000 * each:.1f} ms" for each in found[-1]), flush=True)
    gains = [kept / ended for _, kept, ended in found]
    times = [f"{1000 * statistics.median(each):.1f}" for each in zip(*found, strict=True)]
    return [str(number), *times, f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"]


def seconds(model: Any, number: int) -> float:
    """Returns the median time of a step of so many rows."""
    draw = np.random.default_rng(number)
    store = CachedRows(LocalForward(model), model, windows_of(model.config))
    choices = store.start([draw.integers(VOCABULARY, size=PROMPT).tolist() for _ in range(number)], likeliest)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        choices = store.next([each.token for each in choices], likeliest)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def likeliest(logits: Tensor) -> list[Choice]:
    return [Choice(int(token)) for token in logits.argmax(-1).tolist()]


def on_a_thread(work: Callable[[], float]) -> float:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
