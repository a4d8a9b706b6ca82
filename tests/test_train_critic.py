import json
import math
import runpy
import signal
import statistics
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import critic_runs
import pytest
import torch
from safetensors.torch import load_file
from test_critic import Server
from toy import Counter
from train_runs import equal, finish, lines, spawn, trained, wait_for_lines

import train_critic
from nanoplan import checkpoint, config, critic, dist, lora, weights
from nanoplan.critique import Review

SCRIPT = Path(critic_runs.__file__)
FIELDS = """step loss reward_mean success malformed states kept constant_groups ended_early continuations
context_overflows env_errors tokens_trained agent_computed agent_reused critic_computed critic_reused entropy
clip_low clip_high ratio_max logp_gap_mean logp_gap_max grad_norm skipped lr peak_gb sample_s
train_s""".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return critic_runs.make(tmp_path_factory.mktemp("critic"))


@pytest.fixture
def train(world, tmp_path, monkeypatch):
    """train(name, **flags) runs train_critic with outcomes from a hash of the ids; returns the run folder."""
    for place, name, new in critic_runs.REPLACED:
        monkeypatch.setattr(place, name, new)
    handler = signal.getsignal(signal.SIGTERM)

    def run(name="run", **flags) -> Path:
        train_critic.main(critic_runs.config(**{**world, "out": str(tmp_path / name), **flags}))
        return tmp_path / name

    yield run
    signal.signal(signal.SIGTERM, handler)
    dist.close()


def groups_of(out) -> dict[tuple, list[dict]]:
    """(step, slot, draw) -> the lines of its critiques, or its one line if the agent was over too early."""
    groups: dict[tuple, list[dict]] = {}
    for row in lines(out, "trajectories.jsonl"):
        groups.setdefault((row["step"], row["slot"], row["draw"]), []).append(row)
    return groups


def test_three_steps_leave_a_whole_run(train, world):
    # Catches: a field or a file that is missing, a critic that does not move, an agent that does.
    out = train(eval_n=2)
    rows = lines(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert not set(FIELDS) - row.keys() and all(math.isfinite(value) for value in row.values())
        assert row["logp_gap_max"] < 1e-4 and row["agent_reused"] > 0 and row["critic_reused"] > 0
    summary = json.loads((out / "summary.json").read_text())
    names = {"success", "success_no_critic", "success_untrained"}
    assert summary["before"].keys() == summary["after"].keys() == names and summary["seconds"] > 0
    assert summary["before"]["success"] == summary["before"]["success_untrained"]
    start = load_file(Path(world["model"]) / "model.safetensors")
    moved = {n: (t - start[n]).abs().max().item() for n, t in trained(out).items()}
    assert all(0 < distance < 3 * 2e-3 * 1.1 for distance in moved.values()), moved
    weights.load_model(out / "model")
    for row in lines(out, "trajectories.jsonl"):
        if "ids" in row:
            sampled = [id for id, own in zip(row["ids"], row["sampled"], strict=True) if own]
            assert 0 < len(sampled) <= 8 and row["sampled"][-len(sampled) :] == [1] * len(sampled)


def test_groups_are_replaced_within_bounds(train):
    # Catches: an equal group that is trained on or drawn for ever, a good one that is drawn again.
    out = train(steps=4, prompts=4)
    rows, groups = lines(out), groups_of(out)
    assert sum(row["states"] for row in rows) == len(groups)
    for (step, slot, draw), group in groups.items():
        varied = len({row["reward"] for row in group} - {None}) > 1
        assert varied == any(row.get("advantage", 0.0) for row in group)
        assert ((step, slot, draw + 1) in groups) == (not varied and draw + 1 < 3)
    assert max(draw for _, _, draw in groups) == 2 and any(row["ended_early"] for row in rows)
    tokens = {step: 0 for step in range(1, 5)}
    for (step, _, _), group in groups.items():
        tokens[step] += sum(sum(row["sampled"]) for row in group if row.get("advantage"))
    assert [row["tokens_trained"] for row in rows] == list(tokens.values())
    assert len({row["id"] for group in groups.values() for row in group}) > 12


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"reduction": "sequence"},
        {"reduction": "constant"},
        {"continuations": 3},
        {"scale_rewards": False},
        {"rows": 5},
        {"micro_tokens": 600},
        {"step_seed": "task", "low": 2},
        {"temperature": 0.7, "agent_temperature": 0.5},
    ],
    ids=str,
)
def test_first_loss_is_the_definition(train, flags):
    # Catches: tokens of another's in the loss, another denominator, a flag that is read and not used.
    out = train(steps=1, prompts=4, **flags)
    (row,), total = lines(out), []
    for group in groups_of(out).values():
        known = [r["reward"] for r in group if r["reward"] is not None]
        if len(set(known)) < 2:
            continue
        mean, std = statistics.fmean(known), statistics.pstdev(known)
        scale = std + 1e-6 if flags.get("scale_rewards", True) else 1.0
        for r in group:
            wanted = [o for o in r["outcomes"] if o is not None]
            assert r["reward"] == (-1.0 if r["faults"] else pytest.approx(statistics.fmean(wanted)))
            assert len(r["outcomes"]) == (0 if r["faults"] else flags.get("continuations", 1))
            if r["reward"] != mean:
                total.append(((r["reward"] - mean) / scale, sum(r["sampled"])))
    tokens = sum(a * n for a, n in total)
    loss = {
        "token": tokens / sum(n for _, n in total),
        "sequence": sum(a for a, _ in total) / len(total),
        "constant": tokens / (8 * len(total)),
    }[flags.get("reduction", "token")]
    assert row["loss"] == pytest.approx(-loss, abs=1e-5) and row["logp_gap_max"] < 1e-4


def test_alternatives_run(train):
    # Catches: a flag of appendix A that trains nothing, or crashes on a group without a well-formed critique.
    for name, flags in {
        "gumbel": {"reward": "gumbel"}, "none": {"baseline": "none", "baseline_n": 2},
        "fail": {"overflow": "fail"},
    }.items():  # fmt: skip
        (row,) = lines(train(name, steps=1, prompts=4, **flags))
        assert row["tokens_trained"] > 0 and row["logp_gap_max"] < 1e-4, name
    (row,) = lines(train("asks", steps=1, states="self"))  # a random agent never asks
    assert (row["skipped"], row["states"], row["ended_early"], row["loss"]) == (1, 6, 1, 0)


def test_the_agent_is_the_base_without_adapters(train, world):
    # Catches: an agent that learns along with the critic, or that is another model than the base.
    same = train("same", agent="same", lora_r=2, lr=0.02)
    apart = train("apart", agent=world["model"], lora_r=2, lr=0.02)
    for a, b in zip(lines(same, "trajectories.jsonl"), lines(apart, "trajectories.jsonl"), strict=True):
        assert a == b
    assert all(row["logp_gap_max"] < 1e-4 for row in lines(same))
    assert all(tensor.abs().max() > 0 for tensor in trained(same).values())
    model = weights.load_model(world["model"])
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora.load_adapter(model, same / "adapter")
    assert equal({n: p for n, p in model.named_parameters() if "lora_" not in n}, base)


def test_an_agent_with_an_adapter(train, world, tmp_path):
    # Catches: an adapter of the agent that is not worn, so that the critic advises another agent.
    model = weights.load_model(world["agent"])
    lora.add_lora(model, r=2, alpha=4.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    lora.save_adapter(model, tmp_path / "worn", base_name="x")
    plain, worn = train("plain", steps=1), train("worn_run", steps=1, agent_adapter=str(tmp_path / "worn"))
    assert lines(plain, "trajectories.jsonl") != lines(worn, "trajectories.jsonl")


def test_an_agent_elsewhere(train, monkeypatch):
    # Catches: a script that needs the weights, the ids or the cache of an agent that only answers over HTTP.
    Server.asked, Server.fail = [], ""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    worlds = [Counter(3, name=f"train/{i}") for i in range(9)]
    monkeypatch.setattr(train_critic, "load_tasks", lambda cfg: (worlds, worlds[:2]))
    monkeypatch.setattr(critic, "outcome", lambda episode, *, overflow: float(episode.seed % 2))
    flags = {"agent_url": f"http://127.0.0.1:{http.server_port}/v1", "agent": "toy", "high": 1, "eval_n": 2}
    out = train(steps=2, **flags)
    http.shutdown()
    rows = lines(out)
    assert sum(row["tokens_trained"] for row in rows) > 0 and all(row["agent_reused"] == 0 for row in rows)
    assert all(row["agent_computed"] == 55 * (row["continuations"] + row["states"]) for row in rows)
    assert json.loads((out / "summary.json").read_text())["before"]["success_no_critic"] == 1.0


def test_an_agent_that_changes_is_noticed(train, monkeypatch):
    # Catches: a check of the agent's weights that compares nothing.
    agents = []
    monkeypatch.setattr(
        train_critic,
        "load_agent",
        lambda *a, real=train_critic.load_agent: agents.append(real(*a)) or agents[-1],
    )

    def update(*args, real=train_critic.update, **options):
        with torch.no_grad():
            next(agents[-1][1].parameters()).view(-1)[0] += 1e-6
        return real(*args, **options)

    monkeypatch.setattr(train_critic, "update", update)
    with pytest.raises(AssertionError, match="frozen agent's weights have changed"):
        train(steps=1)


# processes


def test_two_ranks_equal_one(train, world, tmp_path):
    # Catches: seeds, draws or counts that depend on the rank; a collective inside the draws, at which a rank
    # that draws more groups than the other waits for ever; SIGTERM on one rank that leaves the other waiting.
    kinds = {"full": {"eval_n": 3}, "lora": {"lora_r": 2, "lr": 0.01, "agent": "same"}}
    runs = [{**world, "out": str(tmp_path / f"{kind}2"), **flags} for kind, flags in kinds.items()]
    left = {**runs[0], "out": str(tmp_path / "left2")}
    runs += [{**left, "trick": "leave"}, {**left, "resume": True}]
    both = spawn(SCRIPT, runs, ranks=2)
    alone = {kind: train(kind, **flags) for kind, flags in kinds.items()}
    assert "stopped by SIGTERM after step" in finish(both, code=0)
    draws = [{(slot, draw) for step, slot, draw in groups_of(alone["full"]) if step == s} for s in (1, 2, 3)]
    assert any(sum(slot == 0 for slot, _ in d) != sum(slot == 1 for slot, _ in d) for d in draws)
    alone["left"] = alone["full"]
    for kind, one in alone.items():
        two = tmp_path / f"{kind}2"
        for a, b in zip(lines(one), lines(two), strict=True):
            for name in ("loss", "grad_norm", "entropy", "tokens_trained", "reward_mean", "states", "kept"):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), (kind, name)
        ids = [
            {key: [(r.get("ids"), r["reward"]) for r in group] for key, group in groups_of(out).items()}
            for out in (one, two)
        ]
        assert ids[0] == ids[1], kind
        a, b = trained(one), trained(two)
        assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-5, kind
        summaries = [json.loads((out / "summary.json").read_text()) for out in (one, two)]
        assert summaries[0]["after"] == summaries[1]["after"], kind


def test_resume_is_bit_for_bit(world, tmp_path):
    # Catches: moments, draws or counters that a kill loses; lines twice; a SIGTERM that saves nothing.
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
    resumed = [{**flags[name], "resume": True} for name in ("die", "kill", "term")]
    finish(spawn(SCRIPT, [flags["straight"], *resumed]), code=0)
    straight = lines(tmp_path / "straight")
    for name in ("die", "kill", "term"):
        out = tmp_path / name
        for number in ("step", "loss", "grad_norm", "entropy", "lr", "reward_mean", "agent_computed"):
            assert [row[number] for row in lines(out)] == [row[number] for row in straight], (name, number)
        rows = [lines(tmp_path / n, "trajectories.jsonl") for n in ("straight", name)]
        assert rows[0] == rows[1] and equal(trained(out), trained(tmp_path / "straight")), name


# what a user can get wrong


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"group": 1}, ["group=1", "2 or more"]),
        ({"draws": 0}, ["draws=0", "1 or more"]),
        ({"low": 3, "high": 2}, ["low=3", "low <= high"]),
        ({"high": 4}, ["high=4", "turns=4"]),
        ({"temperature": 0.0}, ["temperature=0.0", "above 0"]),
        ({"agent": "same"}, ["agent=same", "--lora_r"]),
        ({"agent": "/no/such/folder"}, ["/no/such/folder", "not a folder"]),
        ({"agent_url": "http://127.0.0.1:9/v1", "reward": "gumbel"}, ["noise"]),
        ({"reward": "gumbel", "baseline": "none"}, ["already subtracts"]),
        ({"rows": 2}, ["rows=2", "2 states wait"]),
        ({"micro_tokens": 100}, ["micro_tokens=100", "critic_total"]),
        ({"eval_protocol": "often"}, ["protocol='often'", "step:K"]),
        ({"resume": True}, ["cannot resume", "config.json"]),
    ],
    ids=str,
)
def test_bad_input_says_what_to_change(flags, words, train, tmp_path):
    # Catches: a stack trace from deep inside, or an error after the run folder has been touched.
    with pytest.raises(ValueError) as error:
        train("none", **flags)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "none").exists()


def test_dry_run_shows_what_the_critic_sees(train, capsys):
    # Catches: a check that writes, or that shows another prompt than the run's.
    out = train(dry_run=True)
    text = capsys.readouterr().out
    assert all(w in text for w in ("KV cache", "AdamW", "at 1.0", "agent")) and not out.exists()


def test_the_script_says_it_in_one_line(monkeypatch, capsys):
    # Catches: a stack trace where a flag is wrong.
    script = str(Path(train_critic.__file__))
    monkeypatch.setattr(sys, "argv", [script, "--continuation", "4"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(script, run_name="__main__")
    assert left.value.code == 2 and "nearest is --continuations" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [script, "--agent_url", "http://127.0.0.1:9/v1", "--agent", "x"])
    monkeypatch.setattr(sys, "argv", [script, "--group", "1"])
    with pytest.raises(SystemExit, match=r"^train_critic\.py: group=1"):
        runpy.run_path(script, run_name="__main__")
    text = config.help_text(train_critic.Config)
    assert all(f"--{name} (" in text for name in train_critic.Config.__dataclass_fields__)


def test_tasks_are_drawn_once_per_epoch():
    # Catches: an order that depends on how often slots were drawn, or that repeats tasks within an epoch.
    cfg = train_critic.Config(prompts=4, draws=2, seed=3)
    places = [(step, slot, draw) for step in range(1, 26) for draw in range(2) for slot in range(4)]
    chosen = [train_critic.pick(200, cfg, *place) for place in places]
    assert sorted(chosen) == list(range(200)) and chosen != sorted(chosen)


def test_the_stand_ins_are_what_they_stand_for():
    # Catches: tests that replace a name which the script no longer uses.
    assert callable(train_critic.load_tasks) and callable(critic.outcome) and callable(Review.read)
    assert critic.value.__globals__["outcome"] is critic.outcome


@pytest.mark.slow
def test_the_built_in_critic_learns(tmp_path):
    # Catches: rewards of another critique, a sign, a mask: everything runs, and advice gets no better.
    handler = signal.getsignal(signal.SIGTERM)
    flags = {"steps": 24, "high": 1, "eval_n": 64, "eval_trials": 1, "out": str(tmp_path / "run")}
    try:
        summary = train_critic.main(train_critic.Config(**flags))
    finally:
        signal.signal(signal.SIGTERM, handler)
    before, after = summary["before"], summary["after"]
    assert after["success"] > before["success_untrained"] + 0.15, summary
    assert after["success"] > before["success_no_critic"] + 0.1, summary
    rows = lines(tmp_path / "run")
    reused = [row["agent_reused"] / (row["agent_reused"] + row["agent_computed"]) for row in rows]
    assert all(share > 0.35 for share in reused), reused  # prefixes are not computed again for each branch
    items = [json.loads(x) for x in (tmp_path / "run" / "items_trained.jsonl").read_text().splitlines()]
    assert len(items) == 64 and all(len(item["notes"]) == 1 for item in items)
