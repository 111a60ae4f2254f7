"""fp8 in the configurations of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.made import notes_of, run_of

ACCELERATE = "distributed_type: {kind}\nmixed_precision: fp8\nnum_processes: 2\nfp8_config: {config}\n"
LLAMA = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\nbf16: true\nfp8: true\n"


@pytest.mark.parametrize(("kind", "engine"), [("MULTI_GPU", "ddp"), ("FSDP", "fsdp")])
def test_accelerates_fp8_is_fp8_mixed(kind: str, engine: str, tmp_path: Path) -> None:
    text = ACCELERATE.format(kind=kind, config="{backend: AO, pad_inner_dim: true}")
    raw = run_of(tmp_path, text)
    assert raw["precision"] == "fp8-mixed"
    assert str(raw["engine"]).count(engine)
    notes = notes_of(tmp_path, text)
    assert notes["mixed_precision"].fate == "changed"
    assert "the first linear layer too" in notes["mixed_precision"].why
    assert {notes[f"fp8_config.{key}"].fate for key in ("backend", "pad_inner_dim")} == {"unneeded"}


def test_transformer_engines_scales_become_torchaos_and_it_is_reported(tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="MULTI_GPU", config="{backend: TE, margin: 0, fp8_format: HYBRID}")
    notes = notes_of(tmp_path, text)
    assert notes["fp8_config.backend"].fate == "changed"
    assert "in place of TE's" in notes["fp8_config.backend"].why
    assert notes["fp8_config.margin"].fate == "unneeded"


def test_deepspeeds_fp8_is_refused(tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="DEEPSPEED", config="{}")
    assert notes_of(tmp_path, text)["mixed_precision"].fate == "refused"


def test_llama_factorys_fp8_is_fp8_mixed(tmp_path: Path) -> None:
    text = LLAMA + "fp8_backend: te\nfp8_enable_fsdp_float8_all_gather: true\n"
    assert run_of(tmp_path, text)["precision"] == "fp8-mixed"
    notes = notes_of(tmp_path, text)
    assert (notes["fp8"].fate, notes["bf16"].fate, notes["fp8_backend"].fate) == ("changed", "unneeded", "changed")
    assert notes["fp8_enable_fsdp_float8_all_gather"].fate == "unneeded"
    off = LLAMA.replace("fp8: true", "fp8: false") + "fp8_backend: auto\n"
    assert run_of(tmp_path, off)["precision"] == "bf16-mixed"
    assert notes_of(tmp_path, off)["fp8"].fate == "unneeded"
    under = LLAMA + "deepspeed: {zero_optimization: {stage: 2}}\n"
    assert notes_of(tmp_path, under)["fp8"].fate == "refused"
