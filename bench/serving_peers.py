"""The server beside `transformers serve`: tokens a second of streamed answers, and when the first token comes.

    python bench/serving_peers.py

Three servers serve one Llama of random weights: this project's, `transformers serve` as it starts by itself, and with
`--continuous-batching`. They are processes of their own, which stand still while it is another's turn. The same clients
send the same requests to each in turn, whose order moves on from round to round: 1, 8 and 64 clients at once, each of
which asks again when its answer is there, with prompts and answers of uneven lengths. A ratio is the median of the
rounds'. Tokens count that a request wanted, and all are the likeliest; an answer of another length ends the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from generation import ANSWER, PROMPT, VOCABULARY, Asked, asked, made_model
from interleaved import BENCH, child_environment
from tables import machine_line, markdown_table, write

CLIENTS = {1: (5, 4), 8: (3, 2), 64: (3, 1)}  # at once → rounds, and requests that each sends
START_SECONDS = 300
# by its own defaults its buffers take most of the machine's memory, and the first answer minutes
PAGES = ["--cb-block-size", "32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
OURS, PLAIN, BATCHING = "drivetrain serve", "transformers serve", "transformers serve --continuous-batching"


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    process: psutil.Process

    def processor_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Turn:
    """All requests of a round, sent to one server. processor: seconds of the server on all cores. firsts: seconds until
    each one's first text."""

    seconds: float
    processor: float
    firsts: list[float]
    answers: list[str]

    @property
    def rate(self) -> float:
        return sum(len(each.split()) for each in self.answers) / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="a server beside transformers serve")
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "serving_peers.md")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--rounds", type=int, help="of each number of clients")
    parser.add_argument("--without", nargs="*", default=[], choices=[PLAIN, BATCHING], help="servers to leave out")
    options = parser.parse_args()
    names = [each for each in (OURS, PLAIN, BATCHING) if each not in options.without]
    with tempfile.TemporaryDirectory(prefix="serving-") as folder, ExitStack() as stack:
        parameters = sum(each.numel() for each in made_model(Path(folder)).parameters())
        servers = [stack.enter_context(running(name, folder)) for name in names]
        rows = []
        for clients in options.clients:
            rounds, each = CLIENTS.get(clients, (3, 2))
            rows += compared(clients, measured(servers, folder, clients, options.rounds or rounds, each))
    titles = ["clients, server", "tokens/s", "ratio", "least to most", "processor time"]
    titles += ["first token, median", "99 %", "same answers"]
    text = (
        "# The server beside transformers serve\n\n"
        f"`python bench/serving_peers.py` repeats it. {machine_line()}\n\n"
        f"A Llama of {parameters / 1e6:.0f} million random parameters in fp32; prompts of {PROMPT[0]} to {PROMPT[1]} "
        f"tokens, answers of {ANSWER[0]} to {ANSWER[1]}, streamed. The servers take the same requests in turns; the "
        "ratio is the median of the rounds, above 1 drivetrain is quicker. Processor time: the other server's over "
        "drivetrain's, of which other programs take nothing. First token: of all requests of a row; among 64 clients "
        f"it has the wait behind the others in it. Load average at the end: {os.getloadavg()[0]:.1f}; above the cores, "
        f"other programs made times longer. --continuous-batching has {' '.join(PAGES)}.\n\n"
    )
    write(options.output, text + markdown_table(titles, rows) + "\n")


@contextmanager
def running(name: str, folder: str) -> Iterator[Server]:
    """Starts a server, and ends it with the block."""
    port = _free_port()
    log = Path(folder) / f"{port}.log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            _command(name, folder, port), stdout=out, stderr=subprocess.STDOUT, env=child_environment()
        ) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{name} does not serve:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _command(name: str, folder: str, port: int) -> list[str]:
    if name == OURS:
        return [sys.executable, "-m", "drivetrain", "serve", folder, "--port", str(port)]
    theirs = "from transformers.cli.transformers import main; main()"
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    batching = ["--continuous-batching", *PAGES] if name == BATCHING else []
    return [sys.executable, "-c", theirs, "serve", folder, *options, *batching]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def measured(servers: Sequence[Server], folder: str, clients: int, rounds: int, each: int) -> list[Mapping[str, Turn]]:
    """Returns the turns of the servers, by name, round by round, after one that warms up."""
    draw = np.random.default_rng(clients)
    warm = asked(clients, np.random.default_rng(99), VOCABULARY)
    for server in servers:
        asyncio.run(turn(server, folder, warm, clients))
    found = []
    for number in range(rounds):
        questions = asked(clients * each, draw, VOCABULARY)
        first = number % len(servers)
        order = [*servers[first:], *servers[:first]]
        found.append({server.name: asyncio.run(turn(server, folder, questions, clients)) for server in order})
        print(clients, "  ".join(f"{name}: {made.rate:.1f} tokens/s" for name, made in found[-1].items()), flush=True)
    return found


def compared(clients: int, rounds: Sequence[Mapping[str, Turn]]) -> list[list[str]]:
    rows = []
    for name in rounds[0]:
        turns, ours = [each[name] for each in rounds], [each[OURS] for each in rounds]
        ratios = [mine.rate / other.rate for mine, other in zip(ours, turns, strict=True)]
        firsts = [each for made in turns for each in made.firsts]
        same = [
            mine == other for each in rounds for mine, other in zip(each[OURS].answers, each[name].answers, strict=True)
        ]
        late = statistics.quantiles(firsts, n=100, method="inclusive")[98]
        costs = [other.processor / mine.processor for mine, other in zip(ours, turns, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        beside = [f"**{middle:.2f}**", f"{low:.2f} to {high:.2f}", f"{statistics.median(costs):.2f}"]
        rows.append(
            [
                f"{clients}, {name}",
                f"{statistics.median(made.rate for made in turns):.1f}",
                *([""] * 3 if name == OURS else beside),
                *(f"{1000 * each:.0f} ms" for each in (statistics.median(firsts), late)),
                "" if name == OURS else f"{sum(same)} of {len(same)}",
            ]
        )
    return rows


async def turn(server: Server, folder: str, questions: Sequence[Asked], clients: int) -> Turn:
    """Sends these requests, from so many clients at once."""
    firsts, answers = [0.0] * len(questions), [""] * len(questions)
    left = iter(range(len(questions)))

    async def client() -> None:
        for number in left:
            firsts[number], answers[number] = await one(server, folder, questions[number])

    server.process.resume()
    start, used = time.perf_counter(), server.processor_seconds()
    await asyncio.gather(*(client() for _ in range(clients)))
    made = Turn(time.perf_counter() - start, server.processor_seconds() - used, firsts, answers)
    server.process.suspend()  # a server that waits in a loop takes nothing of the next one's turn
    return made


async def one(server: Server, folder: str, question: Asked) -> tuple[float, str]:
    """Sends a request; returns the seconds until its first text, and the answer. Raises RuntimeError for an answer that
    is not as long as was asked for."""
    prompt = " ".join(f"w{token}" for token in question.ids)
    body = {"prompt": prompt, "max_tokens": question.wanted, "stream": True, "temperature": 0}
    if server.name != OURS:
        body["model"] = folder
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    start, first, last, parts = time.perf_counter(), 0.0, b"", list[str]()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(head.encode() + content)
        while line := await reader.readline():
            last = line if line.strip() else last
            if not re.match(rb"data: *\{", line):  # a header, the size of a chunk, the end
                continue
            text = "".join(choice["text"] or "" for choice in json.loads(line[5:]).get("choices", ()))
            first = first or (time.perf_counter() - start if text else 0.0)
            parts.append(text)
    finally:
        writer.close()
    answer = "".join(parts)
    if len(answer.split()) != question.wanted:
        why = f"{len(answer.split())} tokens for {question.wanted}; its last line: {last[:500]!r}"
        raise RuntimeError(f"{server.name} gave {why}")
    return first, answer


if __name__ == "__main__":
    main()
