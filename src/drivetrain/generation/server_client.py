"""The requests that a run makes of vLLM's server: to load weights, and to draw answers.

Their form is that of vLLM 0.32: OpenAI's `/v1/completions` with vLLM's own fields, and the endpoints that
VLLM_SERVER_DEV_MODE=1 opens, which let anyone who reaches the server replace its model.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from drivetrain.config.rollout_server import RolloutServer
from drivetrain.errors import Problem, RunError, UserError, clipped, last_line
from drivetrain.workloads.generating import Drawn

ADAPTER = "drivetrain"  # the name under which the server has the run's adapter
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between attempts, which double
BUSY = (408, 425, 429, 502, 503, 504)  # statuses of a server that may answer later
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # never asked through a proxy
ANSWERS = "/v1/completions"
# of each request: nothing but the temperature changes the probabilities, whatever the model folder's
# generation_config.json has, and the answer comes with tokens and their log-probabilities
AS_DRAWN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "logprobs": 0, "return_token_ids": True}
AS_DRAWN |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False}
AS_DRAWN |= {"ignore_eos": True}  # the ends are those of the run, which each request names
UNLABELLED = "default"  # the label of weights that a server has since it was started
FAILED = (OSError, HTTPException)  # a connection that did not come about, or broke
HOTTEST = 2.0  # temperature
MOST_QUOTED = 300
COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1"


class StartedAnew(Exception):
    """The server was started anew, and has other weights than it was given."""


class ServerClient:
    """One rank's requests of the server. Several threads may ask for answers.

    label: the name of the weights that the server should have, which it forgets when it is started anew.
    """

    label = UNLABELLED
    dtype: str | None = None  # of the server's weights, such as torch.bfloat16

    def __init__(self, settings: RolloutServer, field: str) -> None:
        """field: the settings' name in the run file."""
        self._field = field
        self._url, self._limit, self._key = settings.url.rstrip("/"), settings.time_limit, settings.key
        is_here = urlsplit(settings.url).hostname in LOOPBACK
        self._opener = build_opener(*([ProxyHandler({})] if is_here else []), _NoRedirects)
        self._model = ""  # the name by which answers are asked for

    # --- before the first answer --------------------------------------------------------------------------------------

    def check(self, longest: int, temperature: float, with_adapter: bool, reads_logprobs: bool = True) -> None:
        """Learns the name of the server's model. Raises UserError with all that keeps the server from answering.

        longest: tokens of a prompt with its answer, at most. temperature: at which tokens are drawn. reads_logprobs:
        whether log-probabilities have to be those of the draws.
        """
        if self._key is not None and not os.environ.get(self._key):
            raise UserError(
                [Problem(f"{self._field}.key", f"the variable {self._key} is not set", f"export {self._key}=...")]
            )
        try:
            served = self._once("/v1/models", None, min(self._limit, 30.0))["data"][0]
        except (_Refused, *FAILED, ValueError, LookupError, TypeError) as error:
            why = f"no vLLM answers there: {_reason(error)}"
            raise UserError([Problem(f"{self._field}.url", why, f"start it: {COMMAND}")]) from None
        self._model = ADAPTER if with_adapter else str(served["id"])
        problems = [
            *self._too_short(served, longest),
            *self._of_its_settings(temperature, with_adapter, reads_logprobs),
        ]
        if problems:
            raise UserError(problems)

    def _too_short(self, served: Mapping[str, Any], longest: int) -> list[Problem]:
        most = served.get("max_model_len")
        if not isinstance(most, int) or most >= longest:
            return []
        why = f"it takes {most:,} tokens, and a prompt with its answer has up to {longest:,}"
        return [
            Problem(
                self._field, why, f"start it with --max-model-len {longest}, or lower data.length or max_new_tokens"
            )
        ]

    def _of_its_settings(self, temperature: float, with_adapter: bool, reads_logprobs: bool) -> list[Problem]:
        try:
            found = self._once("/server_info?config_format=json", None, min(self._limit, 60.0))["vllm_config"]
            mode, lora = found["model_config"]["logprobs_mode"], found.get("lora_config")
            self.dtype = found["model_config"].get("dtype")
            self._once("/weight_info", None, min(self._limit, 60.0))["weight_version"]
        except (_Refused, *FAILED, ValueError, LookupError, TypeError):
            why = "it does not let its weights be replaced (/server_info and /weight_info do not answer)"
            fix = f"start vLLM 0.30 or later in development mode, where only this run reaches it: {COMMAND}"
            return [Problem(self._field, why, fix)]
        problems = []
        if temperature > HOTTEST:
            why = f"vLLM draws at no temperature above {HOTTEST:g}, and the run asks for {temperature:g}"
            problems.append(Problem(self._field, why, f"give at most {HOTTEST:g}, or leave the server out"))
        if reads_logprobs and temperature != 1 and mode != "processed_logprobs":
            why = f"its log-probabilities are {mode}, which are not those at temperature {temperature:g}"
            problems.append(Problem(self._field, why, "start it with --logprobs-mode processed_logprobs"))
        if with_adapter and not lora:
            fix = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank RANK"
            problems.append(Problem(self._field, "the run trains an adapter, and it takes none", fix))
        return problems

    # --- weights ------------------------------------------------------------------------------------------------------

    def load(self, folder: Path, label: str) -> None:
        """Lets the server load a model's weights from a folder that it sees, under a label. Raises RunError."""
        given = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._load("/collective_rpc", given, f"to load the weights in {folder}, which it has to see", label)

    def load_adapter(self, folder: Path, label: str) -> None:
        """Lets the server load an adapter, after it has forgotten the one before. Raises RunError.

        Not load_inplace: with it vLLM reads the folder again at later requests, and ends where that is gone.
        """
        given = {"lora_name": ADAPTER, "lora_path": str(folder)}
        self._load("/v1/load_lora_adapter", given, f"to load the adapter in {folder}, which it has to see", label)

    def _load(self, path: str, given: Mapping[str, Any], what: str, label: str) -> None:
        """Names the weights first: a label that is there at the end was not lost in a new start on the way."""
        self.label = label
        while True:
            self._asked("/update_weight_version", {"new_version": label}, "to name its weights")
            if "lora_name" in given:
                self._forget_adapter()
            self._asked(path, given, what)
            self._forget_prefixes()
            with suppress(StartedAnew):
                return self.check_label()

    def _forget_adapter(self) -> None:
        try:
            self._once("/v1/unload_lora_adapter", {"lora_name": ADAPTER}, self._limit)
        except (_Refused, *FAILED):
            return  # it has none; where it does not answer, loading says so

    def check_label(self) -> None:
        """Raises StartedAnew if the server has lost the weights that it was given, and RunError if something else gave
        it others."""
        there = str(self._asked("/weight_info", None, "which weights it has").get("weight_version"))
        if there == UNLABELLED != self.label:
            raise StartedAnew
        if there != self.label:
            why = f"{self._url} was given other weights ({there}) while it answered"
            raise RunError(f"{why}: another run uses it; give each run a server of its own")

    def _forget_prefixes(self) -> None:
        """Drops keys and values of prompts, which other weights computed."""
        end = time.monotonic() + self._limit
        while self._asked("/reset_prefix_cache", {}, "to forget its prefix cache").get("success") is False:
            if time.monotonic() > end:
                raise RunError(f"{self._url} keeps its prefix cache: something else uses this server; give it its own")
            time.sleep(FIRST_PAUSE)

    # --- answers ------------------------------------------------------------------------------------------------------

    def drawn(
        self,
        ids: tuple[int, ...],
        most: int,
        temperature: float,
        seed: int,
        ends: frozenset[int],
        is_over: Callable[[], bool] = lambda: False,
    ) -> Drawn:
        """Returns an answer of at most so many tokens, the one that ends it among them. is_over: whether it is not
        wanted any more, so that no further attempt is made. Raises RunError."""
        given = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": most,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": sorted(ends),
            **AS_DRAWN,
        }
        found = self._asked(ANSWERS, given, "for an answer", is_over)
        try:
            choice = found["choices"][0]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            drawn = Drawn([int(each) for each in tokens], [float(each) for each in logprobs])
        except (LookupError, TypeError, ValueError):
            raise RunError(f"{self._url} answered without tokens and their log-probabilities: take vLLM 0.32") from None
        if not 0 < len(drawn.tokens) == len(drawn.logprobs) <= most or not all(map(math.isfinite, drawn.logprobs)):
            count = f"{len(drawn.tokens)} tokens and {len(drawn.logprobs)} log-probabilities"
            raise RunError(f"{self._url} answered with {count} where up to {most} were asked for")
        if len(drawn.tokens) < most and drawn.tokens[-1] not in ends:
            why = f"cut an answer off after {len(drawn.tokens)} of {most} tokens ({choice.get('finish_reason')})"
            raise RunError(f"{self._url} {why}: does something else use it, which has paused it?")
        return drawn

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _asked(
        self, path: str, given: Mapping[str, Any] | None, what: str, is_over: Callable[[], bool] = lambda: False
    ) -> Any:
        """Asks until the server answers or the time is over. what: completes "was asked"."""
        end, pause, troubled = time.monotonic() + self._limit, FIRST_PAUSE, False
        while True:
            try:
                found = self._once(path, given, max(end - time.monotonic(), 0.001))
                if troubled and path == ANSWERS:
                    self.check_label()
                return found
            except _Refused as error:
                if error.status not in BUSY and (error.status != 500 or path != ANSWERS):
                    if troubled and path == ANSWERS:
                        self.check_label()  # started anew, it knows no adapter
                    raise self._failed(what, error) from None
                why: Exception = error
            except FAILED as error:
                why = error
            if end - time.monotonic() <= pause:
                raise self._failed(what, why) from None
            troubled = True
            time.sleep(pause)
            if is_over():
                raise self._failed(what, why) from None
            pause = min(2 * pause, LONGEST_PAUSE)

    def _failed(self, what: str, error: Exception) -> RunError:
        then = "Answers that came are kept; once it answers again, go on with --resume"
        if isinstance(error, _Refused) and error.status == 500:  # vLLM keeps half of a load that failed
            then = "Start it anew with this run's model, then go on with --resume: answers that came are kept"
        return RunError(f"the server {self._url} was asked {what}: {_reason(error)}. {then}")

    def _once(self, path: str, given: Mapping[str, Any] | None, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self._key, '')}"
        body = None if given is None else json.dumps(given).encode()
        try:
            with self._opener.open(Request(self._url + path, body, headers), timeout=seconds) as answer:
                text = answer.read()
        except HTTPError as error:
            with error:
                raise _Refused(error.code, error.read(10_000).decode(errors="replace")) from None
        try:
            return json.loads(text)
        except ValueError:
            return {}  # /v1/load_lora_adapter answers with a sentence


def _reason(error: Exception) -> str:
    return clipped(str(error) if isinstance(error, _Refused) else last_line(error), MOST_QUOTED)


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, with which the key would go elsewhere."""

    def redirect_request(self, *args: Any) -> None:
        del args


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text.split())}")
        self.status = status
