"""Traces imputed from reference plans, and pairs of final plans, as train_cmdpo.py reads them."""

import json
import sys
from pathlib import Path

import pytest

from envs import trips, triptailor, triptailor_traces
from envs.base import Call
from nanoplan.chat import Chat
from nanoplan.evaluate import write_lines
from nanoplan.pairs import read_demonstrations, read_pairs

TINY = Path(__file__).parents[1] / "assets" / "tiny"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return trips.build(tmp_path_factory.mktemp("trips") / "world", seed=0, cities=4, train=40, test=3)


@pytest.fixture(scope="module")
def envs(data):
    return triptailor.load("train", data, max_rows=5, hours=False)


def names(plan: dict) -> set[str]:
    places = {activity["location"] for day in plan["itinerary"].values() for activity in day}
    return places | {ride["number"] for ride in plan["transportation"]} | {plan["hotel"][0]["name"]}


def test_a_trace_leads_to_its_plan(envs):
    # Catches: a plan whose names no result has shown, results that the tools would not give, idle searches.
    records, left_out = triptailor_traces.traces(envs)
    assert len(records) == len(envs) and not left_out
    for env, record in zip(envs, records, strict=True):
        *talk, last = record["messages"]
        assert [m["role"] for m in talk[:2]] == ["system", "user"] and last["role"] == "assistant"
        plan = json.loads(last["content"])
        assert plan == env.reference_plan()
        shown, twin = set(), env.fork()
        twin.reset()
        results = iter([m for m in talk if m["role"] == "tool"])
        for message in talk[2:]:
            for call in message.get("tool_calls", []):
                function = call["function"]
                (answer,), _ = twin.step("", [Call(function["name"], function["arguments"])])
                assert answer.content == next(results)["content"]
                new = {row.get("name") or row["number"] for row in json.loads(answer.content)} & names(plan)
                assert new - shown, f"{function} shows nothing new"
                shown |= new
        assert shown == names(plan) and next(results, None) is None


def test_parts_that_cannot_be_found_are_counted(data):
    # Catches: one invented name in one human plan that ends the whole job.
    envs = triptailor.load("train", data, max_rows=5, hours=False)
    plan = envs[0].reference_plan()
    plan["hotel"][0]["name"] = "Nowhere Inn"
    envs[0].task.data["final_plan_json"] = json.dumps(plan)
    for key in ("final_plan_json", "final_plan"):
        envs[1].task.data.pop(key, None)
    records, left_out = triptailor_traces.traces(envs)
    assert [r["id"] for r in records] == [env.task.id for env in envs[2:]] and sum(left_out.values()) == 2
    assert left_out["hotel that is not in the database"] == 1


def test_stages_read_both_files(data, envs, tmp_path, monkeypatch, capsys):
    # Catches: a record that train_cmdpo.py refuses, a loss on what the tools said, a loser that is chosen.
    out = tmp_path / "traces.jsonl"
    triptailor_traces.main(["traces", "--data", str(data), "--out", str(out)])
    chat = Chat(TINY)
    kept, refused = read_demonstrations(out, chat, max_tokens=4000)
    assert len(kept) == 40 and not refused and "40 traces of 40" in capsys.readouterr().out
    first = json.loads(out.read_text().splitlines()[0])
    said = chat.decode([i for i, sampled in zip(kept[0].ids, kept[0].sampled, strict=True) if sampled])
    assert first["messages"][-1]["content"] in said and first["messages"][1]["content"] not in said
    assert said.count("<tool_call>") == sum(len(m.get("tool_calls", [])) for m in first["messages"])
    assert not any(m["content"] in said for m in first["messages"] if m["role"] == "tool")

    good, bad = first["messages"][-1]["content"], '{"hotel":[]}'

    def item(id, output, *, passed, win, outcome="win"):
        return {"id": id, "output": output, "strict": {"pass": passed}, "win": win, "outcome": outcome}

    run = tmp_path / "run"
    run.mkdir()
    a, b, c, d = (env.task.id for env in envs[:4])
    write_lines(run / "items.jsonl", [
        item(a, good, passed=True, win=1.0), item(a, bad, passed=False, win=1.0),
        item(a, good, passed=True, win=1.0), item(a, "x", passed=True, win=None, outcome="error"),
        item(b, good, passed=False, win=1.0), item(b, bad, passed=True, win=0.5),
        item(c, good, passed=True, win=1.0), item(d, "", passed=False, win=0.0),
    ])  # fmt: skip
    pairs_file = tmp_path / "pairs.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["x", "pairs", "--data", str(data), "--run", str(run), "--out", str(pairs_file)]
    )
    triptailor_traces.main()
    (record,) = (json.loads(line) for line in pairs_file.read_text().splitlines())
    assert (record["chosen"], record["rejected"]) == (good, bad) and record["id"].startswith(a)
    pairs, refused = read_pairs(pairs_file, chat, max_tokens=4000)
    assert len(pairs) == 1 and not refused
    assert "'no plan': 37" in (text := capsys.readouterr().out) and "every plan won" in text
