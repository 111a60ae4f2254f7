"""ONNX graphs with a cache beside the models that they were made of, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.generation.small_models import model_of


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2"])
def test_a_graph_with_a_cache_gives_the_models_logits_beyond_its_sliding_windows_too(kind: str, tmp_path: Path) -> None:
    """Windows of 8 tokens, in all layers (Mistral) and in every second one (Gemma 2); 30 tokens of two sequences."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from drivetrain.export import cached_graph, graph_format
    from drivetrain.export.runtimes.onnx_runtime import _in_steps

    model = model_of(kind).requires_grad_(False)
    assert cached_graph.has_cache(model)
    with graph_format._quiet():
        cached_graph.write(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    caches = [each for each in session.get_inputs() if each.name.startswith("past_key_values.")]
    assert len(caches) == 2 * model.config.num_hidden_layers
    ids = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    found, expected = _in_steps(session, caches, ids.numpy()), model(input_ids=ids).logits.numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
