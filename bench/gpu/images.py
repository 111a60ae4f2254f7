"""The part `bench-images`: ResNet-50 at 224 pixels, from JPEG files in class folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.classifiers import SIDES
from bench.gpu.setting import Setting
from bench.gpu.speed import in_turns

RESNET_50 = {
    "model_type": "resnet",
    "layer_type": "bottleneck",
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
}
TINY = {"model_type": "resnet", "layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
# forward 4.09 G multiply-additions (torchvision's table for ResNet-50), two operations each, backward twice as many
FLOPS = 3 * 2 * 4.09e9
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def cases(setting: Setting) -> list[Case]:
    sizes: dict[str, Any] = {"pixels": 32, "batch": 16, "number": 64, "first": 1, "last": 3}
    if not setting.small:
        sizes = {"pixels": 224, "batch": 256, "number": 2048, "first": 10, "last": 50}
    name = "tiny ResNet" if setting.small else "ResNet-50"
    task = {"name": name, "task": "images", "needs": ("pillow",), **sizes, "sides": SIDES}
    return in_turns(
        [task], "classifiers:trained", rounds=1 if setting.small else 2, seconds=30 if setting.small else 110
    )


def make_data(given: dict[str, Any], setting: Setting) -> Path:
    """Class folders below train and evaluation; those that are there are kept."""
    import samples

    folder = setting.scratch / "data" / f"images-{given['pixels']}-{given['number']}"
    if not (folder / "made").exists():
        samples.images(None, folder, given["number"], 32)
        if given["pixels"] != samples.PIXELS:
            _enlarge(folder, given["pixels"])
        (folder / "made").touch()
    return folder


def _enlarge(folder: Path, pixels: int) -> None:
    from PIL import Image

    for path in folder.rglob("*.jpg"):
        with Image.open(path) as image:
            larger = image.convert("RGB").resize((pixels, pixels), Image.Resampling.BICUBIC)
        larger.save(path, quality=85)


def workload(given: dict[str, Any], setting: Setting, data: Path, cache: Path) -> dict[str, Any]:
    del cache
    return {
        "type": "image_classification",
        "model": {"config": TINY if setting.small else RESNET_50},
        "data": {
            "source": "folder",
            "train": str(data / "train"),
            "evaluation": str(data / "evaluation"),
            "crop_padding": given["pixels"] // 8,
            "flip": True,
            "mean": MEAN,
            "std": STD,
        },
    }


def flops_per_sample(given: dict[str, Any], setting: Setting, data: Path) -> float | None:
    del given, data
    return None if setting.small else FLOPS
