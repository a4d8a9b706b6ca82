import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pair import run_pair
from test_dist import logp_sum, state_on_all, tiny

from nanoplan import checkpoint, dist


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)


def train(model, optimizer, steps):
    """A few steps whose data come from both global generators; returns what was drawn and lost."""
    seen = []
    for _ in range(steps):
        index, noise = random.randrange(4), 1.0 + torch.rand(1).item()
        loss = -logp_sum(model, index) * noise / 10 / dist.world()
        optimizer.zero_grad()
        dist.backward(loss, model)
        dist.sync_grads(model)
        optimizer.step()
        seen.append((index, noise, loss.item()))
    return seen


def seed_all():
    random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_resume_is_bit_for_bit(kind, tmp_path):
    # Catches: optimizer moments, step counts or generators that start anew, which shifts every later number.
    seed_all()
    straight = tiny(kind)
    expected = train(straight, adamw(straight), 6)
    seed_all()
    first = tiny(kind)
    optimizer = adamw(first)
    seen = train(first, optimizer, 3)
    path = checkpoint.save(tmp_path / "checkpoints", 3, first, optimizer, {"order": [2, 0, 1], "version": 3})
    random.seed(99)
    torch.manual_seed(99)
    second = tiny(kind)
    optimizer = adamw(second)
    assert checkpoint.latest(tmp_path / "checkpoints") == path
    state = checkpoint.load(path, second, optimizer)
    assert state == {"order": [2, 0, 1], "version": 3, "step": 3}
    assert seen + train(second, optimizer, 3) == expected
    for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_lora_saves_adapters_only(tmp_path):
    # Catches: a checkpoint of the frozen base, 8 GB at each save for a 4B model.
    model = tiny("lora")
    path = checkpoint.save(tmp_path, 1, model, adamw(model), {})
    keys = torch.distributed.checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    assert keys and all("lora_" in key for key in keys)


def saved_by_two(folder, kind):
    model = dist.shard(tiny(kind), lora=kind == "lora")
    optimizer = adamw(model)
    seed_all()
    train(model, optimizer, 2)
    checkpoint.save(folder, 2, model, optimizer, {"count": 7})
    train(model, optimizer, 2)
    return state_on_all(model)


def loaded_by_two(folder, kind):
    model = dist.shard(tiny(kind), lora=kind == "lora")
    optimizer = adamw(model)
    state = checkpoint.load(checkpoint.latest(folder), model, optimizer)
    train(model, optimizer, 2)
    return state, state_on_all(model)


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_two_ranks_save_and_two_or_one_load(kind, tmp_path):
    # Catches: a checkpoint that only its own number of processes can read, or that mixes up the shards.
    expected, _ = run_pair(saved_by_two, tmp_path, kind)
    for state, weights in run_pair(loaded_by_two, tmp_path, kind):
        assert state == {"count": 7, "step": 2}
        for name in expected:
            assert torch.equal(weights[name], expected[name]), name
    alone = tiny(kind)
    optimizer = adamw(alone)
    checkpoint.load(checkpoint.latest(tmp_path), alone, optimizer)
    seed_all()
    train(tiny(kind), adamw(tiny(kind)), 2)  # draws what two ranks drew before they saved
    train(alone, optimizer, 2)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def loaded_weights(path, kind):
    model = dist.shard(tiny(kind), lora=False)
    for p in model.parameters():
        p.detach().zero_()
    optimizer = adamw(model)
    checkpoint.load(path, model, optimizer)
    moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    return state_on_all(model), moments


def test_one_process_saves_and_two_load(tmp_path):
    # Catches: whole tensors read into each shard from its own start.
    model = tiny("untied")
    optimizer = adamw(model)
    train(model, optimizer, 1)
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    for weights, moments in run_pair(loaded_weights, path, "untied"):
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        expected = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))


def counter(value):
    """A model whose numbers all say which save they belong to."""
    model = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model, torch.optim.SGD(model.parameters())


def test_the_newest_are_kept_and_leftovers_ignored(tmp_path):
    # Catches: step_9 taken for newer than step_10, a half-written folder resumed, a disk filled over night.
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (8, 9, 10):
        checkpoint.save(tmp_path, step, *counter(step), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_9"]
    shutil.copytree(tmp_path / "step_9", tmp_path / "step_12.tmp")
    (tmp_path / "step_11").mkdir()
    assert checkpoint.latest(tmp_path).name == "step_10"
    checkpoint.save(tmp_path, 13, *counter(13), {}, keep=1)
    assert {p.name for p in tmp_path.glob("step_*")} == {"step_13", "step_11"}


def test_a_step_may_be_saved_again(tmp_path):
    # Catches: a rename onto a full folder, which fails; a moment between two renames without a checkpoint.
    checkpoint.save(tmp_path, 4, *counter(1.0), {})
    checkpoint.save(tmp_path, 4, *counter(2.0), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_4"]
    (tmp_path / "step_4").rename(tmp_path / "step_4.old")  # killed between the two renames
    model, optimizer = counter(0.0)
    assert checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)["step"] == 4
    assert model.weight.mean() == 2.0
    checkpoint.save(tmp_path, 4, *counter(3.0), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_4"]


SAVES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_checkpoint import checkpoint, counter
folder, delays = Path(sys.argv[1]), random.Random(0)
last = 0
for kill in range(8):
    child = os.fork()
    if child == 0:
        step = last
        while True:
            step += 1
            checkpoint.save(folder, step, *counter(step), {"count": step}, keep=2)
    while not (folder / f"step_{last + 2}").exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(0.06 * delays.random())  # about one save
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    leftovers = [p.name for p in folder.iterdir() if p.suffix == ".tmp"]
    path = checkpoint.latest(folder)
    model, optimizer = counter(-1)
    state = checkpoint.load(path, model, optimizer)
    step = state["step"]
    values = {float(p.min()) for p in model.parameters()} | {float(p.max()) for p in model.parameters()}
    assert path.name == f"step_{step}" and state["count"] == step and values == {float(step)}, (path, values)
    assert step > last, (kill, step, last)
    last = step
    print("leftovers", len(leftovers), "step", step)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    # Catches: a folder that has its final name before its last byte, or the old one deleted before that.
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    command = [sys.executable, "-c", SAVES, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and done.stdout.count("step") == 8, done.stdout + done.stderr
    assert "leftovers 1" in done.stdout  # some kills hit a save


class FullDisk:
    """Files of this process cannot grow beyond a size, as on a disk that is full."""

    def __init__(self, limit):
        self.limit = limit

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


@pytest.mark.parametrize("limit", [2000, 6000])  # bytes: the weights do not fit; state.json does not fit
def test_a_full_disk_is_said_and_costs_nothing(tmp_path, limit):
    # Catches: a save that fails half way and has deleted, or left its half as, the newest checkpoint.
    checkpoint.save(tmp_path, 1, *counter(1.0), {})
    model, optimizer = counter(2.0)
    with FullDisk(limit), pytest.raises(OSError) as error:
        checkpoint.save(tmp_path, 2, model, optimizer, {"text": "x" * 4000})
    for words in ("step_2 was not saved", str(tmp_path), "File too large", "GB free", "older checkpoints"):
        assert words in str(error.value), str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)["step"] == 1
    assert model.weight.mean() == 1.0
    checkpoint.save(tmp_path, 2, model, optimizer, {})
    assert checkpoint.latest(tmp_path).name == "step_2"


def save_with_one_full_disk(folder):
    model = dist.shard(tiny("tied"), lora=False)
    optimizer = adamw(model)
    try:
        with FullDisk(1000 if dist.rank() == 1 else 10**9):
            checkpoint.save(folder, 5, model, optimizer, {})
    except OSError as error:
        return str(error), dist.max_over_ranks(dist.rank())


def test_a_full_disk_on_one_rank_stops_all(tmp_path):
    # Catches: one rank that raises while the others wait for it in a barrier.
    for message, together in run_pair(save_with_one_full_disk, tmp_path):
        assert "step_5 was not saved" in message and "rank" in message and together == 1
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    # Catches: adapters of rank 4 resumed into rank 2, or a full checkpoint into a LoRA run, half filled.
    model = tiny("lora")
    path = checkpoint.save(tmp_path, 1, model, adamw(model), {})
    other = tiny("tied")
    with pytest.raises(ValueError, match=r"lora_A.*is \(2, 16\) there, absent here"):
        checkpoint.load(path, other, adamw(other))
    wide = torch.nn.Linear(41, 30)
    path = checkpoint.save(tmp_path, 2, *counter(1.0), {})
    with pytest.raises(ValueError, match=r"weight is \(30, 40\) there, \(30, 41\) here"):
        checkpoint.load(path, wide, torch.optim.SGD(wide.parameters()))


def test_a_damaged_checkpoint_is_named(tmp_path):
    # Catches: a stack of torch's own errors in place of the folder's name and what to do.
    path = checkpoint.save(tmp_path, 3, *counter(1.0), {})
    (shard,) = path.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step_3 is damaged.*delete it"):
        checkpoint.load(path, *counter(0.0))
    (path / "state.json").unlink()
    with pytest.raises(ValueError, match="step_3 is no complete checkpoint"):
        checkpoint.load(path, *counter(0.0))


class Counting(torch.optim.SGD):
    """An optimizer whose state holds a plain number and a tensor shaped unlike its parameter."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["calls"] = state.get("calls", 0) + 1
            state["row_norms"] = p.detach().norm(dim=-1)


def test_several_optimizers_and_any_state(tmp_path):
    # Catches: a second optimizer (Muon beside AdamW) or a number in its state that a resume forgets.
    model, _ = counter(1.0)

    def make():
        return [Counting([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]

    optimizers = make()
    model(torch.ones(1, 40)).sum().backward()
    for one in optimizers:
        one.step()
    path = checkpoint.save(tmp_path, 1, model, optimizers, {})
    again = make()
    checkpoint.load(path, model, again)
    for a, b in zip(optimizers, again, strict=True):
        (state,), (other) = a.state.values(), next(iter(b.state.values()))
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
    assert json.loads((path / "state.json").read_text())["optim"] == {"optim.weight.calls": 1}
