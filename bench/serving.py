"""A server under many clients at once: what goes wrong, when first tokens come, and the memory over the requests.

    python bench/serving.py --requests 10000

200 clients ask a small Llama of random weights at once, again and again. Of ten clients one leaves after the first
event, one before any, and one reads slowly; two want whole answers, the others streams. The server is a process of its
own; its resident memory, threads and open files are read after each tenth of the requests, when no answer is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from interleaved import BENCH
from tables import machine_line, markdown_table, write
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.data.language.vocabularies import byte_tokenizer

PARTS = 10
LEAVES_EARLY, LEAVES, READS_SLOWLY = 0, 1, 2  # a request's number modulo ten
WHOLE = (3, 4)


@dataclass
class Seen:
    """What the clients of one part saw. firsts: seconds until the first event of a stream that was read to its end."""

    outcomes: Counter[str] = field(default_factory=Counter)
    firsts: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """Of the server's process. resident: MiB."""

    resident: float
    threads: int
    files: int


def main() -> None:
    parser = argparse.ArgumentParser(description="a server under many clients")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "serving.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        made_model(Path(folder))
        rows, seconds = asyncio.run(measured(folder, options.requests, options.clients))
    titles = ["requests", "resident MiB", "threads", "open files", "first token, median", "99 %", "outcomes"]
    text = (
        "# A server under many clients\n\n"
        f"`python bench/serving.py --requests {options.requests}` repeats it. {machine_line()}\n\n"
        f"{options.clients} clients at once, {options.requests:,} requests in {seconds:.0f} s, to a Llama of two "
        "layers; of ten clients one leaves after the first event, one before any, and one reads slowly. Each row "
        "follows a tenth of the requests; the first token's time includes the wait among the other clients. Load "
        f"average at the end: {os.getloadavg()[0]:.1f}; above the cores, other programs made the times longer.\n\n"
    )
    write(options.output, text + markdown_table(titles, rows) + "\n")


async def measured(folder: str, requests: int, clients: int) -> tuple[list[list[str]], float]:
    command = [sys.executable, "-m", "drivetrain", "serve", folder, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            rows, start = [], time.perf_counter()
            port = port_of(server)
            for part in range(PARTS):
                seen = await asked(port, range(part * requests // PARTS, (part + 1) * requests // PARTS), clients)
                await settled(port)
                rows.append(row((part + 1) * requests // PARTS, state_of(server.pid), seen))
                print("  ".join(rows[-1]), flush=True)
            seconds = time.perf_counter() - start
            server.send_signal(signal.SIGTERM)
            code = server.wait(120)
            assert code == 0, f"the server ended with {code}"
        finally:
            server.kill()
    return rows, seconds


def port_of(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r":(\d+)/v1", line):
            return int(found[1])
    raise RuntimeError("the server ended before it listened")


def row(done: int, state: State, seen: Seen) -> list[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(seen.outcomes.items()))
    late = statistics.quantiles(seen.firsts, n=100)[98]
    times = [f"{1000 * each:.0f} ms" for each in (statistics.median(seen.firsts), late)]
    return [f"{done:,}", f"{state.resident:.0f}", str(state.threads), str(state.files), *times, outcomes]


async def asked(port: int, numbers: range, clients: int) -> Seen:
    """Sends these requests, from so many clients at once."""
    seen, left = Seen(), iter(numbers)

    async def client() -> None:
        for number in left:
            seen.outcomes[await one(port, number, seen.firsts)] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


async def one(port: int, number: int, firsts: list[float]) -> str:
    """Sends one request, and returns what became of it."""
    kind = number % 10
    prompt = f"request {number} " * (1 + number % 7)
    body = {"prompt": prompt, "max_tokens": 4 + number % 20, "stream": kind not in WHOLE, "temperature": 1.0}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        if kind == LEAVES_EARLY:
            return "left before any event"
        found = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in found.split(b"\r\n", 1)[0]:
            return found.split(b"\r\n", 1)[0].decode()
        first = await reader.read(1024)
        if kind == LEAVES:
            return "left after the first event"
        time_of_first = time.perf_counter() - start
        whole = first + await rest(reader, slowly=kind == READS_SLOWLY)
        if kind in WHOLE:
            return "whole answers" if b'"finish_reason"' in whole else "broken"
        firsts.append(time_of_first)
        return "streams" if b"[DONE]" in whole else "broken streams"
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader, slowly: bool) -> bytes:
    """Returns what follows until the server closes."""
    found = b""
    while part := await reader.read(64 if slowly else 1 << 16):
        found += part
        if slowly:
            await asyncio.sleep(0.01)
    return found


async def settled(port: int) -> None:
    """Waits until no answer is in the making. Raises TimeoutError for one that is stuck."""
    async with asyncio.timeout(120):
        while await in_the_making(port):
            await asyncio.sleep(0.2)


async def in_the_making(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode())
    found = (await reader.read()).decode()
    writer.close()
    return int(float(_captured(r"(?m)^drivetrain_answers_in_the_making (\S+)", found)))


def state_of(process: int) -> State:
    status = Path(f"/proc/{process}/status").read_text()
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return State(int(_captured(r"VmRSS:\s+(\d+)", status)) / 1024, int(_captured(r"Threads:\s+(\d+)", status)), files)


def _captured(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not there"
    return found[1]


def made_model(folder: Path, special: Sequence[str] = ("<|end|>",)) -> None:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(special)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
