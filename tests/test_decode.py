"""kernels.decode against attention by its definition in float64. Torch, interpreted and on a GPU."""

import pytest
import torch

from kernels import PATH
from kernels.decode import Prefix, decode, decode_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Fill what torch.empty returns, so that a value which is read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def case(lengths, *, prefixes=(), members=(), C=40, P=32, H=4, J=2, E=16, slots=None, dtype=torch.float32):
    """Random q, k, v; everything past a length is NaN, as memory that was never written may be."""
    generator = torch.Generator().manual_seed(0)

    def cache(rows, size, filled):
        x = torch.randn(rows, J, size, E, generator=generator)
        for row, length in filled:
            x[row, :, length:] = float("nan")
        return x.to(DEVICE, dtype)

    R = len(lengths)
    slots = list(range(R)) if slots is None else slots
    q = torch.randn(R, H, E, generator=generator).to(DEVICE, dtype)
    k, v = (cache(max(slots, default=0) + 1, C, zip(slots, lengths, strict=True)) for _ in range(2))
    ints = {"dtype": torch.int32, "device": DEVICE}
    prefix = None
    if prefixes:
        pk, pv = (cache(len(prefixes), P, enumerate(prefixes)) for _ in range(2))
        prefix = Prefix(pk, pv, torch.tensor(prefixes, **ints), torch.tensor(members, **ints))
    return (q, k, v, torch.tensor(lengths, **ints)), {"slots": torch.tensor(slots, **ints), "prefix": prefix}


def expected(args, options):
    q, k, v, lengths = args
    prefix = options["prefix"]
    if prefix is not None:
        prefix = Prefix(prefix.k.double(), prefix.v.double(), prefix.lengths, prefix.members)
    return decode_ref(q.double(), k.double(), v.double(), lengths, slots=options["slots"], prefix=prefix)


@pytest.mark.parametrize("H, J, E", [(4, 2, 16), (4, 4, 16), (6, 1, 24), (8, 2, 64)])
@pytest.mark.parametrize(
    "dtype, atol", [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
def test_rows_of_different_lengths(H, J, E, dtype, atol):
    """Catches padding that is attended to, heads paired wrongly, a head width that is no power of two."""
    args, options = case([1, 7, 40, 33], H=H, J=J, E=E, dtype=dtype)
    out = decode(*args, **options)
    assert out.shape == args[0].shape and out.dtype == dtype
    torch.testing.assert_close(out.double(), expected(args, options), atol=atol, rtol=0)


@pytest.mark.parametrize(
    "lengths, prefixes, members",
    [
        ([3, 1, 5, 2], [32, 9], [[0, 1], [2, 3]]),
        ([3, 1, 5, 2], [17], [[1, 3]]),  # rows 0 and 2 share nothing
        ([3, 0, 5], [8, 30], [[2, -1], [0, 1]]),  # groups of different size; row 1 has a prefix only
        ([1] * 9, [20, 0], [[0, 1, 2, 3, 4, 5, 6, 7], [8, -1, -1, -1, -1, -1, -1, -1]]),  # an empty prefix
    ],
)
def test_shared_prefix_equals_a_cache_of_ones_own(lengths, prefixes, members):
    """Catches a row that reads another group's prompt, or whose prompt is left out of the normalisation."""
    args, options = case(lengths, prefixes=prefixes, members=members, J=1)
    out = decode(*args, **options)
    torch.testing.assert_close(out.double(), expected(args, options), atol=2e-6, rtol=0)
    q, k, v, lens = args
    prefix = options["prefix"]
    joined = [torch.full((len(q), 1, 80, 16), float("nan"), device=DEVICE) for _ in range(2)]
    total = lens.clone()
    owner = {r: g for g, rows in enumerate(members) for r in rows}
    for r in range(len(q)):
        shared = prefixes[owner[r]] if r in owner else 0
        total[r] += shared
        for whole, own, common in zip(joined, (k, v), (prefix.k, prefix.v), strict=True):
            whole[r, :, :shared] = common[owner.get(r, 0), :, :shared]
            whole[r, :, shared : shared + int(lens[r])] = own[r, :, : int(lens[r])]
    torch.testing.assert_close(out, decode(q, *joined, total), atol=2e-6, rtol=0)


def test_prefixes_inside_the_cache_of_the_rows():
    """Catches a row that begins at index 0 of its slot although its own tokens begin later (as the sampler's
    do: row 0 holds the prompt of rows 0 and 2, row 3 that of rows 3 and 1), and tables with strides."""
    (q, k, v, _), _ = case([30, 33, 21, 25])
    shared, ends = torch.tensor([19, 11, 19, 11]), torch.tensor([30, 33, 21, 25])
    k[2, :, :19] = v[2, :, :19] = k[1, :, :11] = v[1, :, :11] = float("nan")  # never written there
    table = torch.tensor([[0, 19, 0, 2], [3, 11, 1, 3], [0, 0, -1, -1]], dtype=torch.int32, device=DEVICE)
    prefix = Prefix(k[:, :, :20], v[:, :, :20], table[:, 1], table[:, 2:], table[:, 0])
    lengths, starts = (ends - shared).int().to(DEVICE), shared.int().to(DEVICE)
    out = decode(q, k, v, lengths, starts=starts, longest=22, prefix=prefix)
    for row, (head, p, end) in enumerate(zip([0, 3, 0, 3], shared.tolist(), ends.tolist(), strict=True)):
        whole = [torch.cat([x[head, :, :p], x[row, :, p:end]], 1)[None].double() for x in (k, v)]
        total = torch.tensor([end], device=DEVICE)
        want = decode_ref(q[row : row + 1].double(), *whole, total, slots=torch.zeros(1, dtype=torch.int32))
        torch.testing.assert_close(out[row : row + 1].double(), want, atol=2e-6, rtol=0)


def test_many_splits_and_many_rows_of_a_group():
    """Catches a merge that drops a split (cache over SPLIT tokens), a group that needs several programs."""
    lengths = [600, 256, 257, 3] + [1] * 14
    args, options = case(
        lengths, prefixes=[300, 511], members=[[*range(17)], [17, *[-1] * 16]], C=600, P=512, J=1
    )
    torch.testing.assert_close(decode(*args, **options).double(), expected(args, options), atol=3e-6, rtol=0)


def test_slots_and_strides_are_followed():
    """Catches a cache that is assumed to be contiguous, or row i assumed to lie in slot i."""
    args, options = case([4, 9, 2], slots=[5, 0, 3])
    q, k, v, lengths = args
    token_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]  # stored (slots, C, J, E)
    assert not token_first[0].is_contiguous()
    got = decode(q, *token_first, lengths, slots=options["slots"])
    torch.testing.assert_close(got.double(), expected(args, options), atol=2e-6, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours():
    """Catches a split that depends on the batch: the same row alone gives other bits."""
    args, options = case([600, 20, 300, 1], C=600)
    q, k, v, lengths = args
    together = decode(*args, **options)
    for row in range(4):
        alone = decode(q[row : row + 1], k, v, lengths[row : row + 1], slots=options["slots"][row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.skipif(PATH == "torch", reason="the torch path has no offsets of its own")
def test_slots_past_int32_are_found(tmp_path):
    """Catches B68: int32 offsets into the cache. Slot 2 starts past element 2^31."""
    (q, k, _, lengths), options = case([4, 9, 7])
    stride = (1 << 30) + 16
    size = 2 * stride + k[0].numel()
    if DEVICE == "cuda":
        memory = torch.empty(size, device=DEVICE)
    else:  # a sparse file
        memory = torch.from_file(str(tmp_path / "cache"), shared=True, size=size)
    far = memory.as_strided(k.shape, (stride, *k.stride()[1:]))
    far.copy_(k)
    got = decode(q, far, far, lengths)
    torch.testing.assert_close(got.double(), expected((q, k, k, lengths), options), atol=2e-6, rtol=0)


def test_large_scores_and_no_tokens():
    """Catches exp without the maximum, and 0 / 0 for a row that has nothing cached."""
    args, options = case([5, 0, 7])
    q, k, v, lengths = args
    out = decode(q * 300, k, v, lengths)
    torch.testing.assert_close(out.double(), expected((q * 300, k, v, lengths), options), atol=1e-4, rtol=0)
    assert not out[1].any()
    assert decode(q[:0], k, v, lengths[:0]).shape == (0, 4, 16)


def test_torch_compile_leaves_launches_alone():
    """Catches a launch that torch.compile traces: interpreted it fails, on a GPU its floats become fp64."""
    (q, k, v, lengths), _ = case([5, 2])
    compiled = torch.compile(lambda q: decode(torch.tanh(q), k, v, lengths) + 1, backend="aot_eager")
    torch.testing.assert_close(compiled(q), decode(torch.tanh(q), k, v, lengths) + 1)


def test_shapes_that_do_not_fit_are_errors():
    """Catches heads cut off silently and lengths that broadcast."""
    (q, k, v, lengths), _ = case([5, 2])
    with pytest.raises(ValueError, match=r"wanted \(R, H, E\)"):
        decode(q[:, :3], k, v, lengths)
    with pytest.raises(ValueError, match="one per row"):
        decode(q, k, v, lengths[:1])
