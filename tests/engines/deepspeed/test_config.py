"""The JSON that DeepSpeed is started with."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config.engines import DeepspeedEngine
from drivetrain.config.precision import PRECISIONS
from drivetrain.engines.deepspeed.config import zero_json


def zero(sizes: list[int], **options: Any) -> dict[str, Any]:
    block = DeepspeedEngine(name="deepspeed", **options)
    found: dict[str, Any] = zero_json(block, PRECISIONS["fp32"], 1.0, sizes, on_gpu=False)["zero_optimization"]
    return found


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ([1_000] * 600, 600_000),  # a small model at once: what a reduction costs is its start
        ([1_000_000] * 10, 4_000_000),
        ([1_000_000] * 100, 25_000_000),  # a quarter
        ([10_000_000] * 1000, 50_000_000),  # a bound of its own, whatever the model's size
        ([90_000_000, 1_000], 90_000_000),  # but the largest parameter has to go in
    ],
)
def test_what_is_reduced_at_once_grows_with_the_model_and_is_bounded(sizes: list[int], bucket: int) -> None:
    assert zero(sizes)["reduce_bucket_size"] == bucket


def test_what_a_users_json_says_of_buckets_counts_up_to_the_size_of_the_model() -> None:
    def words(size: float) -> Any:
        return zero([1_000] * 600, config={"zero_optimization": {"reduce_bucket_size": size}})["reduce_bucket_size"]

    assert words(7_000) == 7_000
    assert words(5e8) == 600_000, "DeepSpeed reserves it in full"
