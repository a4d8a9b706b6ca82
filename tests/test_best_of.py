"""Best-of-N against what can be counted by hand, as a function and through eval.py."""

import importlib.util
import json
from pathlib import Path

import pytest
from test_feedback import Judge, World

from envs import trips, triptailor
from nanoplan.best_of import best_of, by_constraints, by_oracle, by_score
from nanoplan.evaluate import read_candidates

ROOT = Path(__file__).parents[1]
TEXTS = ["bad", "good", "valid", "good valid"]  # what World and Judge make of them: see test_feedback


def pick(select, num, texts=TEXTS) -> str:
    env = World()
    return best_of([env], {env.task.id: texts}, num=num, select=select)[env.task.id]


def test_each_selector_takes_what_it_ranks_first():
    # Catches: a filter that prefers, a reranker that sees constraints, an answer beyond the first N, the last
    # of equals instead of the first.
    assert [pick(by_constraints, n) for n in (1, 2, 3, 4)] == ["bad", "bad", "valid", "valid"]
    assert [pick(by_oracle([Judge()]), n) for n in (1, 2, 3, 4)] == ["bad", "bad", "valid", "good valid"]
    assert [pick(by_score(Judge()), n) for n in (1, 2, 3, 4)] == ["bad", "good", "good", "good"]


def test_a_reranker_that_fails_and_answers_without_a_plan():
    # Catches: an answer that wins because nothing is known of it.
    errors = []
    assert (
        pick(by_score(Judge(), on_error=errors.append), 3, ["fail", "", "bad"]) == "bad" and len(errors) == 1
    )
    assert pick(by_score(Judge()), 2, ["", "fail"]) == ""


def test_too_few_answers_are_refused_and_none_is_no_answer():
    # Catches: best of 8 that is silently a best of 3.
    env = World()
    with pytest.raises(ValueError, match="toy/0 has 2 answers, best_of=3"):
        best_of([env], {"toy/0": ["a", "b"]}, num=3, select=by_constraints)
    assert best_of([env], {}, num=3, select=by_constraints) == {}


def test_eval_scores_the_chosen_plans(tmp_path):
    # Catches: a table of the first trial, a file with several answers that is refused or read by its last.
    spec = importlib.util.spec_from_file_location("eval_script", ROOT / "eval.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    data = trips.build(tmp_path / "world", seed=0, cities=2, train=3, test=6)
    envs = triptailor.load("test", data)
    plans = [json.dumps(env.reference_plan()) for env in envs]
    broken = ['{"hotel": []}'] * len(envs)
    lines = [
        {"id": env.task.id, "trial": trial, "output": text}
        for trial, texts in enumerate((broken, plans, broken))
        for env, text in zip(envs, texts, strict=True)
    ]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_candidates(file, known=[e.task.id for e in envs])[envs[0].task.id][1] == plans[0]
    flags = {"bench": "triptailor", "data": str(data), "outputs": str(file)}

    def valid(name, **more) -> float:
        results = script.main(script.Config(**flags, **more, out=str(tmp_path / name)))
        return results["strict"]["valid_rate"]["value"]

    assert valid("one", best_of=1) == 0.0 and valid("three", best_of=3) == 1.0
    assert valid("ranked", best_of=3, select="rubric") == valid("oracle", best_of=2, select="oracle") == 1.0
    before = (tmp_path / "three" / "results.json").read_bytes()
    script.main(script.Config(recompute=str(tmp_path / "three")))
    assert (tmp_path / "three" / "results.json").read_bytes() == before
    assert json.loads(before)["best_of"] == 3
    with pytest.raises(ValueError, match="is on line 1 too"):
        valid("none")
    with pytest.raises(ValueError, match="for --outputs alone"):
        script.main(script.Config(bench="triptailor", model="x", best_of=2))
