"""kernels.linear_logp against log_softmax in float64. Torch, interpreted and on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from kernels import PATH
from kernels.clip_loss import clip_loss
from kernels.linear_logp import linear_logp, linear_logp_ref, row_grad, row_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Fill what torch.empty returns, so that a value which is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def case(N, V, D, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(N, D, generator=generator).to(DEVICE, dtype)
    w = (torch.randn(V, D, generator=generator) * scale / math.sqrt(D) * 2).to(DEVICE, dtype)
    y = torch.randint(0, V, (N,), generator=generator).to(DEVICE)
    return h, w, y


def leaves(h, w, *, trainable, dtype=None):
    h, w = (x.detach().to(dtype or x.dtype).clone() for x in (h, w))
    return h.requires_grad_(), w.requires_grad_(trainable)


def grpo(logp):
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(len(logp), generator=generator).to(logp)
    weights = (torch.rand(len(logp), generator=generator) < 0.6).to(logp) / max(len(logp), 1)
    old = logp.detach() + 0.3 * torch.randn(len(logp), generator=generator).to(logp)
    if logp.dtype == torch.float32:
        return clip_loss(logp, old, advantages, weights, clip_low=0.2, clip_high=0.28)[0]
    ratio = (logp - old).exp()
    return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)).sum()


def gspo(logp):
    half = len(logp) // 2
    old = logp.detach() * 0.9
    parts = (x.mean().exp() for x in ((logp - old)[:half], (logp - old)[half:]) if len(x))
    return sum(sign * part for sign, part in zip((1.0, -1.0), parts, strict=False))


def dpo(logp):
    half = len(logp) // 2
    return -F.logsigmoid(0.1 * (logp[:half].sum() - logp[half:].sum()))


def relative(got, want):
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "N, V, D, temperature, loss",
    [(37, 1000, 64, 1.0, grpo), (37, 200, 64, 1.0, gspo), (16, 200, 64, 1.0, dpo), (67, 299, 24, 0.7, dpo)],
)
def test_output_and_gradients_equal_log_softmax(N, V, D, temperature, loss, trainable):
    """Catches a gradient that fits one loss only, temperature applied twice, a chunk's tail that is lost."""
    h, w, y = case(N, V, D)
    ours = leaves(h, w, trainable=trainable)
    want = leaves(h, w, trainable=trainable, dtype=torch.float64)
    logp, entropy = linear_logp(*ours, y, temperature=temperature, chunk=32)
    ref_logp, ref_entropy = linear_logp_ref(*want, y, temperature=temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), ref_logp, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), ref_entropy, atol=1e-5, rtol=0)
    # The same upstream gradient for both: log-probs that differ by rounding change the loss's own gradient.
    (g,) = torch.autograd.grad(loss(ref_logp), ref_logp, retain_graph=True)
    logp.backward(g.float())
    ref_logp.backward(g.float().double())
    assert relative(ours[0].grad, want[0].grad) < 2e-6
    if trainable:
        assert relative(ours[1].grad, want[1].grad) < 2e-6


def test_a_loss_on_top_flows_into_the_hidden_states():
    """Catches a break between clip_loss and the head: one backward through both against float64."""
    h, w, y = case(50, 300, 32)
    ours, want = leaves(h, w, trainable=True), leaves(h, w, trainable=True, dtype=torch.float64)
    grpo(linear_logp(*ours, y)[0]).backward()
    grpo(linear_logp_ref(*want, y)[0]).backward()
    assert relative(ours[0].grad, want[0].grad) < 2e-5
    assert relative(ours[1].grad, want[1].grad) < 2e-5


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("N", [0, 1, 2])
def test_few_rows(N, trainable):
    """Catches N = 0 (a rank without tokens must still give gradients of zeros) and N = 1."""
    h, w, y = case(N, 50, 16)
    ours, want = leaves(h, w, trainable=trainable), leaves(h, w, trainable=trainable, dtype=torch.float64)
    logp, entropy = linear_logp(*ours, y)
    assert logp.shape == entropy.shape == (N,)
    logp.sum().backward()
    linear_logp_ref(*want, y)[0].sum().backward()
    torch.testing.assert_close(ours[0].grad.double(), want[0].grad, atol=2e-6, rtol=0)
    if trainable:
        torch.testing.assert_close(ours[1].grad.double(), want[1].grad, atol=2e-6, rtol=0)


@pytest.mark.parametrize("trainable", [False, True])
def test_rows_without_gradient_stay_without(trainable):
    """Catches an upstream gradient that is partly zero and leaks into its neighbours, or NaN times zero."""
    h, w, y = case(20, 60, 16)
    ours, want = leaves(h, w, trainable=trainable), leaves(h, w, trainable=trainable, dtype=torch.float64)
    g = torch.zeros(20, device=DEVICE)
    g[[3, 11]] = 1.5
    linear_logp(*ours, y, chunk=8)[0].backward(g)
    linear_logp_ref(*want, y)[0].backward(g.double())
    assert ours[0].grad.any(dim=1).nonzero()[:, 0].tolist() == [3, 11]
    torch.testing.assert_close(ours[0].grad.double(), want[0].grad, atol=2e-6, rtol=0)
    if trainable:
        torch.testing.assert_close(ours[1].grad.double(), want[1].grad, atol=2e-6, rtol=0)


def test_temperature_divides_logits():
    """Catches B25: log-probs divided by T instead of logits (-0.815), or T forgotten (-0.408)."""
    w = torch.tensor([[2.0], [1.0], [0.0]], device=DEVICE)
    h = torch.ones(3, 1, device=DEVICE)
    logp, _ = linear_logp(h, w, torch.arange(3, device=DEVICE), temperature=0.5)
    assert logp.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=2e-6)


@pytest.mark.parametrize("V", [7, 65, 515])
def test_the_last_column_counts_and_nothing_after_it(V):
    """Catches tail columns counted as exp(0), V below the block, and a label in the last column."""
    h, w, y = case(9, V, 16)
    w = w * 0 - 1.0  # every logit is far below 0, where a padded column would show
    h = h.abs() * 3
    y[:] = V - 1
    logp, entropy = linear_logp(h, w, y)
    torch.testing.assert_close(logp, torch.full_like(logp, -math.log(V)), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(V)), atol=2e-5, rtol=0)


@pytest.mark.parametrize("trainable", [False, True])
def test_large_logits_stay_finite(trainable):
    """Catches exp without the row's maximum: logits of about 1000."""
    h, w, y = case(12, 300, 32, scale=200.0)
    ours, want = leaves(h, w, trainable=trainable), leaves(h, w, trainable=trainable, dtype=torch.float64)
    logp, entropy = linear_logp(*ours, y)
    ref_logp, ref_entropy = linear_logp_ref(*want, y)
    assert float(ref_logp.detach().abs().max()) > 800
    logp.sum().backward()
    ref_logp.sum().backward()
    torch.testing.assert_close(logp.double(), ref_logp, atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), ref_entropy, atol=1e-3, rtol=0)
    assert relative(ours[0].grad, want[0].grad) < 1e-4
    assert not trainable or relative(ours[1].grad, want[1].grad) < 1e-4


@pytest.mark.parametrize("dtype, grad_tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("trainable", [False, True])
def test_half_precision_is_no_worse_than_torch(dtype, grad_tolerance, trainable):
    """Catches logits rounded to half precision: log-probs off by 0.03 nats at bf16 (B28)."""
    h, w, y = case(40, 500, 64, dtype=dtype)
    ours, want = leaves(h, w, trainable=trainable), leaves(h, w, trainable=trainable, dtype=torch.float64)
    plain = leaves(h, w, trainable=trainable)
    logp, _ = linear_logp(*ours, y)
    ref_logp, _ = linear_logp_ref(*want, y)
    torch_logp, _ = linear_logp_ref(*plain, y)
    error = float((logp.double() - ref_logp).detach().abs().max())
    assert error < 5e-6 + float((torch_logp.double() - ref_logp).detach().abs().max())
    assert error < 1e-5
    g = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logp.backward(g)
    ref_logp.backward(g.double())
    assert ours[0].grad.dtype == dtype and relative(ours[0].grad, want[0].grad) < grad_tolerance
    if trainable:
        assert ours[1].grad.dtype == dtype and relative(ours[1].grad, want[1].grad) < grad_tolerance


@pytest.mark.parametrize("trainable", [False, True])
def test_second_backward_and_scaled_upstream(trainable):
    """Catches B69: a stored gradient that is used up, or an upstream gradient taken for 1."""
    h, w, y = case(10, 40, 16)
    h, w = leaves(h, w, trainable=trainable)
    inputs = (h, w) if trainable else (h,)
    total = linear_logp(h, w, y)[0].sum()
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    second = torch.autograd.grad(3 * total, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("trainable", [False, True])
def test_strided_inputs(trainable):
    """Catches kernels that assume contiguous rows: sliced vocabulary, transposed head, every second row."""
    h, w, y = case(30, 90, 16)
    ours = leaves(h, w, trainable=trainable)
    logp, _ = linear_logp(ours[0][::2], ours[1].T.contiguous().T[:80], y[::2] % 80)
    want = leaves(h, w, trainable=trainable, dtype=torch.float64)
    ref_logp, _ = linear_logp_ref(want[0][::2], want[1][:80], y[::2] % 80)
    logp.sum().backward()
    ref_logp.sum().backward()
    torch.testing.assert_close(logp.double(), ref_logp, atol=5e-6, rtol=0)
    assert relative(ours[0].grad, want[0].grad) < 2e-6
    assert not trainable or relative(ours[1].grad, want[1].grad) < 2e-6


@pytest.mark.parametrize("trainable", [False, True])
def test_entropy_has_no_gradient_and_says_so(trainable):
    """Catches an entropy bonus that is silently ignored."""
    h, w, y = case(5, 20, 16)
    logp, entropy = linear_logp(*leaves(h, w, trainable=trainable), y)
    with pytest.raises(ValueError, match="entropy of linear_logp is for logging"):
        (logp.sum() + entropy.sum()).backward()


def test_without_gradient_nothing_is_kept():
    """Catches B69: forward under no_grad that still forms gradients."""
    h, w, y = case(33, 70, 16)
    with torch.no_grad():
        logp, entropy = linear_logp(*leaves(h, w, trainable=True), y, chunk=8)
    ref_logp, ref_entropy = linear_logp_ref(h.double(), w.double(), y)
    assert not logp.requires_grad and logp.grad_fn is None
    torch.testing.assert_close(logp.double(), ref_logp, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), ref_entropy, atol=1e-5, rtol=0)


@pytest.mark.skipif(PATH == "triton", reason="the Triton paths differ in their last bits")
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_gradients_do_not_change_the_bits(trainable, scale):
    """Catches a start model that is its own reference and yet moves: Adam turns the last bits into steps."""
    h, w, y = case(77, 20_000, 16, scale=scale)
    with torch.no_grad():
        want, want_entropy = linear_logp(h, w, y, temperature=0.7, chunk=32)
    logp, entropy = linear_logp(*leaves(h, w, trainable=trainable), y, temperature=0.7, chunk=32)
    assert torch.equal(logp, want) and want.isfinite().all()
    torch.testing.assert_close(entropy, want_entropy, atol=1e-3 * scale, rtol=1e-5)


def test_bad_input_is_an_error():
    """Catches targets of the padded vocabulary, shapes that broadcast, and temperature 0."""
    h, w, y = case(4, 20, 16)
    with pytest.raises(ValueError, match=r"wanted \(N, D\)"):
        linear_logp(h, w, y[:3])
    with pytest.raises(ValueError, match="temperature=0"):
        linear_logp(h, w, y, temperature=0)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"targets span 3\.\.20, wanted 0\.\.19"):
            linear_logp(h, w, torch.tensor([3, 20, 4, 5]))


def test_torch_compile_leaves_launches_alone():
    """Catches a launch that torch.compile traces: interpreted it fails, on a GPU its floats become fp64."""
    h, w, y = case(6, 9, 16)

    def loss(h):
        logp, _ = linear_logp(torch.tanh(h), w, y)
        ones = torch.ones_like(logp)
        return clip_loss(logp, logp.detach(), ones, ones, clip_low=0.2, clip_high=0.2)[0]

    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = h.clone().requires_grad_()
        function(leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


needs_kernels = pytest.mark.skipif(PATH == "torch", reason="the torch path has no offsets of its own")


def far_apart(rows, width, dtype, folder):
    """A (rows, width) view whose last row starts past element 2^31; the memory between is never touched."""
    stride = (1 << 31) // (rows - 1) + 16
    size = (rows - 1) * stride + width
    if DEVICE == "cuda":
        memory = torch.empty(size, dtype=dtype, device=DEVICE)
    else:  # a sparse file
        memory = torch.from_file(str(folder / "memory"), shared=True, size=size, dtype=dtype)
    return memory.as_strided((rows, width), (stride, 1))


@needs_kernels
def test_rows_past_int32_of_hidden_states_and_head(tmp_path):
    """Catches B68: int32 row offsets. Row 5 of h, then row 5 of w, start past element 2^31."""
    h, w, y = case(6, 6, 16, dtype=torch.float16)
    want, _ = linear_logp_ref(h.double(), w.double(), y)
    far = far_apart(6, 16, torch.float16, tmp_path)
    far.copy_(h)
    torch.testing.assert_close(linear_logp(far, w, y)[0].double(), want, atol=1e-5, rtol=0)
    far.copy_(w)
    torch.testing.assert_close(linear_logp(h, far, y)[0].double(), want, atol=1e-5, rtol=0)


@needs_kernels
def test_rows_past_int32_of_logits(tmp_path):
    """Catches B68: 14,135 rows of 151,936 logits pass 2^31. Here row 5 does, of 40 logits."""
    z = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = torch.arange(6, device=DEVICE) * 7
    far = far_apart(6, 40, torch.float32, tmp_path)
    far.copy_(z)
    logp, _, lse = row_head(far, y, temperature=1.0)
    want = torch.log_softmax(z.double(), dim=-1)
    torch.testing.assert_close(logp.double(), want.gather(1, y[:, None])[:, 0], atol=2e-6, rtol=0)
    row_grad(far, y, lse, torch.ones(6, device=DEVICE), far, temperature=1.0)
    onehot = torch.nn.functional.one_hot(y, 40)
    torch.testing.assert_close(far.double(), onehot - want.exp(), atol=2e-6, rtol=0)


@needs_kernels
def test_a_row_does_not_depend_on_the_batch():
    """Catches a split or a tile that depends on N: a first on-policy ratio would not be 1."""
    h, w, y = case(70, 300, 32)
    whole, _ = linear_logp(h, w, y)
    part, _ = linear_logp(h[40:43], w, y[40:43])
    assert torch.equal(whole[40:43], part)


@needs_kernels
def test_several_splits_of_the_vocabulary():
    """Catches a second stage that drops or doubles a split (V over SPLIT), and stale memory in partials."""
    h, w, y = case(3, 9500, 16)
    y[0], y[1] = 4607, 4608  # the last of a split, the first of the next
    logp, entropy = linear_logp(h, w, y)
    want, want_entropy = linear_logp_ref(h.double(), w.double(), y)
    torch.testing.assert_close(logp.double(), want, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=0)
