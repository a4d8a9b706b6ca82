import json
import math
import shutil

import pytest
import torch
from grpo_runs import make
from llm_server import LLMServer
from pair import run_pair

import eval as script
from bench import scoring
from envs import triptailor
from nanoplan import evaluate, lora, summary, weights
from nanoplan.chat import Chat
from nanoplan.judge import RubricJudge

CHECKS = 7


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A world of three test requests and a random model that knows its words."""
    return make(tmp_path_factory.mktemp("eval")) | {"bench": "triptailor", "options": ("max_rows=2",)}


@pytest.fixture(scope="module")
def envs(flags):
    return triptailor.load("test", flags["data"])


def model_config(flags, out, **more):
    limits = {"turns": 2, "turn_tokens": 8, "observation_tokens": 40, "rows": 2}
    return script.Config(**{**flags, **limits, "out": str(out), **more})


def outputs_config(flags, file, out, **more):
    return script.Config(bench="triptailor", data=flags["data"], outputs=str(file), out=str(out), **more)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(results):
    """Results without what the clock decides."""
    strata = {name: row | {"seconds": None} for name, row in results["strata"].items()}
    return results | {"latency": None, "strata": strata}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def reference(env):
    return json.loads(env.task.data["final_plan_json"])


def imagined(plan):
    """The plan with a hotel that is not in the database."""
    return {**plan, "hotel": [{**plan["hotel"][0], "name": "No Such Inn"}]}


def test_results_follow_from_the_stored_files(flags, tmp_path, capsys):
    # Catches: a table that can't be made again, or that disagrees with the files beside it.
    results = script.main(model_config(flags, tmp_path / "a"))
    printed = capsys.readouterr().out
    stored = (tmp_path / "a" / "results.json").read_text()
    assert json.loads(stored) == results and results["official"]["pass"]["n"] == 3
    assert "official within_sandbox" in printed and "official scoring is not built" not in printed
    (tmp_path / "a" / "results.json").unlink()
    (tmp_path / "a" / "trajectories.jsonl").rename(tmp_path / "t.jsonl")
    script.main(script.Config(recompute=str(tmp_path / "a")))
    again = capsys.readouterr().out
    assert (tmp_path / "a" / "results.json").read_text() == stored
    assert again in printed and again.count("\n") > CHECKS
    for item, row in zip(lines(tmp_path / "a" / "items.jsonl"), lines(tmp_path / "t.jsonl"), strict=True):
        assert item["id"] == row["id"] and not item["official"]["pass"] and item["strict"]["reasons"]
        assert sum(row["sampled"]) == item["tokens_sampled"] > 0
        assert len(row["ids"]) == len(row["sampled"]) == item["tokens_sampled"] + item["tokens_observed"]
    assert results["per_plan"]["tokens_sampled"]["value"] == pytest.approx(
        sum(item["tokens_sampled"] for item in lines(tmp_path / "a" / "items.jsonl")) / 3
    )


def test_rates_and_intervals_by_hand(flags, envs, tmp_path):
    # Catches: a missing output that leaves the denominator, a tie that counts as a win, a lost check.
    first, second, third = envs
    file = write(tmp_path / "plans.jsonl", [
        {"id": second.task.id, "output": imagined(reference(second))},
        {"id": first.task.id, "output": f"Here you are:\n{json.dumps(reference(first))}", "note": "not read"},
        "",
    ])  # fmt: skip
    results = script.main(outputs_config(flags, file, tmp_path / "o"))
    strict = results["strict"]
    assert strict["valid_rate"]["value"] == pytest.approx(1 / 3)
    assert strict["within_sandbox"]["value"] == pytest.approx(1 / 3)
    assert strict["complete_information"]["value"] == pytest.approx(2 / 3)
    assert strict["win_rate"]["value"] == 0.0  # against itself, a tie
    # Wilson, 1 of 3, z = 1.96: centre (1/3 + 0.6403) / 2.2805, half 1.96 * sqrt(2/27 + 0.10671) / 2.2805
    low, high = strict["valid_rate"]["low"], strict["valid_rate"]["high"]
    assert (low, high) == pytest.approx((0.0615, 0.7923), abs=1e-3)
    assert results["per_plan"]["calls"] == {"value": None, "low": None, "high": None, "n": 0}
    assert results["counts"]["undelivered"] == 1 and results["counts"]["requests"] == 3
    items = {item["id"]: item for item in lines(tmp_path / "o" / "items.jsonl")}
    assert list(items) == [env.task.id for env in envs]
    lost = items[third.task.id]
    assert [value for name, value in lost["strict"].items() if name != "reasons"] == [False] * (CHECKS + 1)
    assert lost["strict"]["reasons"][0].startswith("undelivered") and lost["win"] == 0.0
    assert "No Such Inn" in items[second.task.id]["strict"]["reasons"][0]


class Stubborn:
    """Prefers what it is shown first; fails on one request."""

    name = "stubborn"

    def __init__(self, failing=""):
        self.failing = failing

    def compare(self, plan, reference, *, swap):
        if self.failing and self.failing in plan.text:
            raise TimeoutError("no answer")
        return "loss" if swap else "win"


def test_a_judge_is_asked_both_orders_and_its_errors_are_no_results(envs):
    # Catches: position bias in the win rate; a judge that fails counted as a loss, or as no judge at all.
    outputs = {env.task.id: json.dumps(reference(env)) for env in envs}
    items = evaluate.score_outputs(envs, outputs, [Stubborn()])
    assert [(item["win"], item["outcome"]) for item in items] == [(0.5, "tie")] * 3
    items = evaluate.score_outputs(envs, outputs, [Stubborn(f"Total: ¥{envs[0].reference().cost():g} ")])
    assert [item["outcome"] for item in items] == ["error", "tie", "tie"]
    found = summary.summarize(items)
    assert found["strict"]["win_rate"]["value"] == 0.5 and found["strict"]["win_rate"]["n"] == 2
    assert found["counts"]["judge_errors"] == 1 and found["strict"]["valid_rate"]["n"] == 3
    nothing = evaluate.score_outputs(envs, outputs, [])
    assert summary.summarize(nothing)["strict"]["win_rate"]["value"] is None
    assert math.isnan(evaluate.rates(nothing)["win_rate"]) and evaluate.rates(nothing)["valid_rate"] == 1.0


def test_a_local_model_is_an_agent_too(flags, tmp_path):
    # Catches: methods that work with servers alone, tokens of a local model that are not counted.
    own = {name: value for name, value in flags.items() if name not in ("model", "total_tokens")}
    limits = {"turns": 2, "turn_tokens": 8, "observation_tokens": 40, "rounds": 1}
    agent = f"local:{flags['model']}?rows=2&max_len={flags['total_tokens'] + 400}"
    results = script.main(
        script.Config(agent=agent, out=str(tmp_path / "a"), method="react", **own, **limits)
    )
    items = lines(tmp_path / "a" / "items.jsonl")
    assert len(items) == 3 and results["costs"]["usd"] == 0.0 and results["latency"]["n"] == 3
    for item in items:
        assert item["turns"] <= 2 and item["completion_tokens"] <= 8 * item["queries"]
        assert item["stop"] in ("answer", "turns", "turn_tokens", "empty")
    assert sum(item["completion_tokens"] for item in items) > 0


def test_several_judges_are_averaged_and_kept_apart(flags, envs, tmp_path, capsys):
    # Catches: the first judge alone in the win rate, a judge's error hidden by another's result, a table of
    # judges that the stored items can't give again.
    outputs = {env.task.id: json.dumps(reference(env)) for env in envs}
    panel = [Stubborn(), RubricJudge()]  # half of the orders, and a tie that is no win
    items = evaluate.score_outputs(envs, outputs, panel)
    assert [(item["win"], item["outcome"]) for item in items] == [(0.25, "tie")] * 3
    assert set(items[0]["judges"]) == {"stubborn", "rubric"}
    assert items[0]["judges"]["stubborn"]["outcomes"] == ["win", "loss"]
    broken = [Stubborn(f"Total: ¥{envs[0].reference().cost():g} "), RubricJudge()]
    items = evaluate.score_outputs(envs, outputs, broken)
    assert [item["win"] for item in items] == [None, 0.25, 0.25] and items[0]["outcome"] == "error"
    file = write(tmp_path / "p.jsonl", [{"id": id, "output": text} for id, text in outputs.items()])
    with LLMServer(lambda body: '{"plan_a": 5, "plan_b": 1}') as server:
        judges = ("rubric", f"{server.url}#first?retries=0")
        results = script.main(outputs_config(flags, file, tmp_path / "o", judge=judges))
    rubric, first = (results["judges"][name] for name in results["judges"])
    assert rubric["win_rate"] == 0.0 and (first["win_rate"], first["first_wins"]) == (0.5, 1.0)
    assert results["strict"]["win_rate"]["value"] == 0.25
    assert "winner depends on order" in capsys.readouterr().out
    with pytest.raises(ValueError, match="two of one name"):
        script.main(outputs_config(flags, file, tmp_path / "o", judge=("rubric", "rubric")))


def test_outputs_beyond_n_are_known_but_not_scored(flags, envs, tmp_path, capsys):
    # Catches: --n that refuses a whole split's file as unknown ids, or scores more than it says.
    file = write(tmp_path / "p.jsonl", [{"id": env.task.id, "output": reference(env)} for env in envs])
    results = script.main(outputs_config(flags, file, tmp_path / "o", n=2))
    assert results["counts"]["requests"] == 2 and results["strict"]["valid_rate"]["value"] == 1.0
    assert "1 outputs are not among the 2 requests" in capsys.readouterr().out


GOOD = {"id": "test/1", "output": "{}"}


@pytest.mark.parametrize(("rows", "message"), [
    ([GOOD, {"id": "test/9", "output": ""}], "line 2: unknown id 'test/9'; of 3 ids 'test/"),
    ([GOOD, "", {"id": "test/2"}], 'line 3 has no "output"'),
    ([{"output": "{}"}], 'line 1 has no "id"'),
    ([{"id": 1, "output": "{}"}], "line 1: id=1, wanted a string"),
    ([{"id": "test/1", "output": None}], "line 1: output=null, wanted a string or an object"),
    ([GOOD, {"id": "test/2", "output": ""}, GOOD], "line 3: id 'test/1' is on line 1 too"),
    ([GOOD, '{"id": "test/2", "output": '], "line 2 is no JSON"),
    (['{"id": "test/1", "output": {"a": 1, "a": 2}}'], "line 1 is no JSON: a key occurs twice"),
    (["[1]"], "line 1 is a list, wanted an object"),
    ([" "], "holds no line"),
])  # fmt: skip
def test_a_bad_line_of_outputs_is_named(flags, tmp_path, rows, message):
    # Catches: a line that is skipped, or an error that does not say where.
    file = write(tmp_path / "plans.jsonl", rows)
    with pytest.raises(ValueError) as error:
        script.main(outputs_config(flags, file, tmp_path / "o"))
    assert message in str(error.value) and str(file) in str(error.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("more", "message"), [
    ({"bench": "tripadvisor", "model": "x"}, "bench='tripadvisor' is unknown; known: "),
    ({"bench": "triptailor"}, "nothing to measure"),
    ({"bench": "triptailor", "model": "x", "outputs": "y"}, "--model and --outputs to measure"),
    ({"bench": "triptailor", "outputs": "nowhere.jsonl"}, "nowhere.jsonl is no file"),
    ({"bench": "triptailor", "outputs": "y", "top_k": 5}, "top_k=5 is for a --model"),
    ({"bench": "triptailor", "outputs": "y", "temperature": 0.0}, "temperature=0.0 is for a --model"),
    ({"bench": "planbench", "outputs": "y", "data": ""}, "have built-in worlds"),
    ({"compare": ("a",)}, "wanted two folders"),
    ({"compare": ("a", "b")}, "a has no config.json"),
    ({"recompute": "nowhere"}, "nowhere has no config.json"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags, tmp_path, monkeypatch, more, message):
    # Catches: half of a command ignored without a word.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        script.main(script.Config(**({"data": flags["data"]} | more)))
    assert message in str(error.value)


def test_an_empty_split_is_refused(flags, tmp_path):
    # Catches: a table of nothing, or an IndexError.
    shutil.copytree(flags["data"], tmp_path / "world")
    (tmp_path / "world" / "test.json").write_text("[]")
    for more in ({"outputs": "never read"}, {"model": flags["model"]}):
        with pytest.raises(ValueError, match=r"split=test: .* has no request in it"):
            script.main(script.Config(bench="triptailor", data=str(tmp_path / "world"), **more))


def test_a_prompt_that_leaves_no_room_is_refused(flags, tmp_path):
    # Catches: an evaluation of zeros because no episode could begin.
    with pytest.raises(ValueError, match=r"total_tokens=100: the first prompt alone has \d+"):
        script.main(model_config(flags, tmp_path / "a", total_tokens=100))


def test_compare_pairs_by_id(flags, envs, tmp_path, capsys):
    # Catches: rows paired by their place in the file, and requests that only one side has.
    first, second, third = envs
    sides = {"a": [second, first, third], "b": [third, first]}
    for name, order in sides.items():
        rows = [{"id": env.task.id, "output": reference(env)} for env in order]
        if name == "a":
            rows[1]["output"] = rows[2]["output"] = "no plan"
        items = lines(out_items(flags, write(tmp_path / f"{name}.jsonl", rows), tmp_path / name))
        kept = [item for item in items if item["id"] in {env.task.id for env in order}]
        write(tmp_path / name / "items.jsonl", kept if name == "a" else kept[::-1])
    row = script.main(script.Config(compare=(str(tmp_path / "a"), str(tmp_path / "b"))))["valid_rate"]
    assert row == {"a": 0.0, "b": 1.0, "diff": 1.0, "low": 1.0, "high": 1.0, "n": 2}
    printed = capsys.readouterr().out
    assert "1 of 3 requests are in" in printed and "+100.0 %" in printed
    assert "| converted " in printed and "| requests gained |" in printed and "+2 |" in printed
    stored = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(stored | {"split": "train"}))
    with pytest.raises(ValueError, match="split differs, test and train"):
        script.main(script.Config(compare=(str(tmp_path / "a"), str(tmp_path / "b"))))


def out_items(flags, file, out):
    script.main(outputs_config(flags, file, out))
    return out / "items.jsonl"


def test_own_sampling_parameters_are_used_only_when_asked(flags, capsys):
    # Catches: a generation_config that is applied in silence, or one that overrules a flag.
    chat = Chat(flags["model"])
    chat.generation_config |= {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    names = ("temperature", "top_p", "top_k", "min_p")

    def effective(**more):
        cfg = script.sampling_of(script.Config(model="m", **more), chat)
        return [getattr(cfg, name) for name in names], capsys.readouterr().out

    values, printed = effective()
    assert values == [1.0, 1.0, 0, 0.0] and "is not applied" in printed
    values, printed = effective(generation_config=True, temperature=0.5)
    assert values == [0.5, 1.0, 20, 0.0]
    assert "repetition_penalty = 1.05" in printed and "eos" not in printed
    chat.generation_config["do_sample"] = False
    assert effective(generation_config=True)[0] == [0.0, 1.0, 0, 0.0]


def test_greedy_ignores_the_seed_and_sampling_repeats(flags, tmp_path):
    # Catches: a run that can't be repeated, a temperature of 0 that samples, a flag that isn't passed on.
    def ids(name, **more):
        script.main(model_config(flags, tmp_path / name, n=2, **more))
        return [row["ids"] for row in lines(tmp_path / name / "trajectories.jsonl")]

    sampled, greedy = ids("a"), ids("g", temperature=0.0)
    assert ids("a") == sampled != ids("b", seed=1)  # the second run in one folder moves the first aside
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("a.1", "a"))
    assert untimed(first) == untimed(second)
    assert ids("h", temperature=0.0, seed=1) == greedy == ids("k", top_k=1) != sampled


def test_trials_of_a_model_are_samples_of_their_own(flags, tmp_path):
    # Catches: k trials that are one sample k times; a first trial that depends on how many follow; trials at
    # temperature 0, which are all the same.
    once = script.main(model_config(flags, tmp_path / "one"))
    twice = script.main(model_config(flags, tmp_path / "two", trials=2))
    one, two = (lines(tmp_path / name / "trajectories.jsonl") for name in ("one", "two"))
    assert [(row["id"], row["trial"]) for row in two] == [(row["id"], k) for row in one for k in (0, 1)]
    assert [row["ids"] for row in two[::2]] == [row["ids"] for row in one]
    assert all(a["ids"] != b["ids"] for a, b in zip(two[::2], two[1::2], strict=True))
    items = lines(tmp_path / "two" / "items.jsonl")
    assert [item["trial"] for item in items] == [0, 1] * 3 and all(item["seconds"] > 0 for item in items)
    assert (once["counts"]["trials"], twice["counts"]["trials"]) == (1, 2)
    assert len(twice["success"]["strict"]["pass^"]) == 2 and twice["per_plan"]["turns"]["n"] == 6
    with pytest.raises(ValueError, match="trials=2"):
        script.main(model_config(flags, tmp_path / "no", trials=2, temperature=0.0))


def test_an_adapter_changes_what_is_measured(flags, tmp_path):
    # Catches: an adapter that is read but never applied.
    _, model = weights.load_policy(flags["model"], dtype=torch.float32, device="cpu")
    lora.add_lora(model, r=2, alpha=4.0)
    names = {"untrained": 0.0, "trained": 0.5}
    texts = {}
    for name, value in names.items():
        for parameter_name, parameter in lora.trainable(model).items():
            if "lora_B" in parameter_name:
                parameter.data.fill_(value)
        lora.save_adapter(model, tmp_path / name, base_name=flags["model"])
    for name in ("", *names):
        folder = str(tmp_path / name) if name else ""
        script.main(model_config(flags, tmp_path / f"run{name}", n=2, temperature=0.0, adapter=folder))
        texts[name] = [row["text"] for row in lines(tmp_path / f"run{name}" / "trajectories.jsonl")]
    assert texts[""] == texts["untrained"] != texts["trained"]


def test_two_ranks_measure_what_one_does(flags, tmp_path):
    # Catches: seeds that depend on the rank, a share that is lost or counted twice, files written twice.
    one = script.main(model_config(flags, tmp_path / "one"))
    two = run_pair(script.main, model_config(flags, tmp_path / "two"))
    assert two[0] == two[1] and untimed(two[0]) == untimed(one)
    for name in ("items.jsonl", "trajectories.jsonl"):
        first, second = (lines(tmp_path / run / name) for run in ("one", "two"))
        assert [row.pop("seconds", 1) and row for row in first] == [
            row.pop("seconds", 1) and row for row in second
        ]
    assert not list(tmp_path.glob("two.*"))


def test_a_thousand_plans_of_each_benchmark_are_scored_in_ten_seconds(tmp_path, capsys):
    # Catches: a search in the path of every score; a bench whose plans are all refused unread.
    rows = scoring.main(scoring.Config(json=str(tmp_path / "s" / "rows.json")))
    assert json.loads((tmp_path / "s" / "rows.json").read_text()) == rows
    assert [row["benchmark"] for row in rows] == ["travelplanner", "naturalplan", "planbench"]
    for row in rows:
        assert row["cpu_s"] < 10 and row["plans"] == 1000
        assert 400 < row["passed_strict"] < 1000 and 400 < row["passed_official"] < 1000
    assert capsys.readouterr().out.count("yes") == 3
