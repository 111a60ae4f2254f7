"""Functions of torch as a CUDA device has them, for a trace whose tensors lie on the CPU.

Autocast's lists differ between the two: on a GPU normalisations, softmax, powers, sums and most losses compute and
answer in fp32, on a CPU many of them stay in 16 bits. The lists are those of torch/include/ATen/autocast_mode.h,
AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.

Dropout on a GPU keeps a byte an element for the backward pass, on a CPU a number of the input's dtype. And attention
with dropout keeps no scores on a GPU, while a CPU has no kernel for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, autograd
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

AFTER_DROPOUT = ("is_causal",)  # of scaled_dot_product_attention's arguments that may be given by position
HALVES = (torch.float16, torch.bfloat16)
# by the names that functions of torch, of torch.nn.functional and of tensors have; inputs are cast to fp32
CAST = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    __pow__ __rpow__ __rdiv__ __rtruediv__
    """.split()  # noqa: SIM905 - seventy lines of names else
)
# these read 16 bits and answer in fp32, unless they are asked for a dtype
ANSWERING = frozenset({"prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"}) | {
    "linalg_vector_norm",
    "linalg_matrix_norm",
}


@contextmanager
def on_cuda() -> Iterator[None]:
    """While the block runs, functions are those of a CUDA device, in backward passes too.

    torch leaves a mode while it answers a function, and `backward` is one: without the mode, what is recomputed in it
    would keep other tensors than the forward pass did, which recompute refuses.
    """
    mode, run = CudaFunctions(), autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_backward
    try:
        with mode:
            yield
    finally:
        autograd._engine_run_backward = run


class CudaFunctions(TorchFunctionMode):
    """While it is active, functions keep what they would keep on a GPU, and have the dtypes of its autocast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name, kwargs = _name(func), kwargs or {}
        if name is None:
            return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if name in CAST:
                args, kwargs = tree_map_only(Tensor, _in_fp32, (args, kwargs))
            elif name in ANSWERING and _is_half(args) and not _names_dtype(args, kwargs):
                kwargs = {**kwargs, "dtype": torch.float32}
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return func(*args[:4], **{**kwargs, "dropout_p": 0.0}, **dict(zip(AFTER_DROPOUT, args[5:], strict=False)))
        return func(*args, **kwargs)


@functools.lru_cache(4096)
def _name(func: Callable[..., Any]) -> str | None:
    """Returns the name of a function that does something else on a GPU; None for the others, nearly all."""
    name = getattr(func, "__name__", "")
    others = (functional.dropout, functional.scaled_dot_product_attention)
    return name if name in CAST or name in ANSWERING or func in others else None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Takes the arguments of torch.nn.functional.dropout."""
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _is_half(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].dtype in HALVES


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _names_dtype(args: Any, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in args)
