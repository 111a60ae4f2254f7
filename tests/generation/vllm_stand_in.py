"""A server on this machine that speaks as much of vLLM's HTTP as a run asks for, and answers with plain Transformers.

It loads the weights that it is given into a model of its own, and draws with the seed of each request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MakeModel = Callable[[], Any]


@dataclass
class StandIn:
    """make: a new model of the run's architecture. Fields that tests change say what kind of server it is.

    asked: the path and body of every request. answered: the number of answers that it gave. fails: called with the
    number of each request for an answer; returns a status to fail with, or None.
    """

    make: MakeModel
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int = 512
    development: bool = True
    lora: bool = False
    key: str | None = None
    fails: Callable[[int], int | None] = lambda _: None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    answered: int = 0
    label: str = "default"
    dtype: str = "torch.float32"
    url: str = ""

    def __post_init__(self) -> None:
        self.adapter: Path | None = None
        self.model, self.lock = self.make(), threading.Lock()
        self.requests = 0

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "served", "max_model_len": self.max_model_len}]}
        if path.startswith("/server_info") and self.development:
            lora = {"max_lora_rank": 16} if self.lora else None
            model = {"logprobs_mode": self.logprobs_mode, "dtype": self.dtype}
            return {"vllm_config": {"model_config": model, "lora_config": lora}}
        if path == "/weight_info" and self.development:
            return {"weight_version": self.label}
        return None

    def post(self, path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            return self._load(Path(body["kwargs"]["weights_path"]))
        if path == "/v1/load_lora_adapter":
            return self._load_adapter(Path(body["lora_path"]), body.get("load_inplace", False))
        if path == "/v1/unload_lora_adapter":
            had, self.adapter = self.adapter, None
            return 404 if had is None else "Success: LoRA adapter removed"
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return {"success": True}
        if path == "/v1/completions":
            self.requests += 1
            status = self.fails(self.requests)
            return status if status is not None else self._answer(body)
        return None

    def _load(self, folder: Path) -> Any:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return 500
        self.model = self.make()
        found = self.model.load_state_dict({k: v for each in files for k, v in load_file(each).items()}, strict=False)
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        assert not found.unexpected_keys, found.unexpected_keys
        assert set(found.missing_keys) <= tied, found.missing_keys
        return {"results": [None]}

    def _load_adapter(self, folder: Path, in_place: bool) -> Any:
        """As vLLM: a name that is taken is refused; what was loaded in place is read again at later requests."""
        from peft import PeftModel

        if self.adapter is not None and not in_place:
            return 400
        self.adapter, self.reads_again = folder, in_place
        self.model = PeftModel.from_pretrained(self.make(), str(folder)).eval()
        return "Success: LoRA adapter added"

    def start_anew(self) -> None:
        """Forgets what it was given, as a server does that was killed and started again."""
        self.model, self.label = self.make(), "default"

    @torch.no_grad()
    def _answer(self, body: dict[str, Any]) -> Any:
        if self.adapter is not None and self.reads_again and not self.adapter.exists():
            return 500
        generator = torch.Generator().manual_seed(body["seed"])
        ids: list[int] = list(body["prompt"])
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < body["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids + tokens])).logits[0, -1].double()
            by_mode = logits / body["temperature"] if self.logprobs_mode == "processed_logprobs" else logits
            tokens.append(int(torch.multinomial((logits / body["temperature"]).softmax(0), 1, generator=generator)))
            logprobs.append(float(by_mode.log_softmax(0)[tokens[-1]]))
            if tokens[-1] in body["stop_token_ids"]:
                break
        self.answered += 1
        reason = "stop" if tokens[-1] in body["stop_token_ids"] else "length"
        choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
        return {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]}


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(stand_in.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand_in.lock:
                stand_in.asked.append((self.path, body))
                found = stand_in.post(self.path, body)
            self._send(found)

        def _send(self, found: Any) -> None:
            if stand_in.key is not None and self.headers.get("Authorization") != f"Bearer {stand_in.key}":
                found = 401
            status = 404 if found is None else found if isinstance(found, int) else 200
            text = (json.dumps(found) if status == 200 else json.dumps({"error": f"status {status}"})).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
