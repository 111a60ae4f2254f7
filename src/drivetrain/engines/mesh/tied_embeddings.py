"""Weights that the first and the last pipeline stage both hold: embeddings that a model ties to its head.

Both stages keep such a weight and update it. Their gradients are summed after each window, so that both make the same
update (Shoeybi et al. 2019, "Megatron-LM"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engines.state import local_part, place_gradient
from drivetrain.errors import problem

CHUNK = 2**23  # numbers that are exchanged at once, which bounds what the exchange holds


class TiedEnds:
    """The tied weights of one rank: those of its stage if that is the first or the last one, else none."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], group: dist.ProcessGroup | None, traced: bool = False
    ) -> None:
        """names: as in model.named_parameters() on either end. group: the ranks of one pipeline. traced: whether the
        other end is not there, so that its pieces are not compared."""
        self.parameters: list[nn.Parameter] = []
        if not names:
            return
        stage, last = dist.get_rank(group), dist.get_world_size(group) - 1
        self._group, self._other_end = group, last - stage
        if stage in (0, last):
            self.parameters = [model.get_parameter(name) for name in names]
        if not traced:
            self._check_same_pieces(names)

    def _check_same_pieces(self, names: Sequence[str]) -> None:
        """Raises UserError, on all stages, if tensor ranks split one place of a weight and not the other."""
        of_stages: list[Any] = [None] * dist.get_world_size(self._group)
        own = [(tuple(local_part(p).shape), str(getattr(p, "placements", None))) for p in self.parameters]
        dist.all_gather_object(of_stages, own, group=self._group)
        for name, first, last in zip(names, of_stages[0], of_stages[-1], strict=True):
            if first != last:
                why = f"{name} is tied over the first and the last stage, and the plan splits it in two ways"
                fix = "give workload.model.config.tie_word_embeddings=false where the model is made from a config, "
                raise problem("engine", why, f"{fix}or leave pp or tp out")

    def __contains__(self, parameter: Tensor) -> bool:
        return any(parameter is own for own in self.parameters)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums in place. A sum of two numbers does not depend on their order, so both ends have the same bits."""
        for parameter in self.parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            place_gradient(parameter)
            gradient = local_part(parameter.grad)
            rows = max(1, CHUNK // max(1, gradient[:1].numel())) if gradient.numel() else 1
            for part in gradient.split(rows):
                part.add_(self._exchanged(part.contiguous()))

    def _exchanged(self, own: Tensor) -> Tensor:
        """Returns the other end's tensor in this place."""
        theirs = torch.empty_like(own)
        to_and_fro = [
            dist.P2POp(dist.isend, own, group=self._group, group_peer=self._other_end),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=self._other_end),
        ]
        for work in dist.batch_isend_irecv(to_and_fro):
            work.wait()
        return theirs
