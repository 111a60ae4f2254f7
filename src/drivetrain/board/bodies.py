"""The bodies of requests, for the checks and for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1 << 20)]
Key = Annotated[str, Field(min_length=8, max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Device = Annotated[str, Field(min_length=1, max_length=20)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Login(Body):
    token: Annotated[str, Field(max_length=1000)]


class Yaml(Body):
    yaml: Text


class Edit(Body):
    """set: values by dotted key; remove: dotted keys."""

    yaml: Text
    set: Annotated[dict[Annotated[str, Field(min_length=1, max_length=200)], Any], Field(max_length=1000)] = {}
    remove: Annotated[list[Name], Field(max_length=1000)] = []


class Import(Body):
    """files: texts of configurations that belong together, by name. without: keys to drop although something else is
    trained without them."""

    files: Annotated[dict[Name, Annotated[str, Field(max_length=1 << 18)]], Field(min_length=1, max_length=8)]
    without: Annotated[list[Name], Field(max_length=200)] = []


class Command(Body):
    yaml: Text
    recipe: Name | None = None


class Train(Body):
    """key: of the form, made anew with each: the same one twice is one run."""

    key: Key
    yaml: Text
    devices: Annotated[list[Device], Field(max_length=64)] | None = None


class Resume(Body):
    key: Key


Devices = Annotated[list[Device], Field(max_length=64)] | None
Path = Annotated[str, Field(min_length=1, max_length=4000)]


class Preview(Body):
    yaml: Text
    set: Literal["train", "evaluation"] = "train"
    rows: Annotated[int, Field(ge=1, le=100)] = 20
    offset: Annotated[int, Field(ge=0, le=10**9)] = 0


class Plan(Body):
    """axes: key=value,value, as `drivetrain plan` takes them."""

    yaml: Text
    axes: Annotated[list[Annotated[str, Field(pattern=r"^[a-z_.]+=", max_length=500)]], Field(max_length=20)] = []
    machine: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$", max_length=100)] | None = None


class Compare(Body):
    """axes: key=value,value, as `drivetrain compare` takes them. seeds: runs of each cell."""

    key: Key
    yaml: Text
    axes: Annotated[list[Annotated[str, Field(pattern=r"^[a-z_.]+=", max_length=500)]], Field(max_length=20)]
    seeds: Annotated[int, Field(ge=1, le=20)] = 1
    devices: Devices = None


class Evaluate(Body):
    key: Key
    checkpoint: Name = "best"
    data: Path | None = None
    devices: Devices = None


# a text with line ends would come back as several: those are sent as a file of rows
Line = Annotated[str, Field(max_length=20_000, pattern=r"^[^\n\r]*[^\s][^\n\r]*$")]


class Predict(Body):
    """upload: its id; path: within the board's data; rows: texts of a line each. None of them: the run's evaluation
    data."""

    key: Key
    checkpoint: Name = "best"
    upload: Name | None = None
    path: Path | None = None
    rows: Annotated[list[Line], Field(min_length=1, max_length=200)] | None = None
    devices: Devices = None


class Export(Body):
    key: Key
    checkpoint: Name = "best"
    format: Annotated[str, Field(pattern=r"^[a-z][a-z-]*$", max_length=40)]
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    quantise: Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=20)] | None = None
    devices: Devices = None


class Chat(Body):
    """model: a run. with_base: of a run that trained an adapter, whether its base is asked too."""

    key: Key
    model: Name
    checkpoint: Name = "best"
    with_base: bool = False
    devices: Devices = None


class Sampling(Body):
    """The sampling of an answer; a field that is left out is as the model's own settings have it."""

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=10**6)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None


class Reply(Body):
    """messages, tools: in the form of OpenAI's API, which `drivetrain serve` checks. of_base: whether the chat's base
    is asked in place of its model."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1000)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=100)] | None = None
    sampling: Sampling = Sampling()
    of_base: bool = False


class Order(Body):
    ids: Annotated[list[Name], Field(max_length=10_000)]


class QueueSettings(Body):
    paused: bool | None = None
    go_on_after_failure: bool | None = None
    at_once_cpu: Annotated[int, Field(ge=1, le=64)] | None = None


class Beside(Body):
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], Field(max_length=20)] = []
    note: Annotated[str, Field(max_length=4000)] = ""


class Empty(Body):
    """The body of a request that needs no words."""
