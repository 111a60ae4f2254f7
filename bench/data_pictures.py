"""Pictures of any number for benchmarks: small JPEGs in class folders, in tar archives, or in parquet files.

    python bench/data_pictures.py folder pictures --count 300000
    python bench/data_pictures.py tars shards --count 300000

A few hundred are encoded and written again and again under new names: listing, opening and decoding cost the same.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32
CLASSES = 100
DIFFERENT = 500
IN_SHARD = 10_000


def encoded(seed: int = 0) -> list[bytes]:
    """DIFFERENT JPEGs of smooth noise, of about 1 kB each."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(DIFFERENT):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        held = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(held, "JPEG", quality=75)
        found.append(held.getvalue())
    return found


def write_folder(root: Path, count: int) -> Path:
    """root/class_07/picture_0000123.jpg"""
    made = encoded()
    for number in range(CLASSES):
        (root / f"class_{number:02d}").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        path = root / f"class_{index % CLASSES:02d}" / f"picture_{index:07d}.jpg"
        path.write_bytes(made[index % DIFFERENT])
    return root


def write_tars(root: Path, count: int) -> Path:
    """root/shard-003.tar, with 0000123.jpg and 0000123.cls"""
    made = encoded()
    root.mkdir(parents=True, exist_ok=True)
    for shard, start in enumerate(range(0, count, IN_SHARD)):
        with tarfile.open(root / f"shard-{shard:03d}.tar", "w") as archive:
            for index in range(start, min(start + IN_SHARD, count)):
                for ending, content in (("jpg", made[index % DIFFERENT]), ("cls", str(index % CLASSES).encode())):
                    member = tarfile.TarInfo(f"{index:07d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["folder", "tars"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, required=True)
    given = parser.parse_args()
    {"folder": write_folder, "tars": write_tars}[given.kind](given.path, given.count)


if __name__ == "__main__":
    main()
