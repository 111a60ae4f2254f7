"""The questions that lead to a way to run, with a run's numbers in each: FairScale's chart for choosing, answered.

Each question asks whether a device has room once more of the model is shared (the optimizer's state, gradients,
parameters), then once less is kept or done by a device (recompute, divided layers). The first yes says what is needed;
what is quickest among the ways that fit is the search's answer, and the last box compares the two. Figures are those of
rows with the smallest micro-batch where the search looked at such a way, else sums from one process's trace ("about").
Each row has the room of its own ranks, since those on a CPU share its memory. Ways that keep state on a host or a disk
belong to no question.

Source of the order: FairScale's documentation, "Efficient memory management: what to use when" (Baines et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from drivetrain.plan.rows import ALIKE, Plan, Row, gib

Answer = Literal["yes", "no"]


@dataclass(frozen=True)
class Question:
    key: str
    text: str
    leaf: str  # what a yes leads to


@dataclass(frozen=True)
class Box:
    """A question of the chart. answer: None where the path does not come by, or it was not examined."""

    question: Question
    figures: str = ""
    answer: Answer | None = None


QUESTIONS = (
    Question("one", "Does a step fit one device?", "engine=single; ddp for speed"),
    Question("optimizer", "Does it fit if devices share the optimizer's state?", "zero1, or ddp with shard_optimizer"),
    Question("gradients", "And if they share the gradients?", "zero2"),
    Question("parameters", "And the parameters, gathered one layer at a time?", "fsdp or zero3"),
    Question("sequence", "Does one sample fit if activations are computed again?", "the same with recompute=true"),
    Question("layer", "Does a layer fit if neighbours divide it?", "mesh with tp and pp"),
)
NOTHING_FITS = "more devices, 16 bits, an adapter"
NOTHING_KNOWN = "not known: nothing that was asked could be planned"
LINKS = Question("links", "Do the links keep up with the devices?", "the largest micro-batch that fits")
# the table has the tensors alone, of all that a device has, and each row's own micro-batch
FIGURES = (
    "bytes are tensors as the allocator reserves them, with the smallest micro-batch that was planned, of what a "
    "margin and the rest leave for them"
)
SLOW_LINKS = "fewer messages: larger steps, shards within a machine (hybrid), stages between machines"


@dataclass(frozen=True)
class Path:
    """boxes: the whole chart, those that were asked with their answers. leaf: where the first yes led; empty where
    there was none and a way fits that belongs to no question. links: the last question; None where nothing is sent.
    outcome: the choice and its figures."""

    boxes: tuple[Box, ...]
    leaf: str
    links: Box | None
    outcome: str

    def lines(self) -> list[str]:
        """Returns the path as lines of text, from the first question to the choice."""
        asked = [box for box in (*self.boxes, *([self.links] if self.links else [])) if box.answer is not None]
        width = max((len(box.question.text) for box in asked), default=0)
        found = [f"{box.question.text:<{width}}  {box.answer:<3}  {box.figures}" for box in asked]
        return [*found, *(f"-> {end}" for end in (self.leaf, self.outcome) if end)]


def general_chart() -> Path:
    """Returns the chart without a run."""
    return Path(tuple(Box(each) for each in QUESTIONS), "", Box(LINKS), "")


def path_of(plan: Plan) -> Path:
    """Returns the questions answered for a plan."""
    boxes: list[Box] = []
    leaf = _without_yes(plan)
    is_open = True
    for question in QUESTIONS:
        box = _answered(plan, question) if is_open else Box(question)
        boxes.append(box)
        if box.answer == "yes":
            is_open, leaf = False, question.leaf
    return Path(tuple(boxes), leaf, _links(plan), _outcome(plan))


def _without_yes(plan: Plan) -> str:
    """Returns where the path leads if no question has a yes."""
    if any(row.fits == "yes" and not row.is_emulated for row in plan.rows):
        return ""
    return NOTHING_FITS if _is_known(plan) else NOTHING_KNOWN


def _is_known(plan: Plan) -> bool:
    """Returns whether the memory of any way is known: of one process's step, or of a row."""
    return plan.base is not None or any(row.costs is not None for row in plan.rows)


def _answered(plan: Plan, question: Question) -> Box:
    """Returns the question with the bytes of a device's tensors, and the room that they have: of the row that has most
    to spare, or else about."""
    rows = [(row.costs.memory.reserved, row.room) for row in plan.rows if row.costs and TESTS[question.key](row)]
    if rows:
        needed, room = max(rows, key=lambda row: row[1] - row[0])
        return _box(question, needed, room, "")
    about = _about(plan, question.key)
    return Box(question) if about is None else _box(question, about, plan.room, "about ")


def _box(question: Question, needed: float, room: float, words: str) -> Box:
    return Box(question, f"{words}{gib(needed)} of {gib(room)}", "yes" if needed <= room else "no")


def _about(plan: Plan, key: str) -> float | None:
    """Returns the sum of what is held, from one process's trace; None for questions that only a trace answers."""
    if plan.base is None or key in ("sequence", "layer"):
        return None
    if key != "one" and plan.devices == 1:
        return None
    memory = plan.base.memory
    state = {name: memory.parts.get(name, 0) for name in ("parameters", "gradients", "optimizer")}
    shared = {"one": (), "optimizer": ("optimizer",), "gradients": ("optimizer", "gradients")}.get(key, tuple(state))
    beside = memory.reserved - sum(state.values())
    return beside + sum(size / plan.devices if name in shared else size for name, size in state.items())


def _plain(row: Row) -> bool:
    engine = row.run.engine
    return not (row.run.recompute or row.run.offload_activations or engine.axes or engine.keeps_elsewhere)


def _shares(row: Row) -> tuple[bool, bool, bool]:
    """Returns whether devices share optimizer state, gradients and parameters."""
    shares = row.run.engine.shares(row.run.devices)
    return shares.optimizer < 1, shares.gradients < 1, shares.parameters < 1


TESTS: dict[str, Callable[[Row], bool]] = {
    "one": lambda row: _plain(row) and _shares(row) == (False, False, False),  # ddp's devices hold what one holds
    "optimizer": lambda row: _plain(row) and _shares(row) == (True, False, False),
    "gradients": lambda row: _plain(row) and _shares(row) == (True, True, False),
    "parameters": lambda row: _plain(row) and _shares(row) == (True, True, True),
    "sequence": lambda row: (
        not (row.run.engine.axes or row.run.engine.keeps_elsewhere)
        and bool(row.run.recompute or row.run.offload_activations)
    ),
    "layer": lambda row: bool(row.run.engine.axes),
}


def _links(plan: Plan) -> Box | None:
    choice = plan.choice
    if choice is None or choice.costs is None or not choice.costs.messages or choice.timing is None:
        return None
    sent: dict[str, float] = {}
    for each in choice.costs.messages:
        sent[each.axis] = sent.get(each.axis, 0.0) + each.bytes
    axes = ", ".join(f"{gib(size)} along {axis}" for axis, size in sent.items())
    bound = choice.timing.bound_by
    figures = f"a step of {choice.seconds:.3g} s sends {axes}; {bound} bounds it"
    return Box(LINKS, figures, "no" if bound == "network" else "yes")


def _outcome(plan: Plan) -> str:
    choice = plan.choice
    if choice is None:
        return _without_choice(plan)
    others = _next_engine(plan.rows, choice)
    beside = (
        ""
        if others is None
        else f"; {_beside(choice, others)} {' '.join(others.overrides)} with {others.seconds:.3g} s"
    )
    return f"{' '.join(choice.overrides)}: {choice.seconds:.3g} s a step, the quickest that fits{beside}"


def _without_choice(plan: Plan) -> str:
    if not _is_known(plan):
        return "the reasons stand beside each way"
    fitting = dict.fromkeys(row.run.engine.label for row in plan.rows if row.fits == "yes" and not row.is_emulated)
    if not fitting:
        return "no way of those asked fits"
    return f"{', '.join(fitting)}: fits; the time of a step is not known" + (
        ", and so the quickest way is not" if len(fitting) > 1 else ""
    )


def _beside(choice: Row, other: Row) -> str:
    alike = (other.seconds or 0.0) <= (choice.seconds or 0.0) * (1 + ALIKE)
    return "as quick and less simple:" if alike else "next"


def _next_engine(rows: Sequence[Row], choice: Row) -> Row | None:
    others = (row for row in rows if row.fits == "yes" and row.seconds is not None)
    return next((row for row in others if row.run.engine != choice.run.engine), None)
