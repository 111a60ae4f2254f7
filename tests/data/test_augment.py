from __future__ import annotations

import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.augment import Augmentation, counter_bits, shifted
from tests.properties import examples


@settings(deadline=None, max_examples=examples(60))
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    pad=st.integers(0, 12),
    top=st.integers(0, 24),
    left=st.integers(0, 24),
)
def test_shifting_is_padding_and_cropping_back(height: int, width: int, pad: int, top: int, left: int) -> None:
    top, left = top % (2 * pad + 1), left % (2 * pad + 1)
    image = np.arange(1, height * width * 3 + 1, dtype=np.uint16).reshape(height, width, 3)
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    expected = padded[top : top + height, left : left + width]
    np.testing.assert_array_equal(shifted(image, pad - top, pad - left), expected)


def test_a_sample_is_augmented_alike_whenever_it_is_loaded() -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    augment = Augmentation(seed=1, crop_padding=2, flip=True)
    first = [augment(image, epoch, index) for epoch in range(3) for index in range(20)]
    again = [augment(image, epoch, index) for epoch in reversed(range(3)) for index in reversed(range(20))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_seed_epoch_and_index_each_change_the_draw() -> None:
    draws = {counter_bits(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(10)}
    assert len(draws) == 1000


def test_no_global_generator_is_read_or_moved() -> None:
    image, augment = np.ones((8, 8, 3), dtype=np.uint8), Augmentation(seed=0, crop_padding=4, flip=True)
    np.random.seed(0)
    torch.manual_seed(0)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index, union-attr]
    for index in range(10):
        augment(image, 0, index)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_crops_and_mirrorings_are_evenly_spread() -> None:
    """A single bright pixel tells where it went: each of 5 x 5 places, mirrored or not, 2 % of the draws (±5 sigma)."""
    image = np.zeros((5, 8, 1), dtype=np.uint8)
    image[2, 2, 0] = 1  # mirrored, its columns 0..4 become 7..3
    augment = Augmentation(seed=3, crop_padding=2, flip=True)
    count, places = 10_000, np.zeros((5, 8))
    for index in range(count):
        places += augment(image, index // 1000, index % 1000)[..., 0]
    shares = np.array([1, 1, 1, 2, 2, 1, 1, 1]) / 50 * np.ones((5, 1))  # columns 3 and 4 are reached from both sides
    assert places.sum() == count
    assert (np.abs(places / count - shares) < 5 * np.sqrt(shares / count)).all()


def test_without_augmentation_the_very_image_comes_back() -> None:
    image = np.ones((4, 4, 3), dtype=np.uint8)
    assert Augmentation(seed=0)(image, 5, 7) is image


def test_drawing_and_moving_stay_cheap() -> None:
    image, augment = np.zeros((32, 32, 3), dtype=np.uint8), Augmentation(seed=0, crop_padding=4, flip=True)
    seconds = []
    for _ in range(20):  # the best of many: a busy machine must not fail it
        start = time.perf_counter()
        for index in range(100):
            augment(image, 0, index)
        seconds.append((time.perf_counter() - start) / 100)
    assert min(seconds) < 60e-6
