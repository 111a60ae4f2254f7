"""Block expansion (LLaMA Pro): blocks added to a trained model that start without effect and are trained alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import problem
from drivetrain.memory.recompute import repeated_blocks
from drivetrain.models.language_options import evaluating

FIELD = "workload.model.add_blocks"
# the layers whose output is added to a block's input, as Transformers' decoders name them
LAST = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "dense", "dense_4h_to_h", "fc_out")


def add_blocks(model: Any, count: int) -> int:
    """Inserts `count` blocks in place: a copy behind each L / count-th of L blocks, with what it adds to its input at
    zero, and trains them alone (Wu et al. 2024, "LLaMA Pro: Progressive LLaMA with Block Expansion", section 3.2).
    Returns the number of trained parameters.

    Raises UserError if the blocks cannot be divided so, or if a copy would not start without effect.
    """
    blocks = repeated_blocks(model)
    holder = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and [*m] == blocks), None)
    if holder is None or not blocks or len(blocks) % count:
        divisors = [str(n) for n in range(1, len(blocks) + 1) if len(blocks) % n == 0]
        has = f"{len(blocks)} blocks" if holder is not None and blocks else "no list of blocks that repeat"
        fix = f"give one of {', '.join(divisors)}" if holder is not None and blocks else "leave it out"
        raise problem(FIELD, f"{count} blocks were asked for, and {type(model).__name__} has {has}", fix)
    before = _logits(model)
    stride = len(blocks) // count
    made = [_silent(copy.deepcopy(block)) for block in blocks[stride - 1 :: stride]]
    model.requires_grad_(False)
    for added in made:
        added.requires_grad_(True)
    for number, added in reversed([*enumerate(made, start=1)]):  # from the end: places before it stay
        holder.insert(number * stride, added)
    for number, block in enumerate(holder):
        for module in block.modules():
            if isinstance(getattr(module, "layer_idx", None), int):  # its place in a cache of keys and values
                module.layer_idx = number  # type: ignore[assignment]
    _describe(model.config, len(blocks), stride)
    after = _logits(model)
    if before is not None and after is not None and not torch.equal(before, after):
        why = f"a copy of {type(blocks[0]).__name__} without its last layers ({', '.join(LAST)}) still has an effect"
        raise problem(FIELD, why, "leave it out")
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _silent(block: nn.Module) -> nn.Module:
    """Sets to zero what the block adds to its input."""
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in LAST:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
    return block


def _describe(config: Any, before: int, stride: int) -> None:
    """Writes the new number of blocks into the config; a list of one entry a block is extended alike."""
    for name, value in [*vars(config).items()]:
        if isinstance(value, list) and len(value) == before and name.startswith(("layer", "mlp_layer", "no_rope")):
            groups = (value[start : start + stride] for start in range(0, before, stride))
            setattr(config, name, [each for group in groups for each in (*group, group[-1])])
    config.num_hidden_layers = before + before // stride


@torch.no_grad()
def _logits(model: Any) -> Tensor | None:
    """Returns the logits of a few tokens; None without numbers."""
    weight = next(model.parameters())
    if weight.is_meta:
        return None
    ids = torch.arange(5, device=weight.device)[None] % model.get_input_embeddings().num_embeddings
    with evaluating(model):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
