from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.models.normalisation import batch_norm_to_group_norm, has_batch_norm


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.Sequential(nn.Conv2d(48, 64, 3), nn.BatchNorm2d(64))
    )


def test_every_batch_norm_is_replaced_at_any_depth() -> None:
    model = small_network()
    assert has_batch_norm(model)
    assert batch_norm_to_group_norm(model) == 2
    assert not has_batch_norm(model)
    assert isinstance(model[1], nn.GroupNorm)
    assert isinstance(model[2][1], nn.GroupNorm)


def test_a_subclass_of_batch_norm_is_replaced_too() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(64))
    assert batch_norm_to_group_norm(model) == 1
    assert not has_batch_norm(model)


def test_gain_and_bias_are_kept_under_their_names() -> None:
    model = small_network()
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    before = {name: value.clone() for name, value in model.named_parameters()}
    batch_norm_to_group_norm(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("channels", "groups"), [(256, 32), (64, 32), (48, 24), (32, 8), (16, 4), (12, 3), (7, 1), (1, 1)]
)
def test_groups_divide_the_channels_and_hold_more_than_one(channels: int, groups: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(channels))
    batch_norm_to_group_norm(model)
    assert model[0].num_groups == groups


def test_the_result_of_a_sample_no_longer_depends_on_its_batch() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 9, 9)

    def first_alone_and_in_its_batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return model(images[:1]), model(images)[:1]

    model = small_network().train()
    alone, together = first_alone_and_in_its_batch(model)
    assert not torch.allclose(alone, together, atol=1e-3)
    batch_norm_to_group_norm(model)
    alone, together = first_alone_and_in_its_batch(model)
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)
