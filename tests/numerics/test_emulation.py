from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from drivetrain.numerics.emulation import fp32_products

LOW = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place, relative


@pytest.fixture(params=LOW, ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def emulated() -> Iterator[None]:
    with fp32_products(True):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


A, B, C = draw(5, 7), draw(7, 6), draw(5, 6)
BATCHED_A, BATCHED_B, BATCHED_C = draw(3, 5, 7), draw(3, 7, 6), draw(3, 5, 6)
IMAGE, VOLUME, SEQUENCE = draw(2, 4, 6, 6), draw(2, 4, 5, 5, 5), draw(2, 4, 9)

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (A, B)),
    "bmm": (torch.bmm, (BATCHED_A, BATCHED_B)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=3), (C, A, B)),
    "addmm with a bias": (torch.addmm, (C[0], A, B)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=-2, alpha=0.25), (BATCHED_C, BATCHED_A, BATCHED_B)),
    "matmul, broadcast": (torch.matmul, (BATCHED_A, B)),
    "linear over three dimensions": (F.linear, (BATCHED_A, B.T, C[0])),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bki", a, b), (BATCHED_A, BATCHED_B)),
    "a transposed view": (lambda a, b: torch.mm(a.T, b.T), (B, A)),
    "nothing": (torch.mm, (A[:0], B)),
    "conv1d": (F.conv1d, (SEQUENCE, draw(6, 4, 3), draw(6))),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (IMAGE, draw(6, 4, 3, 3))),
    "conv2d, channels last": (
        F.conv2d,
        (IMAGE.contiguous(memory_format=torch.channels_last), draw(6, 4, 3, 3)),
    ),
    "conv3d": (F.conv3d, (VOLUME, draw(6, 4, 3, 3, 3))),
    "transposed conv2d": (F.conv_transpose2d, (IMAGE, draw(4, 6, 3, 3))),
    "depthwise conv2d": (lambda x, w: F.conv2d(x, w, groups=4), (IMAGE, draw(4, 1, 3, 3))),
    "conv2d of an empty batch": (F.conv2d, (IMAGE[:0], draw(6, 4, 3, 3))),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("product", "inputs"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_is_the_rounded_fp32_product_of_the_rounded_inputs(
    product: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    rounded = [x.to(dtype) for x in inputs]
    result = product(*rounded)
    expected = product(*(x.float() for x in rounded)).to(dtype)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("product", "inputs"), PRODUCTS.values(), ids=PRODUCTS)
def test_gradients_are_the_rounded_fp32_gradients(
    product: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    low = [x.to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in low]
    result, expected = product(*low), product(*wide)
    upstream = draw(*result.shape, dtype=dtype)
    result.backward(upstream)
    expected.backward(upstream.float())
    for mine, theirs in zip(low, wide, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        # sums over a broadcast dimension are PyTorch's own, in 16 bits
        tolerance = 4 * ROUNDING[dtype] * theirs.grad.abs().max().item() if theirs.grad.numel() else 0.0
        torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["mm", "addmm", "baddbmm", "conv1d", "conv2d", "depthwise conv2d"])
def test_emulated_and_native_kernels_agree_within_rounding(name: str, dtype: torch.dtype) -> None:
    product, inputs = PRODUCTS[name]
    rounded = [x.to(dtype) for x in inputs]
    native = product(*rounded)
    with fp32_products(True):
        emulated = product(*rounded)
    torch.testing.assert_close(emulated, native, rtol=4 * ROUNDING[dtype], atol=16 * ROUNDING[dtype])


@pytest.mark.usefixtures("emulated")
def test_products_into_a_given_tensor_are_emulated_too(dtype: torch.dtype) -> None:
    """torch.compile's code calls these; PyTorch's own fp16 kernels also sum in fp16 here."""
    a, b, c = (draw(*shape, dtype=dtype) for shape in ((40, 300), (300, 30), (40, 30)))
    product = a.float() @ b.float()
    out = torch.empty(40, 30, dtype=dtype)
    assert torch.mm(a, b, out=out) is out
    assert torch.equal(out, product.to(dtype))
    torch.addmm(c, a, b, out=out)
    assert torch.equal(out, torch.addmm(c.float(), a.float(), b.float()).to(dtype))
    torch.bmm(a[None], b[None], out=out[None])
    assert torch.equal(out, product.to(dtype))
    torch.baddbmm(c[None], a[None], b[None], alpha=2, out=out[None])
    assert torch.equal(out, torch.addmm(c.float(), a.float(), b.float(), alpha=2).to(dtype))
    assert torch.equal(c.clone().addmm_(a, b), torch.addmm(c.float(), a.float(), b.float()).to(dtype))
    assert torch.equal(c[None].clone().baddbmm_(a[None], b[None])[0], c.clone().addmm_(a, b))
    assert torch.equal(torch.mm(a, b, out=torch.empty(0, dtype=dtype)), product.to(dtype))
    strided = torch.empty(30, 40, dtype=dtype).T
    torch.mm(a, b, out=strided)
    assert torch.equal(strided, product.to(dtype))


MASKS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": draw(6, 6) > -0.5},
    "scaled": {"scale": 0.3},
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_fused_attention_is_the_rounded_fp32_attention(options: dict[str, object], dtype: torch.dtype) -> None:
    low = [draw(2, 3, 6, 8 + i, dtype=dtype)[..., :8].requires_grad_() for i in range(3)]
    wide = [x.detach().float().requires_grad_() for x in low]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result = F.scaled_dot_product_attention(*low, **options)
        expected = F.scaled_dot_product_attention(*wide, **options)
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    upstream = draw(*result.shape, dtype=dtype)
    result.backward(upstream)
    expected.backward(upstream.float())
    for mine, theirs in zip(low, wide, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=0, atol=8 * ROUNDING[dtype])


@pytest.mark.usefixtures("emulated")
def test_fused_attention_takes_a_16_bit_mask_and_keeps_its_log_sum_in_fp32(dtype: torch.dtype) -> None:
    query, key, value = (draw(1, 2, 6, 8 + i, dtype=dtype)[..., :8] for i in range(3))
    mask = draw(6, 6, dtype=dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sum = attention(query, key, value, attn_mask=mask)
    wide_output, wide_log_sum = attention(query.float(), key.float(), value.float(), attn_mask=mask.float())
    assert output.dtype == dtype
    assert torch.equal(output, wide_output.to(dtype))
    assert log_sum.dtype == torch.float32
    assert torch.equal(log_sum, wide_log_sum)


def test_emulated_and_native_fused_attention_agree_within_rounding(dtype: torch.dtype) -> None:
    def attend() -> tuple[Tensor, Tensor]:
        query, key, value = (draw(1, 2, 6, 8 + i, dtype=dtype)[..., :8].requires_grad_() for i in range(3))
        output = F.scaled_dot_product_attention(query, key, value)
        output.float().square().sum().backward()
        assert query.grad is not None
        return output.detach(), query.grad

    native = attend()
    with fp32_products(True):
        emulated = attend()
    for mine, theirs in zip(emulated, native, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=8 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("build", [lambda: nn.MultiheadAttention(16, 2, batch_first=True), lambda: nn.LSTM(16, 16)])
def test_modules_with_products_inside_train(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, wide = build(), build()
    module.to(dtype)
    wide.load_state_dict({name: p.float() for name, p in module.state_dict().items()})
    inputs = draw(4, 5, 16, dtype=dtype)

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)[0]

    result, expected = forward(module, inputs), forward(wide, inputs.float())
    result.sum().backward()
    assert result.dtype == dtype
    assert all(p.grad is not None and p.grad.dtype == dtype for p in module.parameters())
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=8 * ROUNDING[dtype])


@pytest.mark.usefixtures("emulated")
def test_autocast_computes_in_16_bits_and_keeps_fp32_gradients(dtype: torch.dtype) -> None:
    layer, inputs = nn.Linear(7, 6), A
    with torch.autocast("cpu", dtype=dtype):
        result = layer(inputs)
    result.float().sum().backward()
    low = [x.detach().to(dtype).float() for x in (inputs, layer.weight, layer.bias)]
    assert torch.equal(result, F.linear(*low).to(dtype))
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("product", "inputs"), PRODUCTS.values(), ids=PRODUCTS)
def test_fp32_products_are_the_same_to_the_bit(product: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    def results() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = product(*leaves)
        result.sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    native = results()
    with fp32_products(True):
        emulated = results()
    assert all(map(torch.equal, native, emulated))


@pytest.mark.usefixtures("emulated")
def test_mixed_dtypes_are_refused_as_without_emulation(dtype: torch.dtype) -> None:
    """On the hardware that is emulated such a model fails; here it must not seem to work."""
    for a, b in ((A.to(dtype), B), (A, B.to(dtype))):
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(a, b)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> Counter[torch.dtype]:
    """Counts the tensors that emulated kernels widen."""
    counted: Counter[torch.dtype] = Counter()

    def count(value: object) -> object:
        if isinstance(value, Tensor):
            counted[value.dtype] += 1
            return value.float()
        return value

    monkeypatch.setattr("drivetrain.numerics.emulation._widened", count)
    return counted


def test_kernels_are_native_again_afterwards_also_after_an_error(
    widened: Counter[torch.dtype], dtype: torch.dtype
) -> None:
    a, b = A.to(dtype), B.to(dtype)
    with fp32_products(True):
        a @ b
    assert widened == {dtype: 2}
    with pytest.raises(KeyError), fp32_products(True):
        raise KeyError
    a @ b
    assert widened == {dtype: 2}


def test_contexts_nest_and_can_be_entered_again(widened: Counter[torch.dtype], dtype: torch.dtype) -> None:
    a, b = A.to(dtype), B.to(dtype)
    expected = (a.float() @ b.float()).to(dtype)
    for _ in range(2):
        with fp32_products(True):
            with fp32_products(True):
                assert torch.equal(a @ b, expected)
            before = widened.total()
            assert torch.equal(a @ b, expected)
            assert widened.total() == before + 2
    before = widened.total()
    a @ b
    assert widened.total() == before


def test_an_inactive_context_changes_nothing(widened: Counter[torch.dtype], dtype: torch.dtype) -> None:
    with fp32_products(False):
        A.to(dtype) @ B.to(dtype)
    assert not widened


@pytest.mark.usefixtures("emulated")
def test_fp16_overflows_to_infinity_as_on_hardware() -> None:
    a = torch.full((2, 2), 300.0, dtype=torch.float16)
    assert torch.isinf(a @ a).all()
