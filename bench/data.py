"""Data of growing sizes: the first start, the second, memory and disk, beside Hugging Face datasets.

    python bench/data.py --kinds reviews pictures --rows 10000 100000
    python bench/data.py --page                     # writes the page from what was measured

Each size is generated, run and deleted. Ours is a whole training until its first step, from which the same training on
64 rows (400 pictures) is subtracted; theirs is load_dataset and map behind the imports, with as many processes. Memory
is the largest sum of proportional shares over all processes, less that of the training on few rows (theirs: of the
imports). Processor seconds are those of all processes, user and system, less the same. --peers runs the package
datasets too, which `make test` installs. text is tokenised with a byte-pair vocabulary of 8,000, text-bytes by bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import data_made
import data_page
import data_pictures
from data_memory import Measured, watched
from sft_data import END, TEMPLATE

from drivetrain.runtime.hardware import detect

BENCH = Path(__file__).resolve().parent
RECORD = BENCH / "results" / "data.jsonl"
FEW = {"pictures": 400, "tars": 400}  # rows whose training is the baseline; of other kinds FEWEST
FEWEST = 64
VOCABULARY = 8000
LIMIT = 7200  # seconds a start may take
OURS_ALONE = {"tars", "text-bytes"}
KINDS = ("reviews", "conversations", "text", "text-bytes", "pictures", "tars", "shards")


@dataclass(frozen=True)
class Made:
    path: Path
    bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 100_000])
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ranks", type=int, default=1, help="of ddp, for ours")
    parser.add_argument("--folder", type=Path, required=not {"--page"} & set(sys.argv), help="for all that is made")
    parser.add_argument("--peers", action="store_true", help="run Hugging Face datasets too, at every size")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--beside", default="", help="what else ran on the machine, in words")
    parser.add_argument("--page", action="store_true", help="write the page from the record alone")
    given = parser.parse_args()
    if not given.page:
        for kind in given.kinds:
            few = FEW.get(kind, FEWEST)
            # the quickest of three: the first reads its imports from the disk, later ones from memory
            baseline = min((measured(kind, few, given)["first"] for _ in range(3)), key=lambda found: found["seconds"])
            for count in given.rows:
                found = measured(kind, count, given)
                line = {**found, "baseline": baseline, "beside": given.beside}
                line |= {"machine": detect().device_name, "time": time.time()}
                print(json.dumps(line), flush=True)
                given.record.parent.mkdir(parents=True, exist_ok=True)
                with given.record.open("a") as out:
                    out.write(json.dumps(line) + "\n")
    data_page.write(given.record)


def measured(kind: str, count: int, given: argparse.Namespace) -> dict[str, Any]:
    folder = given.folder / f"{kind}-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        made, tokenizer = generated(folder, kind, count), tokenizer_folder(given.folder / "tokenizer")
        time.sleep(2.5)  # folders' times are trusted after two seconds
        ours = [start(folder, kind, made, tokenizer, given.ranks) for _ in range(2)]
        found: dict[str, Any] = {"kind": kind, "rows": count, "ranks": given.ranks, "bytes": made.bytes}
        found |= {"first": asdict(ours[0]), "second": asdict(ours[1]), "disk": size_of(folder / "cache")}
        if given.peers and count > FEW.get(kind, FEWEST) and kind not in OURS_ALONE and given.ranks == 1:
            found["peer"] = [peer(folder, kind, made, tokenizer, given) for _ in range(2)]
            found["peer_disk"] = size_of(folder / "hf")
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- what is made ----------------------------------------------------------------------------------------------------


def generated(folder: Path, kind: str, count: int) -> Made:
    match kind:
        case "reviews":
            path = data_made.write(folder / "data.csv", "reviews", count)
        case "conversations":
            path = data_made.write(folder / "data.jsonl", "conversations", count)
        case "text" | "text-bytes":
            path = data_made.write(folder / "data.txt", "documents", count)
        case "shards":
            shards = max(1, min(1000, count // 100))
            path = data_made.write_shards(folder / "data", "documents", count, shards, ".jsonl.gz")
        case "pictures":
            path = data_pictures.write_folder(folder / "data", count)
        case "tars":
            path = data_pictures.write_tars(folder / "data", count)
    return Made(path, size_of(path))


def tokenizer_folder(path: Path) -> Path:
    if not path.exists():
        from drivetrain.data.language.vocabularies import bpe_tokenizer

        texts = [str(row["text"]) for row in data_made.rows("documents", 3000, seed=1)]
        tokenizer = bpe_tokenizer(texts, VOCABULARY, [END])
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(path)
    return path


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


# --- the two sides ---------------------------------------------------------------------------------------------------


def start(folder: Path, kind: str, made: Made, tokenizer: Path, ranks: int) -> Measured:
    """A training until its first step."""
    run, stamp = folder / "run.json", folder / "stamp"
    run.write_text(json.dumps(run_file(folder, kind, made, tokenizer, ranks)))
    stamp.unlink(missing_ok=True)
    command = [sys.executable, "-m", "drivetrain", "train", str(run), "--overwrite"]
    found = watched(command, environment(folder, stamp), folder / "log", stamp.exists, LIMIT)
    if not stamp.exists():
        raise SystemExit(
            f"ours failed ({found.returncode}) after {found.seconds:.0f} s:\n{(folder / 'log').read_text()[-3000:]}"
        )
    return found


def environment(folder: Path, stamp: Path) -> dict[str, str]:
    path = f"{BENCH}:{BENCH.parent / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, "BENCH_FIRST_STEP": str(stamp), "XDG_CACHE_HOME": str(folder / "user")}


def run_file(folder: Path, kind: str, made: Made, tokenizer: Path, ranks: int) -> dict[str, Any]:
    run: dict[str, Any] = {
        "workload": workload(kind, made, tokenizer, folder / "cache"),
        "batch_size": 16,
        "loop": {"steps": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "tracking": {"log_every": 1, "trackers": ["progress", "first_step_tracker:FirstStep"]},
        "output": str(folder / "run"),
    }
    return run | ({"engine": "ddp", "processes": ranks} if ranks > 1 else {})


def workload(kind: str, made: Made, tokenizer: Path, cache: Path) -> dict[str, Any]:
    if kind in {"pictures", "tars"}:
        resnet = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        data = {
            "source": "folder" if kind == "pictures" else "webdataset",
            "train": str(made.path),
            "cache": str(cache),
        }
        return {"type": "image_classification", "model": {"config": resnet, "norm": "group"}, "data": data}
    if kind == "reviews":
        bert = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = {"tokenizer": str(tokenizer), "config": {**bert, "intermediate_size": 128}}
        data = {"train": str(made.path), "max_length": 128, "cache": str(cache)}
        return {"type": "text_classification", "model": model, "data": data}
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    named = "bytes" if kind == "text-bytes" else str(tokenizer)
    model = {"tokenizer": named, "config": {**llama, "intermediate_size": 128, "max_position_embeddings": 512}}
    stage = {"stage": "sft"} if kind == "conversations" else {}
    data = {"train": str(made.path), "length": 256, "evaluation_fraction": 0.05, "cache": str(cache)}
    return {"type": "language_model", "model": model, "data": data, **stage}


def peer(folder: Path, kind: str, made: Made, tokenizer: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Hugging Face datasets, the same rows: {"seconds", "cpu_seconds", "beyond_bytes"}, all beyond the imports."""
    result = folder / "peer.json"
    command = [sys.executable, str(BENCH / "data_hf.py"), kind, str(made.path), str(tokenizer)]
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(BENCH.parent / "src")}
    found = watched([*command, str(given.processes), str(result)], {**os.environ, **own}, folder / "log", limit=LIMIT)
    if found.returncode:
        return {"failed": (folder / "log").read_text()[-300:]}
    told = json.loads(result.read_text())
    beyond = found.peak_bytes - told.pop("imports_bytes")
    cpu = found.cpu_seconds - told.pop("imports_cpu_seconds")
    return {**told, "cpu_seconds": cpu, "beyond_bytes": beyond, "peak_bytes": found.peak_bytes}


if __name__ == "__main__":
    main()
