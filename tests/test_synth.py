"""SynPlan-R's pairs: made by scripts and by models, checked, resumed, counted, audited."""

import copy
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs import synplan
from envs.synplan_teacher import minimal_edit
from envs.synplan_verify import from_record, read_plan, write_plan
from nanoplan import config, synth, synth_audit
from nanoplan.llm import EndpointError
from tests import synplan_oracle
from tests.llm_server import Fault, LLMServer

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("domain", "size", "count"), [
    ("travel", "tiny", 1200), ("retail", "tiny", 700), ("travel", "paper", 20), ("retail", "paper", 80),
])  # fmt: skip
def test_every_pair_is_confirmed_by_brute_force(domain, size, count):
    # Catches: a pair that verifier and teacher agree on and that is wrong. 2,000 instances in all.
    records, reasons, number = [], {}, 0
    makers = synth.Makers(limit_s=0.5)
    for number in range(count):
        line = synth.make(domain, number, size=size, split="train", seed=0, makers=makers)
        if "reason" in line:
            reasons[line["reason"]] = reasons.get(line["reason"], 0) + 1
            continue
        record = json.loads(json.dumps(line))
        records.append(record)
        assert synth.check(record) == "", record["id"]
        for side, valid in (("chosen", True), ("rejected", False)):
            raw, soft, _ = synplan_oracle.severities(record, synplan_oracle.plan_of(record[side]))
            verdict = record[f"verdict_{side}"]
            assert (not any(raw.values())) == valid, (record["id"], side, raw)
            assert {name: one["raw"] for name, one in verdict.items() if name != "decode"} == raw
            assert record[f"soft_{side}"] == pytest.approx(soft)
    assert len(records) > 0.7 * count and sum(reasons.values()) + len(records) == count
    assert set(reasons) <= {"draft: feasible", "edit: search out of time", "edit: none exists"}


def test_a_record_holds_what_training_needs():
    # Catches: a field that is left out, a plan that differs between warm start and preference stage.
    (record,), _ = synth.make_pairs("travel", 1, size="tiny")
    assert [m["role"] for m in record["messages"]] == ["system", "user"]
    assert record["sft"].startswith("<rationale>") and record["sft"].endswith("\n" + record["chosen"])
    broken = {name: one for name, one in record["verdict_rejected"].items() if not one["passed"]}
    total = sum(one["weight"] * one["normalised"] for one in broken.values())
    assert broken and record["severity"]["normalised"] == pytest.approx(min(1, total))
    for one in broken.values():
        assert one["normalised"] == pytest.approx(min(1, one["raw"] / one["tau"]))
    assert record["edit"]["changed"] >= 1 and record["edit"]["tokens"] >= 1 and record["edit"]["proved"]
    again, _ = synth.make_pairs("travel", 1, size="tiny")
    timeless = [r | {"edit": r["edit"] | {"seconds": 0}} for r in (record, again[0])]
    assert timeless[0] == timeless[1]
    other, _ = synth.make_pairs("travel", 1, size="tiny", seed=1)
    assert other[0]["rejected"] != record["rejected"] or other[0]["id"] != record["id"]


def test_a_full_rewrite_changes_much_more():
    # Catches: an ablation whose two arms are the same data.
    for domain in ("travel", "retail"):
        edits, _ = synth.make_pairs(domain, 30, size="tiny")
        rewrites, _ = synth.make_pairs(domain, 30, size="tiny", rewrite=True)
        assert [r["id"] for r in edits] == [r["id"] for r in rewrites]
        assert [r["rejected"] for r in edits] == [r["rejected"] for r in rewrites]
        tokens = [sum(r["edit"]["tokens"] for r in rows) / 30 for rows in (edits, rewrites)]
        assert tokens[1] > 3 * tokens[0], tokens
        assert all(synth.check(record) == "" for record in rewrites)


@pytest.mark.parametrize(("change", "why"), [
    (lambda r: r.update(rejected=r["chosen"]), "rejected: feasible"),
    (lambda r: r.update(chosen=r["rejected"]), "chosen: infeasible"),
    (lambda r: r.update(chosen=""), "no chosen"),
    (lambda r: r.pop("messages"), "no messages"),
    (lambda r: r.update(chosen="I would stay at home."), "chosen: decode failure"),
    (lambda r: r.update(rejected=r["rejected"][:-3]), "rejected: decode failure"),
    (lambda r: r.update(messages_rejected=r["messages"][:1]), "unequal prompts"),
    (lambda r: r["profile"].update(budget=1), "chosen: infeasible"),
    (lambda r: r["knowledge"].pop("entities"), "no instance in the record"),
    (lambda r: r["severity"].update(normalised=0.5), "verdict differs"),
    (lambda r: r["verdict_rejected"]["cost"].update(raw=1.0), "verdict differs"),
])  # fmt: skip
def test_bad_pairs_are_named(change, why):
    # Catches: a pair that trains the model towards a broken plan, or with the wrong margin.
    (record,), _ = synth.make_pairs("travel", 1, size="tiny")
    record = json.loads(json.dumps(record))
    assert synth.check(copy.deepcopy(record)) == ""
    change(record)
    assert synth.check(record) == why


def test_a_profile_that_no_plan_satisfies_gives_no_pair(monkeypatch):
    # Catches: a pair from an impossible instance, or a count that hides it.
    real = synplan.generate

    def poor(domain, number, **how):
        instance = real(domain, number, **how)
        return dataclasses.replace(instance, profile=dataclasses.replace(instance.profile, budget=1))

    monkeypatch.setattr(synplan, "generate", poor)
    line = synth.make("travel", 0, size="tiny", split="train", seed=0, makers=synth.Makers())
    assert line["reason"] == "edit: none exists" and "chosen" not in line
    line = synth.make("travel", 0, size="tiny", split="train", seed=0, makers=synth.Makers(rewrite=True))
    assert line["reason"] == "edit: none found"


def run(out, *flags, **how):
    command = [sys.executable, "-m", "nanoplan.synth", "--out", str(out), *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes, **how)


def lines(path):
    """Records of a file without what a clock decides."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        line.get("edit", {}).pop("seconds", None)
    return found


def test_a_killed_run_goes_on_to_the_same_files(tmp_path):
    # Catches: pairs made twice, lost or in another order after kill -9, a torn last line that stops the run.
    flags = ("--size", "tiny", "--n", 300, "--workers", 2)
    whole = run(tmp_path / "whole", *flags)
    cut = run(tmp_path / "cut", *flags, start_new_session=True)
    path = tmp_path / "cut" / "pairs.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.communicate()
    with open(path, "a") as file:
        file.write('{"id": "travel/tiny/train/9')
    before = path.read_text().count("\n")
    assert 0 < before < 290
    text = run(tmp_path / "cut", *flags)
    told = text.communicate()[0]
    assert text.returncode == 0 and "verified pairs" in told, told
    assert whole.wait() == 0, whole.communicate()[0]
    for name in ("pairs.jsonl", "rejects.jsonl"):
        assert lines(tmp_path / "whole" / name) == lines(tmp_path / "cut" / name)
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["raw"] == 300 and summary["pairs"] + sum(summary["reasons"].values()) == 300
    other = run(tmp_path / "cut", *flags, "--seed", 1)
    told = other.communicate()[0]
    assert other.returncode != 0 and "seed: 0 -> 1" in told and "Traceback" not in told, told


PLAN_OF = {}  # draft's plan -> corrected plan, filled by `teacher` below
DRAFTS = []  # prompts of drafts, the same


def teacher(body, *, faults=()):
    """Answers as query writer, drafter and teacher, told apart by their prompts; some answers are bad."""
    system, last = body["messages"][0]["content"], body["messages"][-1]["content"]
    if "realistic user query" in last:
        return "Somewhere nice for $500." if body["seed"] % 2 == 0 else "Somewhere nice, please."
    if "constraint correction expert" not in system:
        DRAFTS.append(system)
        number = len(DRAFTS) % 7
        instance = instance_of(system, last)
        draft = synplan.WORLDS["travel"].draft(instance, random.Random(number))
        return f"Here you are.\n{write_plan(draft, compact=True)}" if number else "I can't plan trips."
    draft = last.rpartition("=== DRAFT ===\n")[2]
    instance = instance_of(last, "")
    fixed = minimal_edit(instance, read_plan("travel", draft)).plan
    PLAN_OF[draft] = fixed
    which = len(PLAN_OF) % 5
    if which == 1:
        return "You should take a cheaper hotel."
    if which == 2:
        return f"<rationale>Too dear.</rationale>\n{draft}"
    if which == 3:
        return write_plan(fixed, compact=True)
    return f"<think>hm</think><rationale>Too dear.</rationale>\n{write_plan(fixed, compact=True)}"


def instance_of(system, _):
    for number in range(40):
        instance = synplan.generate("travel", number, size="tiny")
        if synplan.messages(instance)[0].content in system:
            return instance
    raise AssertionError(system)


def test_models_write_queries_drafts_and_corrections_and_are_paid_once(tmp_path):
    # Catches: prose that becomes a pair, a teacher's broken plan that is kept, a query with the budget in it,
    # replies that are bought again when a run goes on.
    PLAN_OF.clear()
    DRAFTS.clear()
    with LLMServer(teacher) as server:
        models = {"query": f"{server.url}#q", "draft": f"{server.url}#d"}
        models["teacher"] = f"{server.url}#t?price_in=10"
        cfg = synth.Config(out=str(tmp_path), size="tiny", n=30, workers=1, **models)
        summary = synth.make_all(cfg)
        asked = len(server.bodies)
        assert synth.make_all(dataclasses.replace(cfg, workers=2)) == summary
        assert len(server.bodies) == asked
        for name in ("pairs", "rejects"):  # as if killed before anything was written
            (tmp_path / f"{name}.jsonl").unlink()
        again = synth.make_all(cfg)
        assert len(server.bodies) == asked and again == summary
    pairs = lines(tmp_path / "pairs.jsonl")
    assert pairs and all(synth.check(pair) == "" for pair in pairs)
    assert {pair["messages"][1]["content"] for pair in pairs} == {"Somewhere nice, please."}
    assert {(p["query"], p["draft"], p["edit"]["teacher"]) for p in pairs} == {("q", "d", "t")}
    assert all(pair["sft"] == f"<rationale>Too dear.</rationale>\n{pair['chosen']}" for pair in pairs)
    reasons = summary["reasons"]
    for name in ("draft: decode failure", "edit: no rationale", "edit: infeasible"):
        assert reasons[name] >= 1, reasons
    taught = summary["raw"] - reasons["draft: decode failure"] - reasons.get("draft: feasible", 0)
    assert summary["usd"] == pytest.approx(taught * 100 * 10 / 1e6)
    assert summary["raw"] == 30 and summary["unanswered"] == 0


def test_a_query_that_never_hides_its_numbers_and_a_server_that_dies(tmp_path):
    # Catches: a leaked budget that slips through after the last try, a dead endpoint that yields rejects.
    how = {"out": str(tmp_path / "a"), "size": "tiny", "n": 25, "workers": 1}
    with LLMServer(lambda body: "A trip under three hundred dollars.") as server:
        summary = synth.make_all(synth.Config(query=f"{server.url}#q", **how))
    assert summary["pairs"] == 0
    assert summary["reasons"] == {"query: states a number, or is empty or long": 25}
    with LLMServer(lambda body: Fault(400, {}, b"no")) as server:
        cfg = synth.Config(query=f"{server.url}#q", **how | {"out": str(tmp_path / "b")})
        with pytest.raises(EndpointError, match="20 instances in a row without a reply"):
            synth.make_all(cfg)
        assert not (tmp_path / "b" / "rejects.jsonl").read_text()
    with pytest.raises(EndpointError, match=r"can't be reached"):
        synth.make_all(cfg)
    with pytest.raises(ValueError, match="names no model"):
        synth.models_of(synth.Config(draft="http://127.0.0.1:9/v1"))


def plain_distance(a, b):
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, start=1):
        rows.append([i])
        for j, y in enumerate(b, start=1):
            rows[i].append(min(rows[i - 1][j - 1] + (x != y), rows[i - 1][j] + 1, rows[i][j - 1] + 1))
    return rows[-1][-1]


def test_token_distance():
    # Catches: a distance that counts a replaced token twice, or all that follows an inserted one.
    assert synth_audit.token_distance("kitten", "sitting") == 3
    assert synth_audit.token_distance("abcdef", "abXcdef") == 1
    assert synth_audit.token_distance("", "abc") == 3
    assert synth_audit.token_distance("abab", "ab") == 2
    rng = random.Random(0)
    for _ in range(200):
        a, b = ("".join(rng.choices("abc", k=rng.randint(0, 40))) for _ in range(2))
        assert synth_audit.token_distance(a, b) == plain_distance(a, b)
    assert synth_audit.words('{"day":12}') == ["{", '"', "day", '"', ":", "12", "}"]


def test_statistics_of_the_graphs_are_the_papers():
    # Catches: instances of another size than the paper's. Its means, within four standard errors here.
    for domain, wanted in synth_audit.TABLE_7.items():
        found = synth.graph_statistics(domain, range(200), size="paper")
        for name, tolerance in (("hard", 0.15), ("soft", 0.25), ("entities", 0.5), ("grounds", 1.7)):
            assert found[name] == pytest.approx(wanted[name], abs=tolerance), (domain, name, found)
    assert found["conflicts"] < 0.2  # 0.31 cannot come of the paper's own probabilities
    assert "41.2" in synth_audit.graph_table({"travel": found})


def test_constants_are_medians_and_can_replace_the_papers(tmp_path):
    # Catches: a mean, a median over feasible plans, constants that are computed and not used.
    cfg = synth.Config(do="tau", out=str(tmp_path), size="tiny", n=120)
    tau = synth.main(cfg)["tau"]["travel"]
    over = []
    for number in range(120):
        instance = synplan.generate("travel", number, size="tiny", split="tau")
        rng = random.Random(f"{instance.id}/0")
        report = synplan.verify(
            instance, write_plan(synplan.WORLDS["travel"].draft(instance, rng), compact=True)
        )
        over += [report.findings["cost"].raw] if not report.findings["cost"].passed else []
    assert tau["cost"] == sorted(over)[len(over) // 2] or len(over) % 2 == 0
    summary = synth.make_all(
        synth.Config(out=str(tmp_path / "p"), size="tiny", n=30, tau=str(tmp_path / "tau.json"))
    )
    pairs = lines(tmp_path / "p" / "pairs.jsonl")
    assert summary["pairs"] == len(pairs) > 10
    assert {pair["verdict_rejected"]["cost"]["tau"] for pair in pairs} == {tau["cost"]}
    assert all(synth.check(pair) == "" for pair in pairs)
    assert from_record(pairs[0]).tau == tau


def test_contamination(tmp_path, capsys):
    # Catches: an audit that finds nothing in a copy of its own data, or something in another world.
    out = tmp_path / "run"
    synth.make_all(synth.Config(out=str(out), size="tiny", n=20))
    (tmp_path / "copy").mkdir()
    (tmp_path / "other").mkdir()
    pair = lines(out / "pairs.jsonl")[0]
    (tmp_path / "copy" / "plans.jsonl").write_text(json.dumps({"a": [pair["chosen"]]}) + "\n")
    (tmp_path / "other" / "x.json").write_text(json.dumps({"text": "words of another text " * 3}))
    against = (str(tmp_path / "copy"), str(tmp_path / "other"))
    rows = synth.main(synth.Config(do="contamination", out=str(out), against=against))
    by = {(row["of"], Path(row["path"]).name): row["max"] for row in rows}
    assert by["plans", "copy"] == 1.0 and by["plans", "other"] == by["queries", "other"] == 0.0
    assert "100.0 %" in capsys.readouterr().out
    with pytest.raises(ValueError, match="against"):
        synth.main(synth.Config(do="contamination", out=str(out)))
    with pytest.raises(ValueError, match="holds no file"):
        synth.main(synth.Config(do="contamination", out=str(out), against=(str(tmp_path / "none"),)))


def test_audit_by_hand(tmp_path, capsys):
    # Catches: labels that are read against the wrong plan, a sheet that shows the verifier's answer, a rate
    # without its interval.
    out = tmp_path / "run"
    synth.make_all(synth.Config(out=str(out), size="tiny", n=40))
    cfg = synth.Config(do="audit", out=str(out), audit_n=20)
    assert synth.main(cfg) == {"pairs": 20}
    sheet = lines(out / "audit.jsonl")
    known = {pair["id"]: pair for pair in lines(out / "pairs.jsonl")}
    assert not any("verdict" in key or "chosen" in key for row in sheet for key in row)
    firsts = {row["first"] == known[row["id"]]["chosen"] for row in sheet}
    assert firsts == {True, False}
    with pytest.raises(ValueError, match="line 1: label_first=''"):
        synth.main(dataclasses.replace(cfg, do="grade"))
    for row in sheet:
        for place in ("first", "second"):
            row[f"label_{place}"] = "pass" if row[place] == known[row["id"]]["chosen"] else "fail"
    for row, label in ((sheet[3], "pass"), (sheet[4], "fail")):
        row |= {"label_first": label, "label_second": label}
    (out / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sheet))
    found = synth.main(dataclasses.replace(cfg, do="grade"))
    assert {name: row["count"] for name, row in found.items()} == {
        "agreement": 18, "false pass": 1, "false fail": 1, "decode failures": 0,
    }  # fmt: skip
    assert found["agreement"]["low"] == pytest.approx(0.699, abs=1e-3)
    assert "98.7 %" in capsys.readouterr().out
    with pytest.raises(ValueError, match="perhaps with labels"):
        synth.main(cfg)


def test_the_command_explains_itself(tmp_path):
    # Catches: a flag without a comment, a traceback for a user's mistake.
    told = config.help_text(synth.Config)
    assert "--teacher" in told and "CM-DPO o3-mini" in told
    with pytest.raises(ValueError, match="the nearest is --pairs"):
        config.from_flags(synth.Config, ["--pears", "3"])
    done = run(tmp_path / "none", "--do", "stats")
    told = done.communicate()[0]
    assert done.returncode != 0 and "make pairs first" in told and "Traceback" not in told


def test_a_local_model_drafts(tmp_path):
    # Catches: a model of this process that is asked in another form than an endpoint.
    cfg = synth.Config(
        out=str(tmp_path), size="tiny", n=3, workers=2, draft=f"local:{ROOT}/assets/tiny", max_tokens=40
    )
    summary = synth.make_all(cfg)
    assert summary["raw"] == 3 and summary["reasons"] == {"draft: decode failure": 3}
    found = lines(tmp_path / "rejects.jsonl")
    assert {line["draft"] for line in found} == {"tiny"} and all(line["rejected"] for line in found)
    assert all(line["spent"]["completion_tokens"] > 0 for line in found)
