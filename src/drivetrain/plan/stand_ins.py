"""A run file with made data, for a plan of a run whose data are not there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from drivetrain.config.files import read_yaml
from drivetrain.config.load import load
from drivetrain.errors import UserError, problem
from drivetrain.plan.samples import repeated

MOST_TOKENS, FEWEST = 2**18, 8  # tokens to make, or so many samples where these have more


@contextmanager
def with_made_data(run_file: Path, samples: int | None, length: int | None) -> Iterator[Path]:
    """Yields a run file whose data are `samples` made ones of `length` tokens; the same file where neither is given.

    Raises UserError for one without the other, and for a workload whose data cannot be made.
    """
    if samples is None and length is None:
        yield run_file
        return
    if samples is None or length is None:
        missing = "--samples" if samples is None else "--length"
        raise problem(missing, "is needed too: both stand for data that are not there", "give both")
    run, problems = load(run_file)
    if run is None:
        raise UserError(problems)
    if not run.workload.MADE_DATA:
        why = f"stands for the data of texts and language models, and this run's workload is {run.workload.type}"
        raise problem("--samples", why, "put the data where the run file says, and leave --samples and --length out")
    module, _, function = run.workload.MADE_DATA.partition(":")
    with tempfile.TemporaryDirectory(prefix="made-data-") as folder:
        raw = read_yaml(run_file)
        times = _times(samples, length) if run.workload.MADE_DATA_REPEAT else 1
        made = getattr(import_module(module), function)(run.workload, Path(folder), samples // times, length)
        raw["workload"] = {**raw["workload"], "data": made}
        file = Path(folder) / run_file.name
        file.write_text(json.dumps(raw))
        with repeated(times):
            yield file


def _times(samples: int, length: int) -> int:
    """Returns how often to repeat fewer samples, so that they are exactly as many and not more than MOST_TOKENS are
    tokenised; 1 where the number of samples has no such divisor."""
    return next((times for times in range(1, samples + 1) if _divides(times, samples, length)), 1)


def _divides(times: int, samples: int, length: int) -> bool:
    return samples % times == 0 and samples // times * length <= max(MOST_TOKENS, FEWEST * length)
