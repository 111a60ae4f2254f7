"""Reads a Python file of the user's: imports it, checks its names, calls its functions, and reports errors with its
lines."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.errors import Problem, UserError, problem
from drivetrain.memory.shortage import is_shortage

FIELD = "workload.path"
KNOWN = (
    "build_model", "model", "train_data", "evaluation_data", "loss", "loss_sum", "count", "collate", "metrics",
    "predict", "splits_batches", "tensor_parallel", "loss_terms", "counts", "term_weights", "statistics", "auxiliary",
)  # fmt: skip
ONE_OF = (  # two names for one thing
    *(("model", "build_model"), ("loss", "loss_sum"), ("loss", "loss_terms")),
    *(("loss_sum", "loss_terms"), ("count", "counts")),
)
TAKE_OPTIONS = ("build_model", "model", "train_data", "evaluation_data")

# Names that scripts give to what has another name here.
SYNONYMS = {
    "model": {"net", "network"},
    "loss": {"criterion", "loss_fn", "loss_function", "loss_func"},
    "train_data": {"train_dataset", "train_set", "trainset", "training_data", "dataset"},
    "evaluation_data": {
        *("eval_data", "val_data", "valid_data", "validation_data", "test_data"),
        *("eval_dataset", "val_dataset", "validation_dataset", "test_dataset", "val_set", "test_set", "testset"),
    },
    "collate": {"collate_fn"},
}
DECIDED_BY_THE_RUN_FILE = {
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "batch_size": "batch_size",
    "epochs": "loop.epochs",
    "num_epochs": "loop.epochs",
}


class UserFile:
    """The definitions of the file. Raises UserError if it cannot be read, lacks a name, or takes no such option."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path, self._options = path, options
        self.text = path.read_bytes() if path.is_file() else b""  # of what is trained, whatever becomes of the file
        with self.telling("it failed while it was read"):
            self._module = imported(path)
        self._check()

    def _check(self) -> None:
        """Raises UserError for names that are missing or defined twice, and for options that no function takes."""
        problems = [*self._missing(), *self._given_twice()] or [*self._bad_options()]
        if problems:
            raise UserError(problems)

    def has(self, name: str) -> bool:
        return hasattr(self._module, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._module, name, default)

    def made(self, name: str) -> Any:
        """Returns the object called `name`; or the result of the function or class of that name, with the options it
        accepts."""
        given = self.get(name)
        if not _makes(given):
            return given
        parameters = _parameters(given)
        options = {key: value for key, value in self._options.items() if _accepts(parameters, key)}
        with self.telling(f"{name}() failed"):
            return given(**options)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """While the block runs, turns any error into a UserError with the last line of the user's file that led to
        it."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a script may call sys.exit or parse arguments
            if is_shortage(error):
                raise
            where = self._line(error)
            reason = f"{type(error).__name__}: {error}".strip().removesuffix(":")
            raise problem(FIELD, f"{self.path}: {what}{where}: {reason}", "correct the file") from error

    def _line(self, error: BaseException) -> str:
        return _line(self.path, error)

    def misnamed(self) -> list[str]:
        """Returns definitions of the file that nothing reads, though they look as if they should be read."""
        remarks = []
        for name in self._own_names():
            meant = _meant(name)
            if name in DECIDED_BY_THE_RUN_FILE:
                remarks.append(f"{name} is not read: {DECIDED_BY_THE_RUN_FILE[name]} of the run file decides")
            elif meant is not None and not self.has(meant) and not any(map(self.has, _instead(meant))):
                remarks.append(f"{name} is not read; did you mean {meant}?")
        return [f"{self.path.name}: {what}" for what in remarks]

    def _own_names(self) -> list[str]:
        """Returns public names of the file's own, without imported ones."""
        own = []
        for name, value in vars(self._module).items():
            module = getattr(value, "__module__", None) if inspect.isroutine(value) or inspect.isclass(value) else None
            if not name.startswith("_") and not inspect.ismodule(value) and module in (None, self._module.__name__):
                own.append(name)
        return sorted(own)

    def _missing(self) -> Iterator[Problem]:
        needed = {
            "model (or build_model)": self.has("model") or self.has("build_model"),
            "train_data": self.has("train_data"),
            "loss (or loss_sum and count)": self.has("loss")
            or (self.has("loss_sum") and self.has("count"))
            or (self.has("loss_terms") and self.has("counts")),
        }
        own = [name for name in self._own_names() if name not in KNOWN]
        for name, found in needed.items():
            if not found:
                near = [other for other in own if _meant(other) == name.split()[0]]
                known = f"found: {', '.join(self._own_names()) or 'nothing'}"
                fix = f"rename {near[0]} to {name.split()[0]}" if near else f"define it; {known}"
                yield Problem(FIELD, f"{self.path} defines no {name}", fix)

    def _given_twice(self) -> Iterator[Problem]:
        for one, other in ONE_OF:
            if self.has(one) and self.has(other):
                yield Problem(FIELD, f"{self.path} defines both {one} and {other}", "keep one of them")
        beside = [name for name in ("statistics", "auxiliary", "term_weights") if self.has(name)]
        if self.has("loss") and beside:
            why = f"{self.path} defines {beside[0]}, which loss(output, target) does not see"
            yield Problem(FIELD, why, "define loss_sum(model, batch) and count(batch), or loss_terms and counts")

    def _bad_options(self) -> Iterator[Problem]:
        functions = {name: _parameters(self.get(name)) for name in TAKE_OPTIONS if _makes(self.get(name))}
        for key in self._options:
            if not any(_accepts(parameters, key) for parameters in functions.values()):
                taken = sorted({name for parameters in functions.values() for name in parameters})
                near = difflib.get_close_matches(key, taken, n=1)
                fix = f"did you mean {near[0]}?" if near else f"they take: {', '.join(taken) or 'no options'}"
                yield Problem(f"workload.options.{key}", f"no function of {self.path.name} accepts it", fix)
        for name, parameters in functions.items():
            for key, parameter in parameters.items():
                variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                if parameter.default is parameter.empty and not variadic and key not in self._options:
                    fix = f"add options: {{{key}: ...}} to the workload, or give it a default"
                    yield Problem(f"workload.options.{key}", f"{self.path.name}: {name}() requires it", fix)


def _instead(name: str) -> list[str]:
    """Returns the other names for the same thing."""
    return [other for pair in ONE_OF if pair[0] == name for other in pair[1:]]


def _meant(name: str) -> str | None:
    """Returns the name that `name` probably stands for, if it is not that name itself."""
    if name in KNOWN:
        return None
    by_synonym = next((known for known, others in SYNONYMS.items() if name in others), None)
    return by_synonym or next(iter(difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)), None)


def _makes(given: Any) -> bool:
    return inspect.isroutine(given) or inspect.isclass(given) or isinstance(given, functools.partial)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepts(parameters: Mapping[str, inspect.Parameter], key: str) -> bool:
    return key in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


class _AlwaysCompiled(SourceFileLoader):
    """Compiles a file at each import. Python takes kept bytecode for current if the file's size and the second of its
    last change are as before, so that a digit edited within that second would train the earlier version."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"no bytecode of {path} is kept")  # Python then compiles, and writes none


def imported(path: Path) -> ModuleType:
    """Runs a user's Python file, and returns its module. Raises whatever the file raises."""
    specification = importlib.util.spec_from_file_location(f"drivetrain_user_{path.stem}", path)
    if specification is None or specification.loader is None:
        raise problem(FIELD, f"{path} is no Python file", "give a file that ends in .py")
    if isinstance(specification.loader, SourceFileLoader):
        specification.loader = _AlwaysCompiled(specification.name, str(path))
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # loader workers find its classes by name
    folder = str(path.parent.resolve())
    if folder not in sys.path:  # as when the file is run: what lies beside it can be imported, also later
        sys.path.insert(0, folder)
    linecache.checkcache(str(path))
    specification.loader.exec_module(module)
    return module


def _line(path: Path, error: BaseException) -> str:
    """Returns " at line 7 (x = foo())", or nothing if the file had no part in it."""
    here = path.resolve()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == here]
    number = error.lineno if isinstance(error, SyntaxError) else (frames[-1].lineno if frames else None)
    if number is None:
        return ""
    source = linecache.getline(str(path), number).strip()
    return f" at line {number}" + (f" ({source})" if source else "")
