"""Reads what a pretrained image model expects of its pixels, and writes the same beside our own weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import problem
from drivetrain.models.model_folders import located, unloadable

FILE = "preprocessor_config.json"
NORM_KEY = "drivetrain_norm"  # in config.json


@dataclass(frozen=True)
class Preprocessing:
    """The expected pixels. None: the model does not state it. mean, std: one a channel, of values from 0 to 1."""

    channels: int | None = None
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    sides: tuple[int, int] | None = None  # height and width of what the model gets
    crops: bool = False  # whether the shorter side is resized to the size (bilinear) and the middle cut out, as here
    group_norm: bool = False  # trained with BatchNorm replaced, which only we know how to build


def expected_by(path: str | None, field: str) -> Preprocessing:
    """Returns the preprocessing of the model at `path`, a folder or a hub id. Raises UserError on `field` if there is
    none, or it cannot be read."""
    if path is None:
        return Preprocessing()
    where, local = located(path, field)
    try:
        config = _json(where, "config.json", local) or {}
        processor = _json(where, FILE, local) or {}
    except (OSError, ValueError) as error:
        raise unloadable(path, local, field, error) from error
    size = _side(processor.get("crop_size")) if processor.get("do_center_crop") else None
    normalised = processor.get("do_normalize", True)
    if processor.get("do_rescale", True) and abs(processor.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
        raise problem(
            field, f"{path} wants pixels times {processor['rescale_factor']}, not 1/255", "give another model"
        )
    return Preprocessing(
        channels=config.get("num_channels"),
        size=size or _side(processor.get("size")) or _side(config.get("image_size")),
        mean=_numbers(processor.get("image_mean")) if normalised else (0.0,),
        std=_numbers(processor.get("image_std")) if normalised else (1.0,),
        sides=_sides(processor.get("crop_size" if processor.get("do_center_crop") else "size")),
        crops=size is not None and _crops(processor, size),
        group_norm=config.get(NORM_KEY) == "group",
    )


def write_preprocessing(folder: Path, height: int, width: int, mean: Sequence[float], std: Sequence[float]) -> None:
    """Writes preprocessor_config.json, with which Transformers' AutoImageProcessor repeats the preprocessing of
    training.

    Square images: shorter side resized, middle cut out. Others: resized to (height, width).
    """
    square = height == width
    config = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": len(mean) == 3,
        "do_resize": True,
        "size": {"shortest_edge": height} if square else {"height": height, "width": width},
        "resample": 2,  # bilinear
        "do_center_crop": square,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
    (folder / FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _json(where: str, name: str, local: bool) -> dict[str, Any] | None:
    """Returns a file of the model, None if it has no such file. Raises OSError if the hub cannot be reached."""
    if local:
        file = Path(where) / name
        if not file.is_file():
            return None
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            file = Path(hf_hub_download(where, name))
        except LocalEntryNotFoundError:
            raise  # no network, which is a kind of EntryNotFoundError too
        except EntryNotFoundError:
            return None
    held = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{name} holds no object")
    return held


def _side(given: Any) -> int | None:
    """Returns 224 for each of 224, [224, 224], {"height": 224, "width": 224} and {"shortest_edge": 224}."""
    if isinstance(given, dict):
        given = given.get("shortest_edge") or given.get("height")
    if isinstance(given, list):
        given = given[0] if given else None
    return int(given) if given else None


def _sides(given: Any) -> tuple[int, int] | None:
    """Returns (224, 224) for each of 224 and {"height": 224, "width": 224}."""
    if isinstance(given, dict) and {"height", "width"} <= given.keys():
        return int(given["height"]), int(given["width"])
    return (given, given) if isinstance(given, int) else None


def _crops(processor: dict[str, Any], size: int) -> bool:
    """Returns whether pictures become size x size in the way of `data.images.resized`."""
    resized = (processor.get("size") or {}) if isinstance(processor.get("size"), dict) else {}
    is_square = _sides(processor.get("crop_size")) == (size, size)
    return is_square and resized.get("shortest_edge") == size and processor.get("resample") == 2


def _numbers(given: Any) -> tuple[float, ...] | None:
    return tuple(map(float, given)) if given else None
