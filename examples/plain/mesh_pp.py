"""Pipeline stages by hand: `torchrun --nproc-per-node 2 examples/plain/mesh_pp.py`. Its run file: mesh_pp.yaml."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mesh_common import BATCH, CLIP, CONFIG, LENGTH, LR, build_model, loss_of, train
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICRO_BATCHES = 8

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Stage(nn.Module):
    """A part of the layers; the first has the embedding, the last the norm and the head."""

    def __init__(self) -> None:
        super().__init__()
        model = build_model()
        each = len(model.model.layers) // world
        self.layers, self.rotary = model.model.layers[rank * each : (rank + 1) * each], model.model.rotary_emb
        self.embedding = model.model.embed_tokens if rank == 0 else None
        self.norm, self.head = (model.model.norm, model.lm_head) if rank == world - 1 else (None, None)

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        positions = torch.arange(LENGTH)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


module = Stage()
hidden = torch.empty(BATCH // MICRO_BATCHES, LENGTH, CONFIG.hidden_size, device="meta", requires_grad=True)
ids = torch.empty(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64, device="meta")
logits = torch.empty(BATCH // MICRO_BATCHES, LENGTH, CONFIG.vocab_size, device="meta", requires_grad=True)
stage = PipelineStage(
    module, rank, world, torch.device("cpu"),
    input_args=ids if rank == 0 else hidden, output_args=logits if rank == world - 1 else hidden,
)  # fmt: skip
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(module.parameters(), lr=LR)


def clip() -> None:
    gradients = [p.grad for p in module.parameters()]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(squares)
    torch._foreach_mul_(gradients, (CLIP / (squares.sqrt() + 1e-6)).clamp(max=1.0))


def step(inputs: Tensor, targets: Tensor) -> float:
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(inputs, return_outputs=False)
    elif rank == world - 1:
        schedule.step(target=targets, losses=losses, return_outputs=False)
    else:
        schedule.step(return_outputs=False)
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return sum(float(loss) for loss in losses) / MICRO_BATCHES


train(step)
