"""Carries objects to the processes of ranks: pickled into a folder, with their numbers beside them.

Ranks are processes of their own that never import the caller's script, so that one without `if __name__ == "__main__"`
works. What that script or notebook defines (classes, functions, lambdas) is pickled by value, which cloudpickle does
and plain pickle does not; what lies in modules is imported there, along the same sys.path.

Numbers of tensors and arrays are not in the pickle but in a file that every rank maps (pickle protocol 5, PEP 574): the
data set is in memory once, whatever the number of ranks. A page that a rank writes to becomes its own.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from drivetrain.errors import Problem, UserError, last_line, problem

OBJECTS, NUMBERS = "objects.pickle", "objects.numbers"
ALIGNMENT = 64  # bytes: a number lies where a processor reads it at once
MOST_DEPTH = 3  # attributes of attributes among which the part is looked for that cannot be pickled
FIX = (
    "make it where it is used (in __getitem__, or at the first call), or give a function that makes the object: "
    "train_data=make_data"
)


def write(objects: Mapping[str, Any], folder: Path) -> None:
    """Writes the objects into the folder. Raises UserError with every object that cannot be pickled, and OSError."""
    with (folder / OBJECTS).open("wb") as file, (folder / NUMBERS).open("wb") as numbers:
        places: list[tuple[int, int]] = []

        def aside(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            numbers.write(bytes(-numbers.tell() % ALIGNMENT))
            places.append((numbers.tell(), raw.nbytes))
            numbers.write(raw)
            return False

        body = io.BytesIO()
        try:
            _Pickler(body, aside).dump(dict(objects))
        except OSError:
            raise
        except Exception as error:  # whatever an object's own __reduce__ raises
            raise _unpicklable(objects, error) from error
        pickle.dump((sys.path, places), file)
        file.write(body.getbuffer())


def read(folder: Path) -> dict[str, Any]:
    """Returns the objects that `write` left there. Raises UserError for one that this process cannot make again."""
    with (folder / OBJECTS).open("rb") as file, (folder / NUMBERS).open("rb") as numbers:
        paths, places = pickle.load(file)
        sys.path += [path for path in paths if path not in sys.path]
        mapped = mmap.mmap(numbers.fileno(), 0, access=mmap.ACCESS_COPY) if any(size for _, size in places) else b""
        view = memoryview(mapped)
        try:
            found: dict[str, Any] = pickle.load(file, buffers=[view[start : start + size] for start, size in places])
        except Exception as error:  # whatever an import or a __setstate__ raises
            why = f"the objects cannot be made again in the process of a rank: {last_line(error)}"
            fix = "put the class into a module that can be imported from there, or into the script or notebook itself"
            raise problem("arguments", why, fix) from error
    return found


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: Any, aside: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=aside)

    def reducer_override(self, given: Any) -> Any:
        """Plain tensors travel as numbers on the CPU, so that no rank touches the GPU of the caller."""
        if type(given) in (Tensor, nn.Parameter) and given.layout is torch.strided and not given.is_quantized:
            flat = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            is_parameter = type(given) is nn.Parameter
            return _tensor, (flat, given.dtype, given.shape, given.requires_grad and given.is_leaf, is_parameter)
        return super().reducer_override(given)


def _tensor(
    flat: np.ndarray, dtype: torch.dtype, shape: torch.Size, requires_grad: bool, is_parameter: bool
) -> Tensor | nn.Parameter:
    made = torch.from_numpy(flat).view(dtype).reshape(shape)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _unpicklable(objects: Mapping[str, Any], error: Exception) -> UserError:
    problems = []
    for name, each in objects.items():
        why = _refusal(each)
        if why is not None:
            where = _within(each, name, MOST_DEPTH)
            part = "" if where == name else f" ({where})"
            why_not = f"it cannot be sent to the processes of the ranks: {why}{part}"
            problems.append(Problem(name, why_not, FIX))
    why_not = f"they cannot be sent to the processes of the ranks: {last_line(error)}"
    return UserError(problems or [Problem("arguments", why_not, FIX)])


def _refusal(given: Any) -> str | None:
    """Returns why an object cannot be pickled, or None."""
    try:
        _Pickler(io.BytesIO(), lambda _: False).dump(given)
    except Exception as error:
        return last_line(error)
    return None


def _within(given: Any, name: str, depth: int) -> str:
    """Returns the name of the innermost attribute or item that cannot be pickled."""
    for label, part in _parts(given, name) if depth else ():
        if _refusal(part) is not None:
            return _within(part, label, depth - 1)
    return name


def _parts(given: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(given, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in given.items())
    elif isinstance(given, list | tuple):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(given[:100]))
    elif hasattr(given, "__dict__"):
        yield from ((f"{name}.{key}", part) for key, part in vars(given).items())
