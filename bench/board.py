"""The board with a long history and many tabs: the server's processor time and memory, and what a first page costs.

    python bench/board.py
    python bench/board.py --seconds 60

A folder has 200 runs of 300 points and one of 100,000, whose last point is always new: while tabs look at it, one comes
each second. The server is a process of its own; Chromium has a single profile, as a user's has, so that its tabs share
one stream of changes. Shares of a core are the server's processor time over the wall time, read after the pages have
loaded; its memory is the largest resident size that was read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from interleaved import BENCH
from playwright.sync_api import Browser, sync_playwright
from tables import machine_line, markdown_table, write

RUNS, POINTS, MANY_POINTS, TABS = 200, 300, 100_000, 8
LONG = "long"  # the run of many points
ADDRESS = re.compile(r"https?://\S+/login#\S+")
WAIT = 120_000  # milliseconds until a page shows what is waited for
FIRST_PAGES = 5
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RECIPE = "[data-recipe=digits]"
CURVE = "[data-chart=loss] canvas"


@dataclass(frozen=True)
class Load:
    """What a server took. share: of a core; resident: MB, the largest that was read."""

    share: float
    resident: float


def main() -> None:
    parser = argparse.ArgumentParser(description="the board with a long history and many tabs")
    parser.add_argument("--seconds", type=float, default=30, help="for which each state of the server is watched")
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "board.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="board-") as folder, sync_playwright() as tool:
        root = Path(folder)
        make_history(root / "runs")
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with board(root) as (server, address):
            rows, first = measured(browser, server, address, root, options.seconds)
        browser.close()
    write(options.output, page(rows, first))


def measured(
    browser: Browser, server: psutil.Process, address: str, root: Path, seconds: float
) -> tuple[list[tuple[str, Load]], dict[str, float]]:
    """Returns the server's load in each state, and what a first page and a long curve take."""
    rows = [("no page open", watched(server, seconds))]
    found = first_pages(browser, address)
    context = browser.new_context()
    pages = [context.new_page() for _ in range(TABS)]
    for each in pages:
        each.set_default_timeout(WAIT)
    pages[0].goto(address)
    pages[0].wait_for_selector(RECIPE)
    host = pages[0].url.split("#")[0]
    for number, each in enumerate(pages):
        each.goto(f"{host}#/{'runs' if number % 2 else 'new'}")
        each.wait_for_selector("h1")
    rows.append((f"{TABS} tabs, nothing changes", watched(server, seconds)))
    found |= opened_curve(pages[0], host)
    for each in pages[1:]:
        each.goto(f"{host}#/runs/{LONG}")
        each.wait_for_selector(CURVE)
    with growing(root / "runs" / LONG):
        rows.append((f"{TABS} tabs on the run of {MANY_POINTS:,} points, a point a second", watched(server, seconds)))
    context.close()
    return rows, found


def watched(server: psutil.Process, seconds: float) -> Load:
    """Returns the load of a server over some seconds."""
    before, begun, largest = _processor(server), time.monotonic(), 0.0
    while time.monotonic() - begun < seconds:
        largest = max(largest, server.memory_info().rss / 1e6)
        time.sleep(0.2)
    return Load((_processor(server) - before) / (time.monotonic() - begun), largest)


def _processor(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.user + times.system)


def first_pages(browser: Browser, address: str) -> dict[str, float]:
    """Returns KB, requests and seconds of the first page for a browser that is logged in and has nothing in its
    cache; the seconds are the median of several, from the address to the list of recipes."""
    context = browser.new_context()
    login = context.new_page()
    login.goto(address)
    login.wait_for_selector(RECIPE, timeout=WAIT)
    host, known = login.url.split("#")[0], context.storage_state()
    context.close()
    seconds, sizes = [], list[int]()
    for _ in range(FIRST_PAGES):
        context = browser.new_context(storage_state=known)
        fresh = context.new_page()
        sizes = []
        fresh.on("response", lambda answer, found=sizes: _size(answer, found))
        begun = time.monotonic()
        fresh.goto(host)
        fresh.wait_for_selector(RECIPE, timeout=WAIT)
        seconds.append(time.monotonic() - begun)
        context.close()
    return {"KB": sum(sizes) / 1000, "requests": len(sizes), "seconds": statistics.median(seconds)}


def _size(answer: Any, found: list[int]) -> None:
    if "api/events" not in answer.url:  # which does not end
        found.append(answer.request.sizes()["responseBodySize"])


def opened_curve(tab: Any, host: str) -> dict[str, float]:
    """Returns the seconds until the run of many points is drawn, read by the server for the first time."""
    begun = time.monotonic()
    tab.goto(f"{host}#/runs/{LONG}")
    tab.wait_for_selector(CURVE)
    return {"curve seconds": time.monotonic() - begun}


# --- what is looked at -------------------------------------------------------------------------------------------


def make_history(root: Path) -> None:
    for number in range(RUNS):
        _write_run(root / f"run-{number:03d}", POINTS, "completed")
    _write_run(root / LONG, MANY_POINTS, None)


def _write_run(folder: Path, points: int, status: str | None) -> None:
    folder.mkdir(parents=True)
    run = {"name": folder.name, "engine": "single", "precision": "fp32", "workload": {"type": "image_classification"}}
    (folder / "run.yaml").write_text(json.dumps(run))
    started = {"name": folder.name, "output": str(folder), "total_steps": points, "first_step": 0}
    with (folder / "events.jsonl").open("w") as file:
        file.write(_line("run_started", **started, samples_per_epoch=1000))
        file.writelines(_point(step) for step in range(1, points + 1))
        if status is not None:
            file.write(_line("run_finished", status=status, step=points, message=""))


def _line(kind: str, **fields: Any) -> str:
    return json.dumps({"time": "2026-11-25T12:00:00.000+00:00", "event": kind, **fields}) + "\n"


def _point(step: int) -> str:
    numbers = {"epoch": step / 100, "grad_norm": 1 + math.sin(step), "lr": 0.1, "scale": None, "skipped_steps": 0}
    measured = {"samples": step * 8, "samples_per_second": 100.0, "elapsed_seconds": step / 2, "utilisation": 0.5}
    parts = {"data": 0.1, "forward": 0.3, "backward": 0.5}
    return _line("step", step=step, loss=2 / (1 + step / 1000) + 0.1 * math.sin(step), **numbers, **measured,
                 memory={"resident": 10**9}, seconds_by_part=parts)  # fmt: skip


@contextlib.contextmanager
def growing(folder: Path) -> Iterator[None]:
    """Appends a point a second to a run."""
    ended = threading.Event()

    def grow() -> None:
        step = MANY_POINTS
        while not ended.wait(1.0):
            step += 1
            with (folder / "events.jsonl").open("a") as file:
                file.write(_point(step))

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def board(root: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Runs a board; yields its process and the address that it prints."""
    log = root / "board.txt"
    command = [sys.executable, "-m", "drivetrain", "board", "--runs", str(root / "runs"), "--port", "0"]
    with log.open("w") as written:
        process = subprocess.Popen(command, cwd=root, stderr=written)
    try:
        while (found := ADDRESS.search(log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(f"the board did not start: {log.read_text()}")
            time.sleep(0.1)
        yield psutil.Process(process.pid), found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def page(rows: Sequence[tuple[str, Load]], found: dict[str, float]) -> str:
    table = [[name, f"{load.share:.1%}", f"{load.resident:.0f}"] for name, load in rows]
    return (
        f"# The board with {RUNS} runs and {TABS} tabs\n\n"
        f"`python bench/board.py` repeats it. {machine_line()} Load average at the end: {os.getloadavg()[0]:.1f}; "
        "above the cores, other programs made the times longer.\n\n"
        f"The folder has {RUNS} runs of {POINTS} points and one of {MANY_POINTS:,}.\n\n"
        f"{markdown_table(['state of the server', 'share of a core', 'resident MB'], table)}\n\n"
        f"The first page, with nothing in the browser's cache: {found['KB']:.0f} KB, {found['requests']:.0f} requests, "
        f"{found['seconds']:.2f} s to the list of recipes (median of {FIRST_PAGES}). The run of {MANY_POINTS:,} points "
        f"is drawn {found['curve seconds']:.2f} s after its link is followed, its file then read for the first time.\n"
    )


if __name__ == "__main__":
    main()
