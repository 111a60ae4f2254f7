"""Adapters: small parts that are trained beside a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from drivetrain.config.base import Frozen, doc
from drivetrain.config.files import read_json
from drivetrain.config.location import Source, store_address
from drivetrain.config.models_of_runs import LINKS, OF_ADAPTER, checkpoint_of_run
from drivetrain.errors import Problem, UserError

Method = Literal["lora", "oft", "ia3", "prompt", "prefix", "p-tuning"]
PROMPTS = ("prompt", "prefix", "p-tuning")  # virtual tokens before each sample; nothing within the model changes
OF_METHOD: dict[str, tuple[str, ...]] = {
    "rank": ("lora",),
    "alpha": ("lora",),
    "dropout": ("lora", "oft", "p-tuning"),
    "block_size": ("oft",),
    "rslora": ("lora",),
    "dora": ("lora",),
    "pissa": ("lora",),
    "lr_ratio": ("lora",),
    "targets": ("lora", "oft", "ia3"),
    "feedforward": ("ia3",),
    "virtual_tokens": PROMPTS,
    "hidden_size": ("prefix", "p-tuning"),
}
OF_THE_FUNCTION = OF_METHOD.keys() - {"dropout", "lr_ratio"}  # what the adapted model computes follows from these
FREE_WITH_PATH = {"path", "name", "trained", "lr_ratio"}  # all else the saved adapter says


Ending = Annotated[str, Field(min_length=1)]


def _several(given: Any) -> Any:
    return [given] if isinstance(given, str) and given != "all-linear" else given


class Adapter(Frozen):
    method: Method = doc("lora, oft, ia3, prompt, prefix or p-tuning", "lora")
    path: Source | None = doc(
        "A saved adapter to go on with: PEFT's folder, a run's (its best checkpoint) or a checkpoint's", None
    )
    trained: bool = doc("False: the adapter at path stays as it is, below the others", True)
    name: str = doc("Name that distinguishes several adapters", "default", pattern=r"^[A-Za-z0-9_-]+$")
    targets: Annotated[Literal["all-linear"] | list[Ending], BeforeValidator(_several)] | None = doc(
        "Modules that get one, by the end of their names; left out, lora and oft: all linear layers but the head; ia3: "
        "PEFT's choice for the architecture",
        None,
        min_length=1,
    )
    rank: int = doc("lora: rank", 8, gt=0)
    alpha: float | None = doc("lora: the update is scaled by alpha / rank; left out, twice the rank", None, gt=0)
    dropout: float = doc("lora, p-tuning: dropout; oft: share of blocks that do not turn", 0.0, ge=0, lt=1)
    block_size: int = doc("oft: inputs that are turned together, a divisor of every target's inputs", 32, gt=1)
    rslora: bool = doc("lora: scaled by alpha / sqrt(rank) (rank-stabilised)", False)
    dora: bool = doc("lora: learn the length of each output's weights separately (DoRA)", False)
    pissa: bool = doc("lora: start from the largest singular vectors of the weights (PiSSA)", False)
    lr_ratio: float | None = doc("lora: learning rate of B over that of A (LoRA+); 16 is usual", None, gt=0)
    feedforward: list[str] = doc("ia3: those of the targets that are scaled at their inputs", [])
    virtual_tokens: int = doc("prompt, prefix, p-tuning: trained tokens before each sample", 20, gt=0)
    hidden_size: int | None = doc("prefix, p-tuning: width of the encoder that makes them; prefix: none", None, gt=0)
    train_also: list[str] | None = doc(
        "Modules trained whole, by the end of their names; left out, a classifier's head", None
    )

    @property
    def saved_as_dora(self) -> bool:
        """Returns whether the adapter at the path is a DoRA. False for an unreadable file, which is reported when it is
        loaded."""
        try:
            described = read_json(self.path.expanduser() / OF_ADAPTER) if self.path else {}
        except UserError:
            return False
        return bool(described.get("use_dora"))

    @property
    def function(self) -> dict[str, Any] | None:
        """Returns the fields that decide what the adapted model computes for the same weights; None if a file
        decides."""
        if self.path is not None:
            return None
        own = {key: getattr(self, key) for key in sorted(OF_THE_FUNCTION) if self.method in OF_METHOD[key]}
        if self.method == "lora" and self.alpha is None:
            own["alpha"] = 2.0 * self.rank
        return {"method": self.method, **own}


def _listed(given: Any) -> Any:
    """Returns a list for a method's name, a block, or a list of either."""
    if given is None:
        return None
    listed = given if isinstance(given, list | tuple) else [given]
    return tuple({"method": each} if isinstance(each, str) else each for each in listed)


Adapters = Annotated[tuple[Adapter, ...], BeforeValidator(_listed), Field(min_length=1)]


def adapters_of_runs(adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Returns the adapters with the folder of a checkpoint in place of each run's folder (models_of_runs.py)."""

    def found(path: Path) -> Path:
        return Path(checkpoint_of_run(str(path), [OF_ADAPTER]))

    return tuple(each.model_copy(update={"path": found(each.path)}) if each.path else each for each in adapters)


def adapter_problems(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    """Yields the contradictions within the block, without a look at any model."""
    names = [adapter.name for adapter in adapters]
    if len(set(names)) < len(names):
        yield Problem("adapter.name", "two adapters have the same name", "give each a name of its own")
    if len(adapters) > 1 and any(a.method in PROMPTS and a.path is None for a in adapters):
        why = f"{', '.join(sorted({a.method for a in adapters if a.method in PROMPTS}))} cannot stand beside others"
        yield Problem("adapter.method", why, "give it alone")
    if len({a.method for a in adapters if a.path is None}) > 1:
        yield Problem("adapter.method", "several adapters of different methods were given", "give one method")
    if not any(adapter.trained for adapter in adapters):
        yield Problem("adapter.trained", "no adapter is trained", "train one of them")
    if any(adapter.dora or adapter.saved_as_dora for adapter in adapters) and any(
        adapter.pissa for adapter in adapters
    ):
        why = "the weights that PiSSA takes its start from are no longer those that DoRA measures"
        yield Problem("adapter.pissa", why, "give one of dora and pissa")
    for adapter in adapters:
        yield from _contradictions(adapter)


def _contradictions(adapter: Adapter) -> Iterator[Problem]:
    # defaults say nothing: the run file that a run leaves in its folder has them all
    fields = type(adapter).model_fields
    given = {key for key in adapter.model_fields_set if getattr(adapter, key) != fields[key].default}
    if adapter.path is not None:
        for key in sorted(given - FREE_WITH_PATH):
            yield Problem(f"adapter.{key}", "the adapter at adapter.path has its own", "leave it out")
        if store_address(adapter.path) is None and not (adapter.path.expanduser() / OF_ADAPTER).is_file():
            yield _no_adapter(adapter.path)
        return
    if not adapter.trained:
        yield Problem("adapter.trained", "an adapter that was never trained would do nothing", "give adapter.path")
    for key in sorted(given & OF_METHOD.keys()):
        if adapter.method not in OF_METHOD[key]:
            why = f"it is of {' and '.join(OF_METHOD[key])}, and adapter.method is {adapter.method}"
            yield Problem(f"adapter.{key}", why, "leave it out")
    if adapter.method in PROMPTS and "train_also" in given:
        why = f"{adapter.method} trains virtual tokens and a classifier's head, and no module else"
        yield Problem("adapter.train_also", why, "leave it out")
    if adapter.method == "ia3" and adapter.feedforward and adapter.targets is None:
        why = "without adapter.targets ia3 takes PEFT's choice for the architecture, with its own feedforward"
        yield Problem("adapter.feedforward", why, "give adapter.targets too")


def _no_adapter(path: Path) -> Problem:
    folder = path.expanduser()
    why, fix = f"{path} holds no {OF_ADAPTER}", "give a folder that PEFT's save_pretrained wrote, or an adapter run's"
    if (folder / "run.yaml").is_file():
        checkpoint = next((name for name in LINKS if (folder / name).is_dir()), None)
        if checkpoint is None:
            why, fix = f"{path} is a run without a checkpoint", "let it train until it saves one, or give another"
        elif several := _adapters_in(folder / checkpoint):
            named = " or ".join(str(path / checkpoint / each) for each in several)
            why, fix = f"{path} is a run that trained {len(several)} adapters", f"give {named}"
        else:
            why = f"{path} is a run that trained no adapter"
            fix = "give it as workload.model.path, and leave adapter.path out"
    elif several := _adapters_in(folder):
        fix = f"it holds several: give {' or '.join(several)} in it"
    return Problem("adapter.path", why, fix)


def _adapters_in(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob(f"*/{OF_ADAPTER}"))


def rate_factors(adapters: Sequence[Adapter]) -> Callable[[str], float]:
    """Returns parameter name → factor of its learning rate (LoRA+: Hayou et al. 2024)."""
    ratios = {adapter.name: adapter.lr_ratio for adapter in adapters if adapter.lr_ratio is not None}

    def factor(name: str) -> float:
        parts = name.split(".")
        for kind in ("lora_B", "lora_embedding_B"):
            if kind in parts:
                after = parts[parts.index(kind) + 1 :]
                return ratios.get(after[0], 1.0) if after else 1.0
        return 1.0

    return factor
