"""eval.py with an agent behind a server: real HTTP, the benchmarks' own formats in made-up worlds."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from llm_server import Fault, LLMServer, call
from naturalplan_world import write_world
from travelplanner_world import build

import eval as script
from envs import BENCHMARKS, planbench_make
from nanoplan.llm import EndpointError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return planbench_make.build(tmp_path_factory.mktemp("planbench"), seed=3, num=12, blocks=(3, 4))


@pytest.fixture(scope="module")
def travel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("travelplanner"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(server, out, **flags):
    agent = f"{server.url}#m?retries=0&price_in=1&price_out=2"
    return script.main(script.Config(agent=agent, out=str(out), **flags))


def gold_of(envs):
    """Answers every prompt with the gold plan of its request."""
    plans = {env.reset()[-1].content: env.gold() for env in envs}
    return lambda body: plans[body["messages"][-1]["content"]]


def test_an_endpoint_is_measured_with_trials_strata_and_cost(blocks, tmp_path, capsys):
    # Catches: options that don't reach the world, trials that are lost, a table that can't be made again.
    envs = BENCHMARKS["planbench"].load("blocksworld", blocks, shots=0, blocks=(3,))
    gold = gold_of(envs)

    def answer(body):  # the second trial of every request is wrong
        right = body["seed"] in {script.evaluate.trial_seed(0, env.task.id, 0) % 2**31 for env in envs}
        return gold(body) if right else "no idea"

    flags = {"bench": "planbench", "data": str(blocks), "split": "blocksworld"}
    flags["options"] = ("shots=0", "blocks=3")
    with LLMServer(answer) as server:
        results = run(server, tmp_path / "a", trials=2, **flags)
    printed = capsys.readouterr().out
    assert len(server.bodies) == 2 * len(envs) == results["counts"]["requests"] * 2
    row = results["success"]["strict"]
    assert (row["mean"], row["sem"], row["pass^"]) == (0.5, 0.0, [0.5, 0.0])
    assert results["official"]["pass"]["value"] == 0.5 and results["strict"]["decode_rate"]["value"] == 0.5
    assert results["counts"]["parse_failures"] == len(envs) and results["counts"]["trials"] == 2
    assert {name.split(",")[0] for name in results["strata"]} == {"3 blocks"}
    assert results["latency"]["n"] == 2 * len(envs) and results["latency"]["mean"] > 0
    usd = 2 * len(envs) * (100 * 1 + 10 * 2) / 1e6
    assert results["costs"]["usd"] == pytest.approx(usd) and results["costs"]["queries"]["value"] == 1
    said = ("pass^2", "stratum", "seconds per plan: mean", "answers that hold no plan", "(shots=0, blocks=3)")
    for text in said:
        assert text in printed, text
    stored = (tmp_path / "a" / "results.json").read_bytes()
    (tmp_path / "a" / "results.json").unlink()
    (tmp_path / "a" / "trajectories.jsonl").unlink()
    script.main(script.Config(recompute=str(tmp_path / "a")))
    assert (tmp_path / "a" / "results.json").read_bytes() == stored and capsys.readouterr().out in printed
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["turns"] == 30 and config["temperature"] == 1.0  # what was in force
    items = lines(tmp_path / "a" / "items.jsonl")
    assert [(item["id"], item["trial"]) for item in items] == [(e.task.id, k) for e in envs for k in (0, 1)]


def test_travelplanner_talks_with_its_tools_and_has_its_own_rates(travel, tmp_path, capsys):
    # Catches: tools that are not offered, the benchmark's rates left out of the table, talks that are lost.
    envs = BENCHMARKS["travelplanner"].load("train", travel)
    plans = {env.task.data["query"]: json.dumps(env.gold) for env in envs}

    def answer(body):
        messages = body["messages"]
        if messages[-1]["role"] == "tool":
            return f"<think>done</think>{plans[messages[1]['content']]}"
        if "tools" not in body:
            return "VERDICT: accept"
        assert any(tool["function"]["name"] == "FlightSearch" for tool in body["tools"])
        return {"content": "", "tool_calls": [call("CitySearch", '{"state": "Alder"}')]}

    flags = {"bench": "travelplanner", "data": str(travel), "split": "train"}
    with LLMServer(answer) as server:
        results = run(server, tmp_path / "a", **flags)
        assert (
            results["strict"]["valid_rate"]["value"] == 1.0 and results["per_plan"]["calls"]["value"] == 1.0
        )
        refined = run(server, tmp_path / "b", method="refine", rounds=1, **flags)
    assert results["metrics"]["official"]["final"] == results["metrics"]["strict"]["hard_micro"] == 1.0
    assert "commonsense_macro" in capsys.readouterr().out and refined["costs"]["queries"]["value"] == 4
    talks = lines(tmp_path / "a" / "trajectories.jsonl")[0]["talks"]
    assert [m["role"] for m in talks[0]] == ["system", "user", "assistant", "tool", "assistant"]
    with pytest.raises(ValueError, match="method=direct asks without tools"), LLMServer() as server:
        run(server, tmp_path / "c", method="direct", **flags)


def test_the_test_split_of_travelplanner_becomes_a_submission(travel, tmp_path, capsys):
    # Catches: a score, or a crash after the last paid reply, where only the leaderboard can score.
    flags = {"bench": "travelplanner", "data": str(travel), "split": "test"}
    with LLMServer(lambda body: '[{"day": 1}]') as server:
        found = run(server, tmp_path / "a", **flags)
    rows = lines(tmp_path / "a" / "submission.jsonl")
    assert found == {"requests": len(rows), "delivered": len(rows)} and rows[0]["plan"] == [{"day": 1}]
    assert "for the leaderboard" in capsys.readouterr().out
    file = tmp_path / "o.jsonl"
    file.write_text(json.dumps({"id": "test/1", "output": "x"}))
    with pytest.raises(ValueError, match="only TravelPlanner's leaderboard scores it"):
        script.main(script.Config(outputs=str(file), out=str(tmp_path / "b"), **flags))


def test_naturalplan_prints_all_three_tasks_apart(tmp_path, capsys):
    # Catches: the first n of files that are sorted by difficulty; an official score that is ours.
    (tmp_path / "data").mkdir()
    write_world(tmp_path / "data", seed=0, num=12)
    envs = BENCHMARKS["naturalplan"].load("test", tmp_path / "data", shots=0)
    flags = {"bench": "naturalplan", "data": str(tmp_path / "data"), "options": ("shots=0",), "n": 18}
    with LLMServer(gold_of(envs)) as server:
        results = run(server, tmp_path / "a", **flags)
    assert results["success"]["strict"]["mean"] == 1.0 and results["counts"]["requests"] == 18
    assert {name.split()[0] for name in results["strata"]} == {"trip", "meeting", "calendar"}


def test_a_server_that_dies_midway_is_no_failing_plan(blocks, tmp_path):
    # Catches: a dead server counted as a bad planner, or a run that is lost with what it has paid for.
    envs = BENCHMARKS["planbench"].load("blocksworld", blocks, shots=0)
    gold = gold_of(envs)
    script_of = [gold({"messages": [{"content": env.reset()[-1].content}]}) for env in envs[:1]]
    flags = {"bench": "planbench", "data": str(blocks), "split": "blocksworld", "options": ("shots=0",)}
    with LLMServer(lambda body: Fault(500), script=script_of) as server:
        agent = f"{server.url}#m?retries=0&concurrency=1"
        flags |= {"out": str(tmp_path / "a"), "cache": str(tmp_path / "c")}
        results = script.main(script.Config(agent=agent, **flags))
    assert results["counts"]["env_errors"] == len(envs) - 1 and results["success"]["strict"]["mean"] > 0
    assert len(list((tmp_path / "c").rglob("*.json"))) == 1  # what was paid for is kept


def test_an_endpoint_that_is_not_there_is_named_within_seconds(blocks, tmp_path):
    # Catches: minutes of retries before the first word, a traceback, a results folder of nothing.
    start = time.monotonic()
    flags = ["--bench", "planbench", "--data", str(blocks), "--split", "blocksworld", "--shots", "0"]
    flags += ["--agent", "http://127.0.0.1:9/v1#m", "--out", str(tmp_path / "a")]
    done = subprocess.run(
        [sys.executable, "eval.py", *flags],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "http://127.0.0.1:9/v1" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "a").exists() and time.monotonic() - start < 60
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9"):
        script.judges_of(script.Config(bench="x", judge=("http://127.0.0.1:9/v1#j",)), [])


def parse(*argv):
    return script.parse(["--bench", "planbench", "--data", "d", "--agent", "http://h/v1#m", *argv])


def test_a_benchmarks_options_are_flags_like_the_others(capsys):
    # Catches: an option for each benchmark in one list of flags, or one that is read as another's.
    assert parse("--shots", "0", "--n", "5").options == ("shots=0",)
    assert parse("--blocks", "3", "4", "--n", "5").options == ("blocks=3,4",)
    assert parse("--n", "5", "--extractor=official").options == ("extractor=official",)
    assert script.parse(["--bench", "naturalplan", "--hint", "--n", "3"]).options == ("hint=true",)
    load = BENCHMARKS["planbench"].load
    read = script.options.read(load, ("blocks=3,4", "shots=0", "extractor=official"), bench="planbench")
    assert read == {"blocks": (3, 4), "shots": 0, "extractor": "official"}
    assert script.options.read(load, ("blocks=none",), bench="planbench") == {"blocks": None}
    with pytest.raises(SystemExit) as left:
        parse("--help")
    printed = capsys.readouterr().out
    assert left.value.code == 0 and "--shots (default 1)" in printed and "--temperature" in printed


@pytest.mark.parametrize(("pairs", "message"), [
    (("shotz=0",), "planbench has no option 'shotz'; the nearest is 'shots'"),
    (("shots",), "'shots', wanted NAME=VALUE"),
    (("shots=two",), "--shots got 'two', wanted int"),
    (("shots=0", "shots=1"), "--shots is given twice"),
    (("extractor=regex",), "wanted strict or official"),
])  # fmt: skip
def test_a_wrong_option_is_named(pairs, message):
    # Catches: an option that is silently ignored, a TypeError out of load.
    with pytest.raises(ValueError) as error:
        script.options.read(BENCHMARKS["planbench"].load, pairs, bench="planbench")
    assert message in str(error.value)


def test_a_flag_of_no_one_is_answered_with_the_nearest_of_both():
    # Catches: the nearest among the script's flags, where the benchmark's is meant.
    with pytest.raises(ValueError, match="unknown flag --extracter; the nearest is --extractor"):
        parse("--extracter", "official")


@pytest.mark.parametrize(("flags", "message"), [
    ({"outputs": "x", "trials": 3}, "trials=3: only a sampled --model or --agent"),
    ({"agent": "x", "trials": 3, "temperature": 0.0}, "trials=3: only a sampled"),
    ({"model": "x", "method": "react"}, "method=react is for a --agent; here is --model"),
    ({"agent": "x", "adapter": "y"}, "adapter=y is for a --model; here is --agent"),
    ({"agent": "x", "oracle_feedback": True}, "oracle_feedback is for method reflexion"),
    ({"agent": "x", "model": "y"}, "--model and --agent to measure"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags, message):
    # Catches: a flag that is silently without effect.
    with pytest.raises(ValueError) as error:
        script.check(script.Config(bench="planbench", data="d", **flags))
    assert message in str(error.value)


@pytest.mark.parametrize("bench", BENCHMARKS)
def test_every_option_of_every_benchmark_can_be_given_as_a_flag(bench):
    # Catches: a keyword of a load whose type no flag can hold, found by the first user who needs it.
    load = BENCHMARKS[bench].load
    for name, (_, default) in script.options.declared(load).items():
        text = (
            "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        )
        if isinstance(default, tuple):
            text = ",".join(map(str, default))
        assert script.options.read(load, (f"{name}={text}",), bench=bench) == {name: default}
    assert bench in script.options.help_text(load, bench=bench)
