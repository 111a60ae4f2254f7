"""The bench that kills runs in uploads: a run passes it, and what is lost or left over does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import store_kills
from bench.store_kills import Killed, killed_run, page
from drivetrain.checkpoint.mirror.index import Complete
from drivetrain.runtime.object_store import ObjectStore
from tests.store_server import StoreServer
from tests.training.test_mirroring import run_in, train


@pytest.mark.long
def test_a_run_that_is_killed_in_its_uploads_on_one_machine_after_another_ends_with_the_same_bits(
    bucket: str, store_server: StoreServer, tmp_path: Path
) -> None:
    found = killed_run(store_server, tmp_path, 4, 120, random.Random(3), 0.0)  # a lease takes 45 s
    assert len(found.moments) == 4
    assert found.verified >= found.completed >= 3
    assert "| moto | 4 |" in page({"moto": found}, 3)
    assert bucket, "whose fixture has the environment restored"


def test_a_checkpoint_that_is_lost_or_damaged_ends_the_bench(bucket: str, tmp_path: Path) -> None:
    train(run_in(tmp_path, bucket, steps=4))
    named: dict[str, Complete] = {}
    found = Killed(4)
    store_kills._check_index(bucket, tmp_path / "checked", named, found)
    assert (found.completed, found.verified) == (2, 2)
    lost = next(iter(named.values())).model_copy(update={"prefix": "step-00000004-a-b"})
    with pytest.raises(AssertionError, match="is gone"):
        store_kills._check_index(bucket, tmp_path / "checked", {**named, lost.prefix: lost}, found)
    [newest] = [each for each in named.values() if each.step == 4]
    ObjectStore(bucket).delete([f"checkpoints/{newest.prefix}/model.safetensors"])
    with pytest.raises(Exception, match=r"is damaged: .*model\.safetensors"):
        store_kills._check_index(bucket, tmp_path / "checked", named, found)
