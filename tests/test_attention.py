"""kernels.attention against attention by its definition."""

import pytest
import torch

from kernels.attention import packed_causal, packed_causal_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(lengths, H=4, J=2, E=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), heads, E, generator=generator) for heads in (H, J, J))
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    return [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v)], cu_seqlens


@pytest.mark.parametrize("H, J", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 17], [3, 3]])
def test_output_and_gradients_equal_the_definition(H, J, lengths):
    """Catches key/value heads paired with the wrong query heads, a wrong scale, a gradient without a head."""
    ours, cu_seqlens = inputs(lengths, H, J)
    ref, _ = inputs(lengths, H, J, dtype=torch.float64)
    out = packed_causal(*ours, cu_seqlens, max_len=max(lengths))
    want = packed_causal_ref(*ref, cu_seqlens)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out.backward(grad)
    want.backward(grad.double())
    assert out.shape == want.shape
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)
    for x, y in zip(ours, ref, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "dtype, atol", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_each_dtype_is_as_good_as_its_rounding(dtype, atol):
    """Catches a path that only one dtype takes (varlen attention needs half precision on CUDA)."""
    ours, cu_seqlens = inputs([6, 2, 9], dtype=dtype)
    out = packed_causal(*ours, cu_seqlens.int(), max_len=9)
    want = packed_causal_ref(*(x.detach().double() for x in ours), cu_seqlens)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)


def test_a_sequence_does_not_see_its_neighbours_or_its_future():
    """Catches a mask that is off by one or that runs over the end of a sequence."""
    (q, k, v), cu_seqlens = inputs([4, 5])
    before = packed_causal(q, k, v, cu_seqlens, max_len=5)
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[6], v2[6] = 9.0, 9.0  # token 2 of the second sequence
    after = packed_causal(q, k2, v2, cu_seqlens, max_len=5)
    changed = (before != after).any(dim=2).any(dim=1).tolist()
    assert changed == [False] * 6 + [True] * 3


def test_heads_that_do_not_divide_are_an_error():
    """Catches a silent truncation of H / J."""
    (q, _, _), cu_seqlens = inputs([4], H=4)
    (_, k, v), _ = inputs([4], J=3)
    with pytest.raises(ValueError, match="4 query heads over 3"):
        packed_causal(q, k, v, cu_seqlens, max_len=4)
