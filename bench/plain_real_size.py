"""The loop that one writes by hand for a language model of real size.

    python bench/plain_real_size.py CASE MODEL TEXT

Under torchrun where the case has several ranks. Each rank makes its share of the global batch; the optimizer is
PyTorch's fused AdamW, autocast is to bf16, and nothing is measured, checked or saved beside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from real_size_tracker import VARIABLE, note
from torch import nn

LENGTH, GLOBAL_BATCH, STEPS, LR = 64, 2, 4, 1e-5
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
Step = Callable[[torch.Tensor], torch.Tensor]


def main(case: str, folder: str, text: str) -> None:
    torch.manual_seed(0)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not case.startswith("zero"):
        dist.init_process_group("gloo")
    step = STEPS_OF[case](folder)
    shares = (0, 1) if case in ("tp", "pp") else (rank, world)  # whose ranks make one batch together
    for number, ids in enumerate(batches(text, *shares), 1):
        loss = step(ids)
        if rank == 0 and VARIABLE in os.environ:
            note(number, float(loss))


def batches(text: str, rank: int, world: int) -> Iterator[torch.Tensor]:
    """(samples of this rank, LENGTH + 1) of the text's bytes, STEPS times."""
    ids = torch.tensor(list(Path(text).read_bytes()))
    own = GLOBAL_BATCH // world
    for step in range(STEPS):
        first = step * GLOBAL_BATCH + rank * own
        yield torch.stack([ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(first, first + own)])


def loaded(folder: str, **given: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    model.config.use_cache = False
    return model.train()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def usual(model: nn.Module) -> Step:
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = [[p for p in trained if hasattr(p, "placements") is spread] for spread in (False, True)]
    optimizer = torch.optim.AdamW([{"params": each} for each in kinds if each], lr=LR, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def single(folder: str) -> Step:
    return usual(loaded(folder))


def ddp(folder: str) -> Step:
    return usual(nn.parallel.DistributedDataParallel(loaded(folder), gradient_as_bucket_view=True))


def fsdp(folder: str) -> Step:
    from torch.distributed.fsdp import fully_shard

    model: Any = loaded(folder)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return usual(model)


def zero(stage: int) -> Callable[[str], Step]:
    def made(folder: str) -> Step:
        import deepspeed

        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(
            model=loaded(folder),
            config={
                "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
                "zero_optimization": {"stage": stage},
                "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
                "zero_force_ds_cpu_optimizer": False,
                "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
            },
        )

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return made


def tp(folder: str) -> Step:
    """Attention and feed-forward by heads and columns, as Transformers' plan for this model has it, and the tied
    embedding by tokens."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = loaded(folder)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    by_token = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model.model.embed_tokens, mesh, by_token)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    model.lm_head.weight = model.model.embed_tokens.weight
    return usual(model)


class Stage(nn.Module):
    """The first or the second half of the layers, with what stands at that end."""

    def __init__(self, model: Any, is_first: bool) -> None:
        super().__init__()
        layers, half = list(model.model.layers), len(model.model.layers) // 2
        self.layers = nn.ModuleList(layers[:half] if is_first else layers[half:])
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if is_first else None
        self.norm, self.head = (None, None) if is_first else (model.model.norm, model.lm_head)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        places = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=places, position_embeddings=angles)
        return hidden if self.head is None else self.head(self.norm(hidden))

    @property
    def tied(self) -> nn.Parameter:
        return (self.embedding or self.head).weight


def pp(folder: str) -> Step:
    """GPipe over two stages; the tied weight is on both, and its gradients are summed."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    is_first = dist.get_rank() == 0
    module = Stage(loaded(folder), is_first)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    stage = PipelineStage(module, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    schedule = ScheduleGPipe(stage, GLOBAL_BATCH, loss_fn=loss_of)

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        with torch.autocast("cpu", torch.bfloat16):
            if is_first:
                schedule.step(ids[:, :-1])
            else:
                schedule.step(target=ids[:, 1:], losses=losses)
        dist.all_reduce(module.tied.grad)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def lora(folder: str) -> Step:
    import peft

    return usual(peft.get_peft_model(loaded(folder), peft.LoraConfig(task_type="CAUSAL_LM", **LORA)))


def qlora(folder: str) -> Step:
    import peft

    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = loaded(folder, quantization_config=quantised)
    return usual(peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA)))


STEPS_OF: dict[str, Callable[[str], Step]] = {
    "single": single,
    "ddp": ddp,
    "fsdp": fsdp,
    "zero2": zero(2),
    "zero3": zero(3),
    "tp": tp,
    "pp": pp,
    "lora": lora,
    "qlora": qlora,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
