"""The rewards of the paper's methods, and the plans they compare with."""

import json
from pathlib import Path

import grpo_runs
import pytest
from llm_server import Fault, LLMServer
from toy import Counter, tiny_model, write_tokenizer
from train_runs import lines
from travelplanner_world import build

import train_grpo
from envs import musique_make, travelplanner, trips, triptailor
from envs.base import NO_PLAN_TEXT, PlanView, Verdict
from nanoplan import anchors, dist, weights
from nanoplan.chat import Chat
from nanoplan.evaluate import score_outputs, write_lines
from nanoplan.feedback import REWARDS, Asking
from nanoplan.judge import RubricJudge
from nanoplan.reward import gated_score
from nanoplan.rollout import Episode
from nanoplan.trajectory import Trajectory

AGENT = Path(__file__).parents[1] / "assets" / "agent"


class Judge:
    """Prefers texts that hold "good", scores them 4 (others 2), and fails on those that hold "fail"."""

    name, kind, family = "words", "llm", "toy"

    def __init__(self):
        self.seen = []

    def score(self, view: PlanView) -> float:
        self.seen.append(view.text)
        if "fail" in view.text:
            raise TimeoutError("no answer")
        return 4.0 if "good" in view.text else 2.0

    def compare(self, plan, reference, *, swap):
        ours, theirs = self.score(plan), self.score(reference)
        return "win" if ours > theirs else "loss" if ours < theirs else "tie"


class World(Counter):
    def verify(self):
        passed = "valid" in self.answer_text
        return Verdict(passed, {"toy": passed}, {"toy": float(not passed)}, [])

    def view(self):
        return PlanView(self.answer_text or NO_PLAN_TEXT, {})

    def reference_view(self):
        return PlanView("reference", {})

    def staged(self):
        return len(self.answer_text) / 100


def episode(text: str, stop: str = "answer") -> Episode:
    env = World()
    env.reset()
    env.answer(text)
    return Episode(env, Trajectory(stop=stop), None, 0)


TEXTS = ["good valid", "valid", "good", "", "valid fail", "fail"]
EPISODES = [*map(episode, TEXTS), episode("good valid", stop="error: reset: x")]


@pytest.mark.parametrize(("name", "rewards", "asked"), [
    ("anchored", [1.0, 0.0, 0.0, 0.0, None, 0.0, None], {"good valid", "valid", "valid fail", "reference"}),
    ("constraint", [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, None], set()),
    ("score", [0.75, 0.25, 0.0, 0.0, None, 0.0, None], {"good valid", "valid", "valid fail"}),
    ("ungated", [1.0, 0.0, 1.0, 0.0, None, None, None], {*TEXTS, "reference"} - {""}),
    ("staged", [0.1, 0.05, 0.04, 0.0, 0.1, 0.04, None], set()),
])  # fmt: skip
def test_each_method_rewards_what_it_says(name, rewards, asked):
    # Catches: a judge that is asked where it costs and decides nothing, an error that counts as a loss, an
    # answer without a plan that wins.
    judge, errors = Judge(), []
    asking = Asking(seed=0, keys=[str(i) for i in range(7)], workers=1, on_error=errors.append)
    feedback = REWARDS[name](EPISODES, judge, asking)
    assert feedback.rewards == pytest.approx(rewards)
    assert set(judge.seen) == asked and len(errors) == sum(
        text in judge.seen for text in TEXTS if "fail" in text
    )
    assert [v.passed for v in feedback.verdicts] == [True, True, False, False, True, False, True]
    assert feedback.outcomes[-1] == "error" and len(feedback.outcomes) == 7


def test_scores_become_rewards():
    # Catches: a score beyond the scale that becomes a reward beyond 1; a logit that is read as 1 to 5.
    passed, broken = Verdict(True, {}, {}, []), Verdict(False, {"a": False}, {"a": 1.0}, ["a"])
    assert [gated_score(passed, s) for s in (1, 3, 5, None)] == [0.0, 0.5, 1.0, None]
    assert gated_score(broken, 5) == gated_score(broken, None) == 0.0
    assert gated_score(passed, 0.0, logit=True) == 0.5 and gated_score(passed, -1e9, logit=True) < 1e-300
    with pytest.raises(ValueError, match="score=7"):
        gated_score(passed, 7)


def test_an_answer_without_a_plan_reads_the_same_everywhere():
    # Catches: a benchmark whose missing plan is shown to a judge as if it were one.
    assert triptailor.NO_PLAN.text == travelplanner.NO_PLAN.text == NO_PLAN_TEXT


@pytest.fixture(scope="module")
def trip_world(tmp_path_factory):
    return trips.build(tmp_path_factory.mktemp("trips") / "world", seed=0, cities=2, train=6, test=3)


def test_synthetic_plans_take_the_place_of_human_ones(trip_world, tmp_path):
    # Catches: an anchor that breaks a constraint, or stays behind in the human one's twin.
    envs = triptailor.load("train", trip_world)
    own = {env.task.id: json.dumps(env.reference_plan()) for env in envs}
    plans = {env.task.id: own[env.task.id] for env in envs[1:4]} | {envs[4].task.id: "no plan"}
    write_lines(tmp_path / "items.jsonl", score_outputs(envs, plans, [RubricJudge()]))
    valid = [env.task.id for env in envs[1:4] if passes(env, plans)]
    twins = anchors.synthetic(envs, tmp_path)
    assert [twin.task.id for twin in twins] == valid and len(valid) >= 2
    assert all(
        twin.reference_view() == env.reference_view() for twin, env in zip(twins, envs[1:4], strict=False)
    )
    other = json.loads(own[valid[0]])
    other["itinerary"]["day_1"] = other["itinerary"]["day_1"][:1]
    twins[0].task.data["final_plan_json"] = json.dumps(other)
    assert json.dumps(envs[1].reference_plan()) == own[envs[1].task.id]
    write_lines(tmp_path / "items.jsonl", score_outputs(envs, {envs[0].task.id: "nothing"}, []))
    with pytest.raises(ValueError, match="no plan in it passes every constraint of any of the 6"):
        anchors.synthetic(envs, tmp_path)


def passes(env, plans) -> bool:
    env.reset()
    env.answer(plans[env.task.id])
    return env.verify().passed


def test_requests_without_a_reference_are_left_out(trip_world):
    # Catches: one unreadable human plan that ends a run of days.
    envs = triptailor.load("train", trip_world)
    for name in ("final_plan_json", "final_plan"):
        envs[2].task.data.pop(name, None)
    kept, reasons = anchors.comparable(envs)
    assert kept == [*envs[:2], *envs[3:]] and len(reasons) == 1 and envs[2].task.id in reasons[0]


def test_requests_without_a_reference_have_no_win(trip_world):
    # Catches: one of them that ends an evaluation, or that counts as a lost comparison.
    envs = triptailor.load("train", trip_world)
    plans = {env.task.id: json.dumps(env.reference_plan()) for env in envs}
    for name in ("final_plan_json", "final_plan"):
        envs[2].task.data.pop(name, None)
    items = score_outputs(envs, plans, [RubricJudge()])
    assert [item["win"] is None for item in items] == [i == 2 for i in range(6)]
    assert items[2]["outcome"] == "" and items[2]["judges"] == {} and items[2]["strict"]["pass"]


# the script, with a judge behind HTTP and on TravelPlanner


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return grpo_runs.make(tmp_path_factory.mktemp("grpo"))


def run(world, out, **flags) -> list[dict]:
    try:
        train_grpo.main(grpo_runs.config(**{**world, "out": str(out), **flags}))
    finally:
        dist.close()
    return lines(out)


def test_a_judge_that_cannot_be_reached_ends_the_run_at_once(world, tmp_path):
    # Catches: an hour of sampling before the first comparison fails.
    with pytest.raises(Exception, match=r"http://127\.0\.0\.1:9/v1"):
        run(world, tmp_path / "run", judge="http://127.0.0.1:9/v1#m")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_judge_that_fails_midway_costs_only_its_comparisons(world, tmp_path, monkeypatch):
    # Catches: a server's failure that ends the run, or that counts as a lost comparison.
    monkeypatch.setattr(
        triptailor.TripTailor, "verify", lambda self: Verdict(True, {"toy": True}, {"toy": 0.0}, [])
    )
    monkeypatch.setattr(triptailor.TripTailor, "view", lambda self: PlanView(self.answer_text or "x", {}))
    good = '{"plan_a": 3, "plan_b": 2}'  # of the probe
    with LLMServer(lambda body: Fault(400), script=[good]) as server:
        (row,) = run(world, tmp_path / "run", judge=f"{server.url}#m?retries=0", steps=1, turns=1)
    assert row["judge_errors"] == 8 and row["tokens_trained"] == 0 and row["reward_mean"] == 0
    assert {r["reward"] for r in lines(tmp_path / "run", "trajectories.jsonl")} == {None}


def test_travelplanner_trains_on_staged_rewards(tmp_path):
    # Catches: a benchmark that only eval.py can run; stages that reach no gradient.
    data = build(tmp_path)
    env = travelplanner.load("train", data)[0]
    texts = [message.content for message in env.reset()]
    folder = write_tokenizer(tmp_path / "model", corpus=texts, vocab_size=700)
    chat = Chat(folder)
    weights.save_model(tiny_model(chat), folder)
    length = len(chat.open(env.reset(), env.tools))
    flags = {"model": str(folder), "data": str(data), "env": "travelplanner", "total_tokens": length + 40}
    rows = run(flags, tmp_path / "run", reward="staged", steps=1, turns=1, prompts=1)
    assert rows[0]["reward_mean"] == 0.0 and rows[0]["judge_errors"] == 0
    for wrong, message in (
        ({"env": "triptailor", "reward": "staged"}, "triptailor has no stages"),
        ({"reward": "anchored"}, "judge=rubric knows triptailor's plans only"),
        ({"data": ""}, "travelplanner has no built-in world"),
        ({"references": "x"}, "are for --env triptailor"),
    ):
        with pytest.raises(ValueError, match=message):
            run(flags | {"reward": "staged"} | wrong, tmp_path / "no")


def test_an_agent_trains_on_questions(tmp_path, capsys):
    # Catches: a benchmark without plans to compare that asks for a judge, or prints a win rate of nan.
    data = musique_make.build(tmp_path / "world", **musique_make.BUILTIN | {"train": 8, "dev": 2})
    flags = {"model": str(AGENT), "data": str(data), "env": "musique", "turns": 6, "turn_tokens": 48}
    flags |= {"observation_tokens": 256, "total_tokens": 1200, "steps": 1, "prompts": 4, "eval_n": 2}
    (row,) = run(flags, tmp_path / "run", reward="constraint")
    assert row["reward_mean"] == row["valid_rate"] and row["calls_per_episode"] > 1
    said = capsys.readouterr().out
    assert "before: valid 0." in said and "nan" not in said and "judge rubric" not in said
    for wrong, message in (
        ({"reward": "staged"}, "musique has no stages"),
        ({"reward": "anchored"}, "judge=rubric knows triptailor's plans only"),
    ):
        with pytest.raises(ValueError, match=message):
            run(flags | {"reward": "constraint"} | wrong, tmp_path / "no")
