"""Measures how quickly one core makes samples of picture files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from drivetrain.data.images import file_pictures

WIDE, HIGH = 500, 375  # the commonest size of ImageNet's pictures
SIZE = 224  # to which models of ImageNet take them
PICTURES = 24


def picture_seconds() -> float:
    """Returns the seconds in which one core reads, decodes and resizes a JPEG: the mean over some that differ."""
    pixels = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in range(PICTURES):
            small = Image.fromarray(pixels.integers(0, 256, (HIGH // 8, WIDE // 8, 3), dtype=np.uint8))
            file = Path(folder) / f"{number}.jpg"
            small.resize((WIDE, HIGH), Image.Resampling.BICUBIC).save(file, quality=90)
            files.append(str(file))
        pictures = file_pictures(files, files)
        pictures.pixels(0, SIZE)
        start = time.perf_counter()
        for index in range(PICTURES):
            pictures.pixels(index, SIZE)
        return (time.perf_counter() - start) / PICTURES
