"""eval.py with a critic beside the model, on a generated MuSiQue world and the built-in agent and critic."""

import importlib.util
import json
from pathlib import Path

import pytest
from llm_server import Fault, LLMServer, call, say

from envs import musique_make
from nanoplan import dist
from nanoplan.llm import EndpointError

ROOT = Path(__file__).parents[1]
WORLD = {"seed": 1, "train": 4, "dev": 12, "passages": 6, "sentences": 1, "shapes": ("2hop",), "short": True}
LIMITS = {"turns": 8, "turn_tokens": 48, "observation_tokens": 256, "total_tokens": 1200, "critic_tokens": 64}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("eval_with_critic", ROOT / "eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("musique") / "world"
    musique_make.build(folder, **WORLD)
    return folder


def run(script, data, out, **more) -> tuple[dict, list[dict]]:
    flags = {"bench": "musique", "data": str(data), "split": "dev", "options": ("top_k=2",), **LIMITS, **more}
    if "agent" not in more:
        flags["model"] = str(ROOT / "assets" / "agent")
    try:
        results = script.main(script.Config(out=str(out), **flags))
    finally:
        dist.close()
    return results, [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]


def test_a_critic_speaks_where_the_protocol_says(script, data, tmp_path, capsys):
    # Catches: advice that never reaches the agent, trials that share a seed, a table that needs the model.
    critic = {"critic": str(ROOT / "assets" / "critic"), "protocol": "window:1-1"}
    results, items = run(script, data, tmp_path / "with", trials=2, **critic)
    assert len(items) == 24 and [item["trial"] for item in items[:4]] == [0, 1, 0, 1]
    spoken = [note for item in items for note in item["notes"]]
    assert spoken and {note["turn"] for note in spoken} == {1}
    assert sum(row["episodes"] for row in results["advice"]["calls"]) == 24
    well = sum(not note["faults"] for note in spoken)
    assert sum(row["advice"] for row in results["advice"]["kinds"]) == well
    lines = (tmp_path / "with" / "trajectories.jsonl").read_text().splitlines()
    said = [note["advice"] for note in items[0]["notes"] if not note["faults"]]
    assert all(text in json.loads(lines[0])["text"] for text in said)
    stored = (tmp_path / "with" / "results.json").read_bytes()
    script.main(script.Config(recompute=str(tmp_path / "with")))
    assert (tmp_path / "with" / "results.json").read_bytes() == stored
    _, alone = run(script, data, tmp_path / "alone", trials=2)
    assert not any("notes" in item for item in alone)
    script.main(script.Config(compare=(str(tmp_path / "alone"), str(tmp_path / "with"))))
    text = capsys.readouterr().out
    assert "SEM over 12 tasks" in text and f"tasks advised in {tmp_path / 'with'}: solved" in text


def test_a_critic_behind_an_endpoint(script, data, tmp_path):
    # Catches: a remote critic that is asked for a solution's tokens, or whose broken words reach the agent.
    words = "Analysis: The first fact is missing.\nAdvice: Search for the first name in the question."
    with LLMServer(lambda body: words, script=[words, "no form at all"]) as server:
        results, items = run(script, data, tmp_path / "run", n=4, critic=f"{server.url}#m", protocol="step:1")
    notes = [note for item in items for note in item["notes"]]
    assert len(notes) == len(server.bodies) and sum(bool(note["faults"]) for note in notes) == 1
    assert results["advice"]["kinds"][0]["kind"] == "search" and results["advice"]["kinds"][0]["advice"]


def test_the_built_in_world_needs_no_data(script, tmp_path):
    # Catches: a critic of the built-in world that only its own script can measure.
    critic = {"critic": str(ROOT / "assets" / "critic"), "protocol": "none"}
    results, items = run(script, "", tmp_path / "run", n=2, **critic)
    assert len(items) == 2 and results["advice"]["calls"][0]["critiques"] == 0


def label_of(body) -> str:
    """A judge that reads its data: every advice is to verify, and followed exactly where a turn follows."""
    shown = json.loads(body["messages"][-1]["content"])
    assert set(shown) == {"Advice", "Next turn"} and "<" not in body["messages"][-1]["content"]
    return json.dumps({"kind": "verify", "followed": "exactly" if shown["Next turn"] else "not"})


def test_a_judge_labels_the_advice(script, data, tmp_path, capsys):
    # Catches: labels of another advice, a judge's failure that counts as a label.
    critic = {"critic": str(ROOT / "assets" / "critic"), "protocol": "window:1-1"}
    with LLMServer(label_of, script=["no label", "no label"]) as server:
        judge = f"{server.url}#m?retries=0&concurrency=1"
        results, items = run(script, data, tmp_path / "run", n=8, advice_judge=judge, **critic)
    notes = [note for item in items for note in item["notes"] if not note["faults"]]
    shown = [json.loads(body["messages"][-1]["content"])["Advice"] for body in server.bodies]
    assert shown == [note["advice"] for note in notes] and len(notes) > 4
    assert [note["judged"] for note in notes[:2]] == [None, None]
    assert all(
        n["judged"] == {"kind": "verify", "followed": "exactly" if n["next"] else ""} for n in notes[2:]
    )
    table = {row["kind"]: row for row in results["advice"]["kinds_judged"]}
    assert table["verify"]["advice"] == len(notes) - 2 and table["verify"]["share"] == 1
    same = results["advice"]["agreement"]
    assert (same["judged"], same["failed"], same["kind"]) == (len(notes) - 2, 2, 0.0)
    text = capsys.readouterr().out
    assert "some advice has no label" in text and f"{len(notes) - 2} labelled, 2 failed" in text
    stored = (tmp_path / "run" / "results.json").read_bytes()
    script.main(script.Config(recompute=str(tmp_path / "run")))
    assert (tmp_path / "run" / "results.json").read_bytes() == stored


def test_a_judge_that_is_not_there_is_missed_at_once(script, data, tmp_path):
    # Catches: hours of episodes before a judge's address is found to be wrong.
    flags = {"critic": str(ROOT / "assets" / "critic"), "advice_judge": "http://127.0.0.1:9/v1#m"}
    with pytest.raises(EndpointError):
        run(script, data, tmp_path / "run", n=4, **flags)
    assert not (tmp_path / "run").exists()


def test_the_critic_beside_an_agent_elsewhere(script, data, tmp_path, capsys):
    # Catches: advice that a remote agent never reads, an episode whose server failed counted as lost.
    def agent(body):
        told = [m["content"] for m in body["messages"] if m["role"] == "user"][1:]
        return say("", tool_calls=[call("answer", '{"answer": "Oslo"}')]) if told else search

    search = say("", tool_calls=[call("search", '{"query": "river"}')])
    down = [Fault(400), search]
    with LLMServer(agent, script=down) as server:
        critic = {"critic": str(ROOT / "assets" / "critic"), "protocol": "step:2"}
        agent_url = f"{server.url}#m?concurrency=1"
        results, items = run(script, data, tmp_path / "run", n=4, agent=agent_url, **critic)
    assert [bool(item["notes"]) for item in items] == [False, True, True, True]
    assert items[0]["stop"].startswith("error: agent") and results["counts"]["env_errors"] == 1
    advised = [item for item in items if any(not note["faults"] for note in item["notes"])]
    assert advised and all(item["turns"] == 3 and item["output"] == "Oslo" for item in advised)
    talks = [json.loads(x) for x in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert all(row["talks"][0][0]["role"] == "system" for row in talks)
    assert f"the agent: {len(server.bodies)} queries" in capsys.readouterr().out


def test_success_by_the_turn_of_the_critic(script, data, tmp_path, capsys):
    # Catches: a row of another run, runs of two different critics in one table.
    critic = {"critic": str(ROOT / "assets" / "critic"), "n": 6}
    for step in (2, 1):
        run(script, data, tmp_path / f"step{step}", protocol=f"step:{step}", **critic)
    run(script, data, tmp_path / "self", protocol="self:1", **critic)
    rows = script.main(script.Config(sweep=(str(tmp_path / "step2"), str(tmp_path / "step1"))))
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["advised"] == 1.0
    for row in rows:
        stored = json.loads((tmp_path / f"step{row['step']}" / "results.json").read_text())
        assert row["success"] == pytest.approx(stored["strict"]["valid_rate"]["value"])
    assert "advised" in capsys.readouterr().out
    for folders, message in (
        (("step1", "self"), "each another --protocol step:K"),
        (("step1", "step1"), "each another --protocol step:K"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Config(sweep=tuple(str(tmp_path / name) for name in folders)))
    changed = tmp_path / "step2" / "config.json"
    changed.write_text(changed.read_text().replace("assets/critic", "assets/other"))
    with pytest.raises(ValueError, match="critic="):
        script.main(script.Config(sweep=(str(tmp_path / "step1"), str(tmp_path / "step2"))))


def test_flags_of_a_critic_are_checked(script, data, tmp_path):
    # Catches: a critic that is silently not asked.
    for more, message in (
        ({"critic": "x", "outputs": "y"}, "is for a --model"),
        ({"critic": "x", "agent": "http://h/v1#m", "method": "react"}, "method react"),
        ({"critic": "x", "agent": "local:y"}, "as --model"),
        ({"advice_judge": "http://h/v1#m", "model": "y"}, "without a --critic"),
        ({"critic_adapter": "x", "model": "y"}, "without a --critic"),
        ({"critic": "x", "model": "y", "protocol": "often"}, "often"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Config(bench="musique", data=str(data), out=str(tmp_path / "no"), **more))
