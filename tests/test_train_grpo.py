import json
import math
import re
import runpy
import shutil
import signal
import statistics
import sys
from pathlib import Path

import grpo_runs
import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import FullDisk
from train_runs import equal, finish, lines, spawn, trained, wait_for_lines

import train_grpo
from envs import triptailor
from envs.base import Verdict
from nanoplan import checkpoint, config, dist, feedback, lora, training, weights

SCRIPT = Path(grpo_runs.__file__)
FIELDS = """step loss reward_mean valid_rate win_rate constant_groups judge_errors malformed_calls
calls_per_episode turns truncated tokens_sampled tokens_observed entropy clip_low clip_high ratio_max
logp_gap_mean logp_gap_max grad_norm lr sample_tokens_per_s train_tokens_per_s peak_gb wait_s""".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return grpo_runs.make(tmp_path_factory.mktemp("grpo"))


@pytest.fixture
def train(world, tmp_path, monkeypatch):
    """train(name, **flags) runs train_grpo with rewards from a hash of the ids; returns the run folder."""
    monkeypatch.setattr(feedback, "score_for_training", grpo_runs.score_by_ids)
    handler = signal.getsignal(signal.SIGTERM)

    def run(name="run", **flags) -> Path:
        train_grpo.main(grpo_runs.config(**{**world, "out": str(tmp_path / name), **flags}))
        return tmp_path / name

    yield run
    signal.signal(signal.SIGTERM, handler)
    dist.close()


def start(world) -> dict[str, torch.Tensor]:
    return load_file(Path(world["model"]) / "model.safetensors")


def test_three_steps_leave_a_whole_run(train, world):
    # Catches: a field or a file of the run folder that is missing, an export that nobody can load.
    out = train(eval_n=2)
    rows = lines(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert not set(FIELDS) - row.keys() and all(math.isfinite(value) for value in row.values())
        assert row["logp_gap_max"] < 1e-4 and row["tokens_trained"] > 0 and row["grad_norm"] > 0
        assert 0 < row["reward_mean"] < 1 and row["peak_gb"] > 0.1
    assert json.loads((out / "config.json").read_text())["group"] == 4
    summary = json.loads((out / "summary.json").read_text())
    assert summary["seconds"] > 0 and {"valid_rate", "win_rate"} <= summary["after"].keys()
    assert summary["before"].keys() == summary["after"].keys()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_2", "step_3"]
    moved = {n: (t - start(world)[n]).abs().max().item() for n, t in trained(out).items()}
    assert all(0 < distance < 3 * 2e-3 * 1.1 for distance in moved.values()), moved
    model = weights.load_model(out / "model")
    ids = torch.tensor([5, 6, 7, 8])
    ours = model(ids, torch.arange(4), train_grpo.Packed(torch.tensor([0, 4]), 4))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "model")(ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_trajectories_are_whole(train, world):
    # Catches: a mask shifted against its ids, text of other ids, rewards in another order than episodes.
    out = train(steps=1, prompts=4)
    rows, chat = lines(out, "trajectories.jsonl"), train_grpo.Chat(world["model"])
    assert [row["member"] for row in rows] == [0, 1, 2, 3] * 4
    assert len({row["id"] for row in rows}) == 4
    for row in rows:
        assert len(row["ids"]) == len(row["sampled"]) and row["text"] == chat.decode(row["ids"])
        assert sum(row["sampled"]) == row["tokens_sampled"] == sum(row["sampled"][-row["tokens_sampled"] :])
        assert row["reward"] == grpo_runs.preferred(row["ids"]) and row["verdict"]["pass"] is True
        assert {"stop", "turns", "calls", "output", "outcome"} <= row.keys()
    assert len({row["tokens_sampled"] for row in rows}) > 2  # else no test here tells the reductions apart


def test_equal_rewards_move_nothing(train, world, monkeypatch):
    # Catches: advantages of 1e-8 that eps blows up, weight decay or momentum in a step without a gradient.
    monkeypatch.setattr(feedback, "score_for_training", grpo_runs.score_equally)
    out = train(weight_decay=0.1)
    assert equal(trained(out), start(world))
    for row in lines(out):
        assert (row["constant_groups"], row["tokens_trained"], row["skipped"], row["loss"]) == (1, 0, 1, 0)
        assert row["reward_mean"] == 1.0


def test_only_adapters_move(train, world):
    # Catches: an adapter whose B stays 0, or a base that learns.
    out = train(lora_r=2)
    assert all(row["logp_gap_max"] < 1e-4 and row["grad_norm"] > 0 for row in lines(out))
    assert all(tensor.abs().max() > 0 for tensor in trained(out).values())
    model = weights.load_model(world["model"])
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora.load_adapter(model, out / "adapter")
    assert equal({n: p for n, p in model.named_parameters() if "lora_" not in n}, base)
    assert not (out / "model").exists()


def first_loss(rows: list[dict], reduction: str) -> float:
    """Loss of a first update, whose ratios are 1, by the definitions: minus a weighted sum of advantages."""
    pairs = []  # (advantage, sampled tokens)
    for at in range(0, len(rows), 4):
        known = [row for row in rows[at : at + 4] if row["reward"] is not None]
        mean = statistics.fmean(row["reward"] for row in known)
        std = statistics.pstdev(row["reward"] for row in known)
        pairs += [((r["reward"] - mean) / (std + 1e-6), r["tokens_sampled"]) for r in known if std]
    token_sum = sum(a * n for a, n in pairs)
    return -{
        "token": token_sum / sum(n for _, n in pairs),
        "sequence": sum(a for a, _ in pairs) / len(pairs),
        "constant": token_sum / (len(pairs) * 2 * 8),
    }[reduction]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"reduction": "sequence"},
        {"reduction": "constant"},
        {"level": "sequence", "reduction": "sequence"},
        {"truncated_is": 2.0},
        {"dual_clip": 3.0},
        {"micro_tokens": 900},  # a micro-batch per episode
        {"rows": 3},  # a group in two parts
        {"workers": 2},
        {"checkpointing": True, "lora_r": 2},
        {"temperature": 0.7},
    ],
    ids=str,
)
def test_first_loss_is_the_definition(train, flags):
    # Catches: a mean of micro-batch means, a denominator of another reduction, log-probs at another
    # temperature (the gap), a flag that is read and not used.
    out = train(steps=1, prompts=4, **flags)
    (row,) = lines(out)
    expected = first_loss(lines(out, "trajectories.jsonl"), flags.get("reduction", "token"))
    assert row["loss"] == pytest.approx(expected, abs=1e-5) and row["logp_gap_max"] < 1e-4
    if flags.get("reduction") != "sequence":
        assert abs(expected) > 3e-4  # not a sum that is 0 under every denominator


@pytest.mark.parametrize("lora_r", [0, 2])
def test_kl_holds_the_start_model(train, lora_r, monkeypatch):
    # Catches: a reference that moves along, groups of equal rewards that no penalty reaches.
    monkeypatch.setattr(feedback, "score_for_training", grpo_runs.score_equally)
    out = train("still", kl_beta=0.5, steps=2, lora_r=lora_r)
    assert [row["kl_ref"] < 1e-9 and row["tokens_trained"] > 0 for row in lines(out)] == [True, True]
    monkeypatch.setattr(feedback, "score_for_training", grpo_runs.score_by_ids)
    out = train("moved", kl_beta=1e-6, lora_r=lora_r, lr=0.02)
    free, held = lines(out), lines(train("held", kl_beta=100.0, lora_r=lora_r, lr=0.02))
    assert free[0]["kl_ref"] < 1e-9 < 1e-5 < free[-1]["kl_ref"] and held[-1]["kl_ref"] < free[-1]["kl_ref"]


def test_updates_split_the_requests(train):
    # Catches: a second update on the same requests, or on none; ratios of 1 after the weights moved.
    one, two = train("one", steps=1, prompts=4), train("two", steps=1, prompts=4, updates=2)
    (a,), (b,) = lines(one), lines(two)
    assert b["tokens_trained"] == a["tokens_trained"] and b["ratio_max"] > 1 + 1e-4 > a["ratio_max"]
    ids = [[row["ids"] for row in lines(out, "trajectories.jsonl")] for out in (one, two)]
    assert ids[0] == ids[1] and not equal(trained(one), trained(two))
    record = json.loads((two / "checkpoints" / "step_1" / "state.json").read_text())
    assert record["state"]["step"] == 1 and b["logp_gap_max"] < 1e-4


@pytest.mark.parametrize("lora_r", [0, 2])
def test_bfloat16(train, lora_r, recwarn):
    # Catches: a cache or a reference in another dtype than the model computes in; warnings of FSDP.
    out = train(steps=2, dtype="bfloat16", lora_r=lora_r, kl_beta=0.1)
    assert all(row["logp_gap_max"] < 0.2 and row["grad_norm"] > 0 for row in lines(out))
    assert lines(out)[0]["kl_ref"] < 1e-9
    assert {t.dtype for t in trained(out).values()} == {torch.float32}
    assert not [w for w in recwarn if "FSDP" in str(w.message)]


def test_a_judge_that_fails_gives_no_reward(train, monkeypatch, capsys):
    # Catches: an error that counts as a loss, or that stays in the mean and spread of its group.
    class Flaky:
        name, asked = "flaky", 0

        def compare(self, plan, reference, *, swap):
            self.asked += 1
            if self.asked in (2, 7):
                raise TimeoutError("no answer")
            return ("win", "loss", "tie")[self.asked % 3]

    monkeypatch.undo()
    passed = Verdict(True, {"toy": True}, {"toy": 0.0}, [])
    monkeypatch.setattr(triptailor.TripTailor, "verify", lambda self: passed)
    monkeypatch.setattr(train_grpo, "open_judge", lambda *_, **__: Flaky())
    out = train(steps=1)
    rows, (row,) = lines(out, "trajectories.jsonl"), lines(out)
    rewards = [r["reward"] for r in rows]
    assert rewards == [0.0, None, 1.0, 0.0, 0.0, 1.0, None, 0.0]
    assert [r["outcome"] for r in rows].count("error") == row["judge_errors"] == 2 and row["env_errors"] == 0
    assert row["reward_mean"] == pytest.approx(2 / 6) and row["win_rate"] == pytest.approx(2 / 8)
    assert row["loss"] == pytest.approx(first_loss(rows, "token"), abs=1e-5)
    assert "2 comparisons failed" in (text := capsys.readouterr().out) and "TimeoutError: no answer" in text


def test_each_request_once_per_epoch():
    # Catches: an order that repeats or skips requests, or that depends on where the run was resumed.
    cfg = train_grpo.Config(prompts=16, seed=3)
    chosen = [i for step in range(1, 751) for i in train_grpo.pick(3000, cfg, step)]
    first, *_, last = (chosen[at : at + 3000] for at in range(0, 12000, 3000))
    assert sorted(first) == sorted(last) == list(range(3000)) and first != last
    training.epoch_order.cache_clear()
    assert train_grpo.pick(3000, cfg, 500) == chosen[499 * 16 : 500 * 16]
    assert train_grpo.pick(5, cfg, 1) != train_grpo.pick(5, train_grpo.Config(prompts=16, seed=4), 1)
    assert sorted(train_grpo.pick(5, cfg, 1)[:5]) == list(range(5))  # fewer requests than a step takes


# processes


def by_episode(out) -> dict[tuple, tuple]:
    rows = lines(out, "trajectories.jsonl")
    return {(row["step"], row["id"], row["member"]): (row["ids"], row["reward"]) for row in rows}


def test_two_ranks_equal_one(train, world, tmp_path):
    # Catches: seeds, shares, counts or gradients that depend on how many processes there are; a SIGTERM on
    # one rank that leaves the other waiting, or leaves weights that cannot be saved.
    kinds = {
        "full": {"reduction": "sequence"},
        "lora": {"lora_r": 2, "lr": 0.01},
        "twice": {"prompts": 4, "updates": 2, "kl_beta": 0.1, "eval_n": 3},
    }
    runs = [{**world, "out": str(tmp_path / f"{kind}2"), **flags} for kind, flags in kinds.items()]
    left = {**runs[0], "out": str(tmp_path / "left2")}
    runs += [{**left, "trick": "leave"}, {**left, "resume": True}]
    both = spawn(SCRIPT, runs, ranks=2)
    alone = {kind: train(kind, **flags) for kind, flags in kinds.items()}
    assert "stopped by SIGTERM after step 1;" in finish(both, code=0)
    alone["left"] = alone["full"]
    for kind, one in alone.items():
        two = tmp_path / f"{kind}2"
        for a, b in zip(lines(one), lines(two), strict=True):
            for name in ("loss", "grad_norm", "entropy", "tokens_trained", "reward_mean", "kl_ref"):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), (kind, name)
        assert by_episode(one) == by_episode(two), kind
        a, b = trained(one), trained(two)
        assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5, kind
        summaries = [json.loads((out / "summary.json").read_text()) for out in (one, two)]
        assert summaries[0]["after"] == summaries[1]["after"], kind


def test_resume_is_bit_for_bit(world, tmp_path):
    # Catches: moments, generators, data order or counters that a kill loses; lines written twice; a SIGTERM
    # that leaves without saving.
    flags = {name: {**world, "out": str(tmp_path / name), "steps": 4} for name in ("straight", "die", "kill")}
    flags["kill"]["save_every"] = 2
    flags["term"] = {**flags["straight"], "out": str(tmp_path / "term"), "save_every": 100}
    tricks = {"die": "die", "kill": "slow", "term": "leave"}
    dying, killed, asked = (
        spawn(SCRIPT, [{**flags[name], "trick": trick}]) for name, trick in tricks.items()
    )
    wait_for_lines(tmp_path / "kill" / "metrics.jsonl", 3, killed)
    killed.kill()
    assert "stopped by SIGTERM after step 1;" in finish(asked, code=0)
    finish(dying, code=-signal.SIGKILL)
    finish(killed, code=-signal.SIGKILL)
    steps = {n: checkpoint.latest(tmp_path / n / "checkpoints").name for n in ("die", "kill", "term")}
    assert steps == {"die": "step_2", "kill": "step_2", "term": "step_1"}
    assert (tmp_path / "die" / "checkpoints" / "step_3.tmp").is_dir()
    with open(tmp_path / "kill" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 0.1')  # torn by the kill

    resumed = [{**flags[name], "resume": True} for name in ("die", "kill", "term")]
    finish(spawn(SCRIPT, [flags["straight"], *resumed]), code=0)
    straight = lines(tmp_path / "straight")
    for name in ("die", "kill", "term"):
        out = tmp_path / name
        for number in ("step", "loss", "grad_norm", "entropy", "lr", "reward_mean"):
            assert [row[number] for row in lines(out)] == [row[number] for row in straight], (name, number)
        rows = [lines(tmp_path / n, "trajectories.jsonl") for n in ("straight", name)]
        assert rows[0] == rows[1] and equal(trained(out), trained(tmp_path / "straight")), name
        assert (out / "summary.json").exists()


# what a user can get wrong


def test_dry_run_prints_and_writes_nothing(train, capsys):
    # Catches: a check that moves the earlier run aside, or that shows another prompt than the run's.
    out = train(dry_run=True)
    text = capsys.readouterr().out
    for words in ("<|im_start|>user\nI am", "<tool_call>", "<tool_response>\n[{", "KV cache", "AdamW",
                  "temperature 1.0", "stop ids", "generation_config"):  # fmt: skip
        assert words in text, words
    gb = float(re.search(r"KV cache +(\S+)", text)[1])
    total_tokens = int(re.search(r"trained; (\d+) tokens", text)[1]) + 60
    row_bytes = 2 * 2 * (2 * 16) * 4 * total_tokens  # two layers, keys and values, two heads of 16, fp32
    assert gb == pytest.approx(8 * row_bytes / 1e9, abs=6e-4)
    assert not out.exists()


def test_an_earlier_run_is_moved_aside(train, tmp_path, capsys):
    # Catches: results of yesterday overwritten by a command that was given twice.
    for seed in range(3):
        train(steps=1, seed=seed)
    seeds = {
        name: json.loads((tmp_path / name / "config.json").read_text())["seed"]
        for name in ("run", "run.1", "run.2")
    }
    assert seeds == {"run": 2, "run.1": 0, "run.2": 1} and len(lines(tmp_path / "run.1")) == 1
    assert "run.2" in capsys.readouterr().out


def copied(world, tmp_path, key) -> Path:
    return Path(shutil.copytree(world[key], tmp_path / key))


def without_a_shard(world, tmp_path):
    folder = copied(world, tmp_path, "model")
    model = weights.load_model(folder)
    (folder / "model.safetensors").unlink()
    weights.save_model(model, folder, max_shard_gb=1e-4)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return {"model": str(folder)}


def with_a_template_that_drops_thoughts(world, tmp_path):
    folder = copied(world, tmp_path, "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return {"model": str(folder)}


def with_a_broken_hotel(world, tmp_path):
    folder = copied(world, tmp_path, "data")
    path = folder / "accommodations.csv"
    head, first, second, *rest = path.read_text(encoding="utf-8").splitlines()
    cells = second.split(",")
    cells[head.split(",").index("avg_price")] = "cheap"
    path.write_text("\n".join([head, first, ",".join(cells), *rest]) + "\n", encoding="utf-8")
    return {"data": str(folder)}


def with_a_request_of_no_days(world, tmp_path):
    folder = copied(world, tmp_path, "data")
    records = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    records[3]["day"] = "two"
    (folder / "train.json").write_text(json.dumps(records), encoding="utf-8")
    return {"data": str(folder)}


def without_reference_plans(world, tmp_path):
    folder = copied(world, tmp_path, "data")
    records = json.loads((folder / "train.json").read_text(encoding="utf-8"))
    for record in records:
        del record["final_plan_json"], record["final_plan"]
    (folder / "train.json").write_text(json.dumps(records), encoding="utf-8")
    return {"data": str(folder)}


def without_requests(world, tmp_path):
    folder = copied(world, tmp_path, "data")
    (folder / "train.json").write_text("[]")
    return {"data": str(folder)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda *_: {"group": 1}, ["group=1", "2 or more"]),
        (lambda *_: {"updates": 3}, ["updates=3", "1 to 2"]),
        (lambda *_: {"updates": 2, "truncated_is": 2.0}, ["truncated_is=2.0", "--updates 1"]),
        (lambda *_: {"temperature": 0.0}, ["temperature=0.0", "above 0"]),
        (lambda *_: {"micro_tokens": 100}, ["micro_tokens=100", "total_tokens"]),
        (lambda *_: {"total_tokens": 300}, ["total_tokens=300", "first prompt"]),
        (lambda *_: {"total_tokens": 5000}, ["total_tokens=5000", "4096"]),
        (lambda *_: {"rows": 10**7}, ["rows=10000000", "GB of cache", "lower"]),
        (lambda *_: {"eval_n": 9}, ["n=9", "test.json", "3 requests"]),
        (lambda *_: {"resume": True}, ["cannot resume", "config.json", "--out"]),
        (lambda *_: {"model": "/no/such/folder"}, ["/no/such/folder", "not a folder"]),
        (without_a_shard, ["1 of 2 shards", "model-00002-of-00002.safetensors"]),
        (with_a_template_that_drops_thoughts, ["not prefix-preserving", "step 2"]),
        (with_a_broken_hotel, ["accommodations.csv row 3", "'cheap'"]),
        (with_a_request_of_no_days, ["train.json row 4", "day='two'", "int"]),
        (without_reference_plans, ["train/1", "no final_plan_json"]),
        (without_requests, ["no train requests", "--data"]),
    ],
)
def test_bad_input_says_what_to_change(make, words, train, world, tmp_path):
    # Catches: a stack trace from deep inside, or an error after the run folder has been touched.
    with pytest.raises(ValueError) as error:
        train("none", **make(world, tmp_path))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "none").exists()


def test_prompts_are_shared_evenly():
    # Catches: a request that no rank rolls out.
    with pytest.raises(ValueError, match="prompts=3 is no multiple of the 2 processes"):
        train_grpo.check(train_grpo.Config(prompts=3), 2)


def test_a_resume_with_another_config_is_refused(train):
    # Catches: a run that goes on with another lr, or on another world, as if nothing had happened.
    out = train(steps=1)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"lr: 0.002 -> 0.1"):
        train(steps=1, lr=0.1, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    train(steps=1, resume=True, save_every=5)  # a run that was finished is exported again
    assert lines(out) == [json.loads(line) for line in before[out / "metrics.jsonl"].splitlines()]


def test_the_script_says_it_in_one_line(monkeypatch, capsys):
    # Catches: a stack trace where a flag is wrong; exit codes that a job script cannot tell apart.
    script = str(Path(train_grpo.__file__))
    monkeypatch.setattr(sys, "argv", [script, "--grop", "4"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(script, run_name="__main__")
    assert left.value.code == 2 and "nearest is --group" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [script, "--group", "1"])
    with pytest.raises(SystemExit, match=r"^train_grpo\.py: group=1: a plan's reward"):
        runpy.run_path(script, run_name="__main__")
    text = config.help_text(train_grpo.Config)
    assert all(f"--{name} (" in text for name in train_grpo.Config.__dataclass_fields__)


def test_a_full_disk_costs_one_step(train, monkeypatch):
    # Catches: a failed save that takes the older checkpoint, the log or the whole run with it.
    straight = train("straight")

    def save(folder, step, *args, real=checkpoint.save, **options):
        if step == 1:
            return real(folder, step, *args, **options)
        with FullDisk(20_000):
            return real(folder, step, *args, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(OSError, match="step_2 was not saved"):
        train("full")
    monkeypatch.undo()
    monkeypatch.setattr(feedback, "score_for_training", grpo_runs.score_by_ids)
    full = straight.with_name("full")
    assert [path.name for path in (full / "checkpoints").iterdir()] == ["step_1"]
    train("full", resume=True)
    assert [row["loss"] for row in lines(full)] == [row["loss"] for row in lines(straight)]
    assert equal(trained(full), trained(straight))


def test_a_full_disk_at_the_export_leaves_the_checkpoint(train):
    # Catches: the last hour of training lost to the last file.
    real = weights.save_model

    def save(*args, **options):
        with FullDisk(20_000):
            real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "save_model", save)
        with pytest.raises(OSError, match="the files there are unchanged"):
            train(steps=2)
    out = train(steps=2, resume=True)
    assert (out / "summary.json").exists() and len(lines(out)) == 2 and trained(out)
