"""eval.py with a critic beside the model, on a generated MuSiQue world and the built-in agent and critic."""

import importlib.util
import json
from pathlib import Path

import pytest
from llm_server import LLMServer

from envs import musique_make
from nanoplan import dist

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
    try:
        results = script.main(script.Config(model=str(ROOT / "assets" / "agent"), out=str(out), **flags))
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


def test_flags_of_a_critic_are_checked(script, data, tmp_path):
    # Catches: a critic that is silently not asked.
    for more, message in (
        ({"critic": "x", "outputs": "y"}, "is for a --model"),
        ({"critic_adapter": "x", "model": "y"}, "without a --critic"),
        ({"critic": "x", "model": "y", "protocol": "often"}, "often"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Config(bench="musique", data=str(data), out=str(tmp_path / "no"), **more))
