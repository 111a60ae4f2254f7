"""POST /v1/classify and POST /v1/embeddings: models that read texts or pictures."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, Field

from drivetrain.errors import RunError
from drivetrain.inference.encoders import PictureClassifier, Reader, TextEncoder
from drivetrain.inference.serve.fields import Body
from drivetrain.inference.serve.metrics import Metrics
from drivetrain.inference.serve.served import check_name
from drivetrain.runtime.openmp import end_helpers
from drivetrain.web.limits import Places
from drivetrain.web.refusals import Refusal

T = TypeVar("T")
MOST_INPUTS = 2048  # as OpenAI's
AT_ONCE, TOKENS_AT_ONCE = 32, 8192  # texts, and tokens with their padding, that run forward together
CHARACTERS_AT_ONCE = 1 << 16  # of texts that are tokenised in one turn

Ids = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Annotated[str, Field(strict=True)]], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]


class EmbeddingRequest(Body):
    """The body of a request for embeddings."""

    input: str | Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)] = (
        Field(description="A text, texts, token ids, or lists of token ids.")
    )
    model: str | None = Field(None, max_length=1000)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="The model's own width; no other is made here.")


class ClassifyRequest(Body):
    """The body of a request for classes."""

    input: str | Texts = Field(description="A text or texts; of pictures data URLs (data:image/png;base64,...).")
    model: str | None = Field(None, max_length=1000)


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Classified(BaseModel):
    """truncated: whether the text was longer than what the model read of it. probabilities: of up to 100 classes."""

    index: int
    label: str
    probability: float
    probabilities: dict[str, float] | None = None
    num_classes: int
    truncated: bool | None = None


class Classifications(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: Usage | None = None


@dataclass
class ServedReader:
    """A model that reads. seconds: that one request may take."""

    model: Reader
    places: Places
    metrics: Metrics
    seconds: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))

    def __post_init__(self) -> None:
        end_helpers()  # of the thread that loaded the model

    @property
    def names(self) -> list[str]:
        return [self.model.name]

    async def done(self, work: Callable[[], T]) -> T:
        """Returns the result of work, done on the model's thread: requests take turns there, a batch each."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)


async def embeddings(served: ServedReader, model: TextEncoder, body: EmbeddingRequest) -> dict[str, Any]:
    """Returns the body of the response. Raises Refusal."""
    check_name(body.model, served.names)
    width = int(model.model.config.hidden_size)
    if body.dimensions not in (None, width):
        raise Refusal(400, f"the model's vectors have {width} numbers: leave dimensions out", "invalid", "dimensions")
    ids = await _ids(served, model, body.input)
    served.metrics.prompt_tokens.inc(sum(map(len, ids)))
    found = np.zeros((len(ids), width), np.float32)
    for places in _batches(ids):
        found[places] = await served.done(functools.partial(model.embedded, [ids[place] for place in places]))
    encoded = body.encoding_format == "base64"
    shown = (_encoded(row) if encoded else row.tolist() for row in found)
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(shown)]
    return {"object": "list", "data": data, "model": body.model or model.name, "usage": _usage(ids)}


async def classified_texts(served: ServedReader, model: TextEncoder, body: ClassifyRequest) -> dict[str, Any]:
    """Returns the body of the response. Raises Refusal."""
    check_name(body.model, served.names)
    texts = [body.input] if isinstance(body.input, str) else body.input
    ids, cut = await _tokens(served, model, texts)
    served.metrics.prompt_tokens.inc(sum(map(len, ids)))
    rows: dict[int, dict[str, Any]] = {}
    for places in _batches(ids):
        found = await served.done(functools.partial(model.classified, [ids[place] for place in places]))
        rows |= zip(places, found, strict=True)
    more = [{"truncated": each} for each in cut]
    return {**_classes(body, model, [{**rows[place], **each} for place, each in enumerate(more)]), "usage": _usage(ids)}


async def classified_pictures(served: ServedReader, model: PictureClassifier, body: ClassifyRequest) -> dict[str, Any]:
    """Returns the body of the response. Raises Refusal."""
    check_name(body.model, served.names)
    given = [body.input] if isinstance(body.input, str) else body.input
    rows: list[dict[str, Any]] = []
    for start in range(0, len(given), AT_ONCE):
        part = list(enumerate(given))[start : start + AT_ONCE]
        pixels = [await served.done(functools.partial(_picture, model, *each)) for each in part]
        rows += await served.done(functools.partial(model.classified, pixels))
    return _classes(body, model, rows)


async def _ids(served: ServedReader, model: TextEncoder, given: Any) -> list[np.ndarray]:
    """Returns the tokens of each input."""
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(several[0], str):
        found, cut = await _tokens(served, model, several)
        long = np.flatnonzero(cut)
    else:
        found = await served.done(lambda: _known(model, several))
        long = np.flatnonzero([len(ids) > model.context_length for ids in found])
    if len(long):
        why = f"input {long[0]} has more than the model's {model.context_length:,} tokens: cut it into parts"
        raise Refusal(400, why, "context_length_exceeded", "input")
    return found


def _known(model: TextEncoder, given: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns tokens that a client sends. Raises Refusal for one that the model does not have."""
    known = int(model.model.get_input_embeddings().num_embeddings)
    if unknown := next((each for ids in given for each in ids if each >= known), None):
        raise Refusal(400, f"the vocabulary has no token {unknown}: it has {known:,}", "invalid_request", "input")
    return [np.array(ids) for ids in given]


async def _tokens(
    served: ServedReader, model: TextEncoder, texts: Sequence[str]
) -> tuple[list[np.ndarray], list[bool]]:
    """Returns the tokens of each text, and whether it was cut. Other requests take their turn between few texts."""
    ids: list[np.ndarray] = []
    cut: list[bool] = []
    for part in _parts(texts):
        tokens = await served.done(functools.partial(model.tokens, part))
        ids += np.split(tokens.ids, tokens.offsets[1:-1])
        cut += tokens.cut.tolist()
    return ids, cut


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts, in their order, in parts of at most CHARACTERS_AT_ONCE; a text that is longer is one by
    itself."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > CHARACTERS_AT_ONCE:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part


def _picture(model: PictureClassifier, number: int, url: str) -> np.ndarray:
    """Returns the pixels of a data URL. Nothing is fetched for a client."""
    head, comma, content = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        why = f"input {number} is no data URL (data:image/png;base64,...); no address is fetched"
        raise Refusal(400, why, "invalid_request", "input")
    try:
        return model.pixels(base64.b64decode(content, validate=True))
    except (binascii.Error, RunError) as error:
        raise Refusal(400, f"input {number}: {error}", "invalid_request", "input") from None


def _batches(ids: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Yields the places of texts that run forward together: those of like length, no more than TOKENS_AT_ONCE tokens
    with their padding."""
    batch: list[int] = []
    for place in sorted(range(len(ids)), key=lambda each: len(ids[each])):
        if batch and (len(batch) == AT_ONCE or (len(batch) + 1) * len(ids[place]) > TOKENS_AT_ONCE):
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _classes(body: ClassifyRequest, model: Reader, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    data = [{"index": place, **row, "num_classes": len(model.classes or ())} for place, row in enumerate(rows)]
    head = {"id": f"classify-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
    return {**head, "model": body.model or model.name, "data": data}


def _usage(ids: Sequence[np.ndarray]) -> dict[str, int]:
    count = sum(map(len, ids))
    return {"prompt_tokens": count, "total_tokens": count}


def _encoded(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
