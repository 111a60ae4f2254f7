"""The first texts of each class, for the report of a text classifier's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drivetrain.errors import clipped
from drivetrain.workloads.text_batches import TextSamples, decoded

CLASS_SAMPLES = "class samples"
MOST_CLASSES, OF_EACH = 20, 2  # that the report shows
MOST_CHARACTERS = 200  # of a text
MOST_TOKENS = 208  # that are read for it: one has a character at least, but for the marks around a text


def class_samples(samples: TextSamples, classes: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Returns the part of the report: {"class", "texts"} of each of the first classes, with its first texts as the
    model reads them, without what is cut at max_length."""
    assert samples.labels is not None
    found = []
    for number, name in enumerate(classes[:MOST_CLASSES]):
        places = np.flatnonzero(samples.labels == number)[:OF_EACH]
        beginnings = (samples.load(int(place), 0)[0][:MOST_TOKENS] for place in places)
        texts = [clipped(decoded(tokenizer, ids), MOST_CHARACTERS) for ids in beginnings]
        found.append({"class": name, "texts": texts})
    return {CLASS_SAMPLES: found}
