"""nanoplan.batch: what the trunk reads and what the head scores."""

import pytest
import torch

from nanoplan.batch import balance, pack, pack_pairs, pad_micro_batches
from nanoplan.trajectory import Trajectory


def trajectory(prompt, *turns):
    """Build one from a prompt and alternating (sampled ids, observed ids)."""
    out = Trajectory()
    out.observe(prompt)
    for i, ids in enumerate(turns):
        if i % 2:
            out.observe(ids)
        else:
            for id in ids:
                out.sample(id, -0.125 * id)
    return out


def test_rows_are_those_before_the_sampled_tokens():
    """Catches observation tokens in the loss and a mask one position off (ids p p a a o o a e)."""
    (batch,) = pack([trajectory([1, 2], [3, 4], [5, 6], [7, 8])], [0.5], max_tokens=100)
    assert batch.rows.tolist() == [1, 2, 5, 6]
    assert batch.targets.tolist() == [3, 4, 7, 8]
    assert batch.old_logp.tolist() == [-0.375, -0.5, -0.875, -1.0]
    assert batch.advantages.tolist() == [0.5] * 4
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]  # the last sampled token predicts nothing
    assert batch.lengths.tolist() == [4]


def test_what_follows_the_last_sampled_token_is_not_read():
    """Catches a trunk that pays for observations no sampled token follows."""
    (batch,) = pack([trajectory([1, 2], [3], [4, 5, 6])], [1.0], max_tokens=100)
    assert batch.ids.tolist() == [1, 2]
    assert batch.rows.tolist() == [1]


def test_packing_keeps_sequences_apart():
    """Catches positions that run on, and rows or advantages of the wrong sequence."""
    a, b = trajectory([1, 2, 3], [4]), trajectory([5], [6, 7])
    (batch,) = pack([a, trajectory([9], [9]), b], [1.0, 0.0, -2.0], max_tokens=100)
    assert batch.index == [0, 2]  # zero advantage: dropped before the trunk
    assert batch.ids.tolist() == [1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5] and batch.max_len == 3
    assert batch.rows.tolist() == [2, 3, 4]
    assert batch.targets.tolist() == [4, 6, 7]
    assert batch.sequence.tolist() == [0, 1, 1]
    assert batch.advantages.tolist() == [1.0, -2.0, -2.0]
    assert batch.lengths.tolist() == [1, 2]


def test_zero_advantage_is_kept_for_a_kl_term_and_nothing_sampled_never():
    """Catches a KL term that silently skips constant groups, and rows without a target."""
    pair = [trajectory([1, 2], [3]), trajectory([1, 2, 3])]
    assert pack(pair, [0.0, 1.0], max_tokens=9) == []
    (batch,) = pack(pair, [0.0, 1.0], max_tokens=9, keep_zero=True)
    assert batch.index == [0]


def test_micro_batches_hold_everything_once_within_the_limit():
    """Catches sequences lost or doubled at a micro-batch's edge, and a split that is not deterministic."""
    many = [trajectory(list(range(1, 3 + i * 7 % 11)), [1] * (1 + i % 4)) for i in range(23)]
    batches = pack(many, [1.0] * 23, max_tokens=40)
    assert sorted(i for b in batches for i in b.index) == list(range(23))
    sizes = [len(b.ids) for b in batches]
    assert max(sizes) <= 40 and max(sizes) - min(sizes) <= 10
    assert sum(len(b.rows) for b in batches) == sum(t.num_sampled for t in many)
    again = pack(many, [1.0] * 23, max_tokens=40)
    assert [b.index for b in again] == [b.index for b in batches]


def test_balance_finds_room_when_the_emptiest_group_is_full():
    """Catches a loop that never ends or a group over the limit when items do not divide well."""
    lengths = {0: 6, 1: 6, 2: 6, 3: 1}
    groups = balance(lengths, max_tokens=10)
    assert sorted(i for g in groups for i in g) == [0, 1, 2, 3]
    assert all(sum(lengths[i] for i in g) <= 10 for g in groups)
    assert balance({}, max_tokens=10) == []


@pytest.mark.parametrize(
    "bad, advantage, match",
    [
        (trajectory(list(range(30)), [1]), 1.0, "trajectory 0 has 30 tokens, more than max_tokens=20"),
        (trajectory([], [1, 2]), 1.0, "starts with a sampled token"),
        (trajectory([1], [2]), float("nan"), "advantage 0 is nan"),
        (trajectory([1], [2]), float("inf"), "advantage 0 is inf"),
    ],
)
def test_what_cannot_be_packed_is_an_error(bad, advantage, match):
    """Catches a silently dropped or cut sequence, and a NaN reward that poisons the step."""
    with pytest.raises(ValueError, match=match):
        pack([bad], [advantage], max_tokens=20)


def test_dummies_run_forward_and_backward_with_exactly_no_effect():
    """Catches a rank that waits for another one's collective, and a dummy that moves weights."""
    batches = pack([trajectory([1, 2], [3])], [1.0], max_tokens=9)
    assert len(pad_micro_batches(batches, 3)) == 3
    dummy = pad_micro_batches([], 1)[0]
    embed = torch.nn.Embedding(10, 4)
    hidden = embed(dummy.ids)[dummy.rows]
    loss = hidden.sum()
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert embed.weight.grad is not None and not embed.weight.grad.any()
    with pytest.raises(ValueError, match="count=0"):
        pad_micro_batches(batches, 0)


def test_the_two_of_a_pair_lie_side_by_side():
    """Catches a pair torn over two micro-batches, its sides swapped, a limit that counts one of them."""
    pairs = [
        (trajectory(list(range(1, 3 + i % 5)), [7] * (1 + i % 3)), trajectory([9, 9], [8] * (1 + i % 2)))
        for i in range(17)
    ]
    batches = pack_pairs(pairs, max_tokens=30)
    assert len(batches) > 3 and max(len(b.ids) for b in batches) <= 30
    assert sorted(i for b in batches for i in b.index) == list(range(34))
    for batch in batches:
        assert [i % 2 for i in batch.index] == [0, 1] * (len(batch.index) // 2)
        assert batch.index[1::2] == [i + 1 for i in batch.index[::2]]
        for s, i in enumerate(batch.index):
            side = pairs[i // 2][i % 2]
            own = batch.targets[batch.sequence == s].tolist()
            assert own == [id for id, new in zip(side.ids, side.sampled, strict=True) if new]
    assert pack_pairs([], max_tokens=9) == []


@pytest.mark.parametrize(
    "bad, match",
    [
        ((trajectory([1], [2]), trajectory([1, 2])), "rejected of pair 1 has no sampled token"),
        ((trajectory([], [2]), trajectory([1], [2])), "chosen of pair 1 starts with a sampled token"),
        (
            (trajectory([1] * 9, [2]), trajectory([1] * 9, [2])),
            "pair 1 has 18 tokens, more than max_tokens=17",
        ),
    ],
)
def test_a_pair_that_cannot_be_packed_is_an_error(bad, match):
    """Catches an empty completion with log-prob 0, and a pair cut to fit."""
    with pytest.raises(ValueError, match=match):
        pack_pairs([(trajectory([1], [2]), trajectory([1], [3])), bad], max_tokens=17)
