import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pair import run_pair
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nanoplan import dist, log
from nanoplan.lora import add_lora
from nanoplan.model import ModelConfig, Packed
from nanoplan.weights import init_model

LENGTHS = (9, 3, 6, 4)  # tokens of four sequences; rank 0 gets the first two: 12 tokens against 10


def tiny(kind, *, checkpointing=False):
    """A random model; kind is tied, untied or lora."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=41, hidden_size=16, intermediate_size=24, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64, rope_theta=1e4, norm_eps=1e-6,
        tied=kind == "tied", qk_norm=True,
    )  # fmt: skip
    model = init_model(config, seed=3)
    model.checkpointing = checkpointing
    if kind == "lora":
        add_lora(model, r=2, alpha=4.0, seed=1)
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_B" in name:
                nn.init.constant_(p, 0.02)  # B = 0 would leave A without a gradient
    return model


def sequence(index):
    length = LENGTHS[index]
    ids = torch.randint(41, (length + 1,), generator=torch.Generator().manual_seed(index))
    return ids[:-1], torch.arange(length), Packed(torch.tensor([0, length]), length), ids[1:]


def logp_sum(model, index):
    """Summed log-prob of one sequence; its weight differs per sequence as an advantage would."""
    ids, positions, attend, targets = sequence(index)
    logp, _ = model(ids, positions, attend, targets)
    return logp.sum() * (index + 1)


def gradients(model):
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in grads(model)}
    return {n: g.clone() for n, g in whole.items()}


def grads(model):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def one_step(kind, micro_batches, *, sync_each=False, checkpointing=False, max_norm=0.5):
    """(gradients, norm, clipped gradients, weights after SGD) of one step over micro_batches[rank]."""
    model = dist.shard(tiny(kind, checkpointing=checkpointing), lora=kind == "lora")
    mine = micro_batches[dist.rank()]
    num_tokens = dist.sum_over_ranks({"tokens": sum(LENGTHS[i] for i in mine)})["tokens"]
    for at, index in enumerate(mine):
        loss = -logp_sum(model, index) / num_tokens
        if sync_each:
            dist.backward(loss)
        else:
            dist.backward(loss, model, last=at == len(mine) - 1)
    dist.sync_grads(model)
    before = gradients(model)
    norm = dist.clip_grad_norm([p for _, p in grads(model)], max_norm)
    clipped = gradients(model)
    torch.optim.SGD([p for _, p in grads(model)], lr=0.1).step()
    return before, norm, clipped, {name: full for name, full in state_on_all(model).items()}


def state_on_all(model):
    return (dist.gather_objects([dist.full_state(model)]))[0]


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_two_ranks_equal_one(kind):
    # Catches: ranks that divide by their own token count, or gradients scaled by the number of ranks.
    alone = one_step(kind, [[0, 1, 2, 3]])
    for rank, both in enumerate(run_pair(one_step, kind, [[0, 1], [2, 3]])):
        assert both[1] == pytest.approx(alone[1], rel=1e-5), rank  # norm
        for ours, theirs in zip((alone[0], alone[2], alone[3]), (both[0], both[2], both[3]), strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                torch.testing.assert_close(theirs[name], ours[name], rtol=1e-4, atol=1e-6)


def one_step_each(kind, micro_batches):
    return one_step(kind, micro_batches, sync_each=True, checkpointing=True)


def test_syncing_in_each_micro_batch_and_checkpointing_change_nothing():
    # Catches: gradients reduced twice under accumulation, or lost in a recomputed block.
    alone = one_step("untied", [[0, 1, 2, 3]])[0]
    for both in run_pair(one_step_each, "untied", [[3, 0], [2, 1]]):
        for name in alone:
            torch.testing.assert_close(both[0][name], alone[name], rtol=1e-4, atol=1e-6)


def clip_shares(grad_of_rank):
    """Norm and clipped gradient of a plain parameter and of one that is spread over the ranks."""
    results = []
    plain = nn.Linear(2, 1, bias=False)
    for layer in (plain, fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh())):
        (p,) = layer.parameters()
        whole = torch.tensor(grad_of_rank[0 if layer is plain else dist.rank()])
        if isinstance(p, DTensor):
            p.grad = DTensor.from_local(whole[dist.rank()].reshape(1, 1), p.device_mesh, p.placements)
        else:
            p.grad = whole.reshape(1, 2)
        norm = dist.clip_grad_norm([p], 1.0)
        full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        results.append((norm, full.flatten().tolist()))
    return results


def mesh():
    return torch.distributed.init_device_mesh("cpu", (dist.world(),))


def test_clipping_uses_the_norm_over_all_ranks():
    # Catches: a norm over one rank's shard, low by sqrt(ranks), and so a clip that differs per rank.
    for rank in run_pair(clip_shares, [[3.0, 4.0], [3.0, 4.0]]):
        for norm, grad in rank:
            assert norm == pytest.approx(5.0) and grad == pytest.approx([0.6, 0.8])


def test_every_rank_sees_a_broken_gradient():
    # Catches: one rank that skips a step with nan while the others take it.
    for rank in run_pair(clip_shares, [[3.0, float("nan")], [3.0, float("nan")]]):
        for norm, grad in rank:
            assert norm != norm and grad[0] == 3.0  # nan, and nothing was scaled by it


def roll_out(kind):
    """Logits of three forwards on rank 1 and of none on rank 0, then one training step."""
    model = dist.shard(tiny(kind), lora=False)
    rows = []
    with dist.gathered(model), torch.no_grad():
        for index in range(3 * dist.rank()):
            ids, positions, attend, _ = sequence(index)
            rows.append(model(ids, positions, attend))
        plain = not any(isinstance(p, DTensor) for p in model.parameters())
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    dist.backward(-logp_sum(model, dist.rank()) / 12, model)
    return rows, plain, sharded, gradients(model)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ranks_may_roll_out_different_lengths(kind):
    # Catches: a collective inside the rollout, where ranks decode different numbers of tokens and would hang.
    model = tiny(kind)
    with torch.no_grad():
        expected = [model(*sequence(index)[:3]) for index in range(3)]
    dist.backward(-(logp_sum(model, 0) + logp_sum(model, 1)) / 12)
    after = gradients(model)
    for rank, (rows, plain, sharded, grad) in enumerate(run_pair(roll_out, kind)):
        assert len(rows) == 3 * rank and plain and sharded
        for ours, theirs in zip(expected, rows, strict=False):
            torch.testing.assert_close(theirs, ours)
        for name in after:
            torch.testing.assert_close(grad[name], after[name], rtol=1e-4, atol=1e-6)


def exported(kind):
    return dist.full_state(dist.shard(tiny(kind), lora=False))


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_full_state_is_the_model_on_rank_0(kind):
    # Catches: an export that holds one rank's shard, or a tied head gathered into a second tensor.
    expected = tiny(kind).state_dict()
    state, nothing = run_pair(exported, kind)
    assert nothing == {} and state.keys() == expected.keys()
    assert all(type(t) is torch.Tensor and torch.equal(t, expected[name]) for name, t in state.items())
    head, embedding = state["lm_head.weight"], state["model.embed_tokens.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) == (kind == "tied")


def average_missing():
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
    model["a"].grad = torch.tensor([1.0, 2.0]) * (1 + dist.rank())
    if dist.rank() == 1:
        model["b"].grad = torch.tensor([4.0, 6.0])
    dist.sync_grads(model)
    return [None if p.grad is None else p.grad.tolist() for p in model.values()]


def test_a_gradient_missing_on_one_rank_counts_as_zero():
    # Catches: ranks that average different tensors, or an optimizer that decays what no rank has used.
    assert run_pair(average_missing) == [[[1.5, 3.0], [2.0, 3.0], None]] * 2


def shard_unequal():
    model = tiny("lora")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n)[0, 0] += dist.rank() * 1e-6
    try:
        dist.shard(model, lora=True)
    except ValueError as error:
        return str(error)


def test_unequal_weights_are_refused():
    # Catches: adapters drawn from a seed per rank, averaged from then on as if they were one model.
    for message in run_pair(shard_unequal):
        assert "hold different weights" in message and "lora_A" in message and "1 in all" in message


def totals():
    rank = dist.rank()
    return (
        dist.sum_over_ranks(
            {"tokens": 3 + rank, "ratio_max": torch.tensor(5.0 - rank)}, maxes=("ratio_max",)
        ),
        dist.max_over_ranks(7 * rank),
        dist.gather_objects(["x"] * rank + [{"rank": rank}]),
        (dist.any_rank(rank == 1), dist.any_rank(False)),
        dist.is_main(),
    )


def test_totals_are_equal_on_all_ranks():
    # Catches: a maximum that is summed, a list in arrival order, a flag that only its own rank sees.
    first, second = run_pair(totals)
    assert first[:4] == second[:4]
    assert first[0] == {"tokens": 7.0, "ratio_max": 5.0} and first[1] == 7
    assert first[2] == [{"rank": 0}, "x", {"rank": 1}] and first[3] == (True, False)
    assert (first[4], second[4]) == (True, False)
    assert dist.sum_over_ranks({"a": 1}) == {"a": 1.0} and dist.gather_objects([1]) == [1]


def write_log(folder):
    run = log.RunLog(folder)
    run.metrics({"step": 1})
    run.trajectories([{"step": 1, "rank": rank} for rank in dist.gather_objects([dist.rank()])])
    run.summary({"rank": dist.rank()})
    return run.files != {}


def test_only_rank_0_writes_the_log(tmp_path):
    # Catches: every line once per rank.
    assert run_pair(write_log, tmp_path) == [True, False]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "trajectories.jsonl").read_text().count("\n") == 2
    assert (tmp_path / "summary.json").read_text() == '{\n "rank": 0\n}\n'


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_weights():
    # Catches: rotary tables rounded to bf16 on the way into a block, or weights that lose small updates.
    seen = []
    model = tiny("untied")
    try:
        model = dist.shard(model, lora=False, param_dtype=torch.bfloat16)
        model.model.layers[1].register_forward_pre_hook(
            lambda _, args: seen.append([a.dtype for a in args[:3]])
        )
        dist.backward(-logp_sum(model, 0) / 9, model)
        assert seen == [[torch.bfloat16, torch.float32, torch.float32]]
        assert (
            {p.dtype for p in model.parameters()}
            == {p.grad.dtype for p in model.parameters()}
            == {torch.float32}
        )
    finally:
        dist.close()
    with pytest.raises(ValueError, match=r"param_dtype=torch.bfloat16"):
        dist.shard(tiny("lora"), lora=True, param_dtype=torch.bfloat16)


LOOP = """
import time, torch
from nanoplan import dist
dist.init(seed=5)
dist.catch_sigterm()
assert dist.world() == 2 and torch.distributed.get_backend() == "gloo"
draws = dist.gather_objects([torch.rand(1).item()])
assert draws[0] == draws[1], draws
for step in range(2000):
    if step == 1:
        dist.barrier()
        print("ready\\n" * dist.is_main(), end="", flush=True)
    time.sleep(0.01)
    if dist.stop_requested():
        break
print(f"left {step}\\n", end="", flush=True)
dist.close()
"""


def test_sigterm_stops_all_ranks_at_one_step(tmp_path):
    # Catches: a rank that leaves alone and lets the others wait in a collective until they are killed.
    (tmp_path / "loop.py").write_text(LOOP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "loop.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        text, _ = run.communicate(timeout=240)
    finally:
        run.kill()
    left = {line for line in text.splitlines() if line.startswith("left")}
    assert text.count("left") == 2 and len(left) == 1 and left != {"left 1999"}, text


def test_sigterm_twice_ends_the_process():
    # Catches: a process that cannot be stopped because its loop never looks at the flag.
    child = os.fork()
    if child == 0:
        dist.catch_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        if dist.stop_requested():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
