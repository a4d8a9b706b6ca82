"""SynPlan-R's worlds: generator, reading of plans, verifier and exact teacher."""

import dataclasses
import json
import random

import pytest

import eval as evaluation
from envs import synplan, synplan_retail, synplan_travel
from envs.synplan_cities import CITIES, ground_minutes
from envs.synplan_teacher import minimal_edit
from envs.synplan_verify import Entity, Instance, Profile, from_record, read_plan, write_plan
from tests import synplan_oracle

WORLDS = {"travel": synplan_travel, "retail": synplan_retail}
HOME, CITY = "San Francisco", "New York"


def worked_example():
    """Appendix 23: $600, Friday 9:00 to Sunday 20:00, three places, boutique; a flight at $180, two nights at
    $195, $80 for a museum and a dinner."""
    entries = [
        Entity("F1", "United #482", "flight", 180, city=CITY, origin=HOME, depart=600, minutes=330),
        Entity("H1", "Hampton Inn", "hotel", 195, ("central",), city=CITY),
        Entity("H2", "Pod 51 Boutique", "hotel", 170, ("boutique",), city=CITY),
        Entity("H3", "Plain Bunks", "hotel", 60, (), city=CITY),
        Entity("H4", "Velvet Boutique", "hotel", 240, ("boutique",), city=CITY),
        Entity("A1", "MoMA", "activity", 30, ("art",), city=CITY, minutes=120),
        Entity("R1", "Dinner", "restaurant", 50, ("french",), city=CITY, minutes=90),
    ]
    minutes = {(a, b): ground_minutes(a, b, 5) for a in (HOME, CITY) for b in (HOME, CITY)}
    profile = Profile(600, ("boutique",), origin=HOME, start=540, end=2 * 1440 + 1200, pace=3)
    query = "Looking for a weekend escape with character; cheap flights ok if hotels are fun."
    known = {entry.key: entry for entry in entries}
    return Instance("travel/hand/test/0", "travel", profile, known, minutes, query=query)


def items_of(instance, *parts):
    """Items from (key, day) or (key, day, start) tuples, as a model would write them."""
    found = []
    for key, day, *start in parts:
        entry = instance.entities[key]
        item = {"name": entry.name, "type": entry.kind, "day": day}
        item |= {"start_time": start[0]} if start else {}
        found.append(item | {"stated_price": entry.price, "db_lookup_key": key})
    return found


def text_of(items, total=0, cities=(CITY,)):
    plan = {"items": items, "total_stated_cost": total, "destinations_visited": list(cities)}
    return f"<plan>{json.dumps(plan)}</plan>"


TRIP = (("F1", 1), ("H1", 1), ("A1", 2, "10:00"), ("R1", 2, "19:00"))


def test_the_worked_example_of_the_paper():
    # Catches: severity from the stated total, nights counted once, an edit of more than the hotel.
    instance = worked_example()
    draft = text_of(items_of(instance, *TRIP), 650)
    report = synplan.verify(instance, draft)
    assert report.broken == ["cost"] and report.cost == 650
    finding = report.findings["cost"]
    assert (finding.raw, finding.unit) == (50.0, "USD")
    assert finding.normalised == pytest.approx(50 / 84)
    assert report.severity() == {
        "normalised": pytest.approx(50 / 84 / 3),
        "raw": pytest.approx(50 / 3),
        "unit": 1,
    }
    assert report.soft == 0.0
    edit = minimal_edit(instance, read_plan("travel", draft))
    assert edit.changed == [("H1", "H2")] and edit.proved
    assert edit.report.passed and edit.report.cost == 600 and edit.report.soft == 0.25
    assert edit.plan["total_stated_cost"] == 600
    kept = [item for item in edit.plan["items"] if item["type"] != "hotel"]
    assert kept == [item for item in items_of(instance, *TRIP) if item["type"] != "hotel"]


def test_prices_schedules_and_lengths_come_from_the_database():
    # Catches: a verifier that believes the plan: a stated price of 1, a flight at a convenient hour, a visit
    # of no length, all of which a policy learns within hours.
    instance = worked_example()
    cheap = items_of(instance, *TRIP)
    for item in cheap:
        item["stated_price"] = 1
    assert synplan.verify(instance, text_of(cheap, 4)).findings["cost"].raw == 50
    early = items_of(instance, ("F1", 1, "9:30"), ("H1", 1, "10:00"), *TRIP[2:])
    assert synplan.verify(instance, text_of(early)).findings["time"].raw == 600 + 330 + 30 - 600
    short = items_of(instance, *TRIP[:2], ("A1", 2, "10:00"), ("R1", 2, "10:30"))
    short[2]["end_time"] = "10:00"
    assert synplan.verify(instance, text_of(short)).findings["time"].raw == 120 + 30 - 30


@pytest.mark.parametrize(("parts", "broken"), [
    ((("F1", 1), ("H2", 1), ("A1", 2), ("R1", 2)), {}),  # no times: as early as can be
    ((("F1", 1), ("H2", 1), ("A1", 2, "10:00"), ("R1", 2, "12:30")), {}),  # 120 minutes, and 30 across town
    ((("F1", 1), ("H2", 1), ("A1", 2, "10:00"), ("R1", 2, "12:29")), {"time": 1}),
    ((("F1", 1), ("H2", 1), ("R1", 2, "12:00"), ("A1", 2, "10:00")), {"time": 240}),  # order of the plan
    ((("F1", 1), ("H2", 1), ("A1", 2), ("R1", 3, "19:30")), {"time": 60}),  # past Sunday 20:00
    ((("F1", 1), ("H2", 1), ("A1", 2), ("R1", 2, "23:00")), {"time": 30}),  # past its day
    ((("F1", 1), ("H2", 1), ("A1", 2)), {"pace": 1}),  # the city and one attraction
    ((("F1", 1), ("H2", 1), ("A1", 2), ("A1", 3)), {"pace": 1}),  # twice is one
    ((("F1", 1), ("A1", 2), ("R1", 2)), {"stay": 2}),
    ((("F1", 1), ("H2", 2), ("A1", 2), ("R1", 2)), {"stay": 1}),
    ((("H2", 1), ("A1", 2), ("R1", 2)), {"time": None}),  # on foot from San Francisco
    ((("F1", 4), ("H2", 4), ("A1", 4), ("R1", 4)), {"time": None, "stay": 2}),  # after Sunday
])  # fmt: skip
def test_travel_constraints(parts, broken):
    # Catches: gaps counted from start to start, hotels as flat fees, places counted twice, nights outdoors.
    report = synplan.verify(instance := worked_example(), text_of(items_of(instance, *parts)))
    found = {name: report.findings[name].raw for name in report.broken}
    assert found.keys() == broken.keys(), report.verdict().reasons
    assert all(amount is None or found[name] == amount for name, amount in broken.items()), found


def test_a_hotel_must_be_where_the_traveller_is():
    # Catches: one hotel in the cheapest city for all nights of a trip through two.
    instance = synplan.generate("travel", 1)
    plan = synplan_travel.cheap_plan(instance)
    hotels = [i for i, item in enumerate(plan["items"]) if item["type"] == "hotel"]
    assert len(hotels) == 2
    without = [item for i, item in enumerate(plan["items"]) if i != hotels[1]]
    report = synplan_travel.verify(instance, synplan_travel.total(instance, without))
    assert report.findings["stay"].raw >= 1


def test_daily_hours_and_the_cap_are_constraints_of_some_instances():
    # Catches: a fourth constraint that is stated in the prompt and never checked.
    instance = worked_example()
    late = text_of(items_of(instance, *TRIP[:3], ("R1", 2, "20:00")))
    assert "hours" not in synplan.verify(instance, late).findings
    strict = dataclasses.replace(instance, profile=dataclasses.replace(instance.profile, hours=(480, 1260)))
    assert synplan.verify(strict, late).findings["hours"].raw == 20 * 60 + 90 - 1260
    assert strict.hard == ("cost", "time", "pace", "hours")
    assert "ends after 21:00" in synplan_travel.prompt(strict)


def hand_bundle():
    entries = [
        Entity("P1", "Lotus printer One", "printer", 100, ("printer", "wireless"), brand="Lotus"),
        Entity("P2", "Heron printer Go", "printer", 160, ("printer",), brand="Heron"),
        Entity("P3", "Lotus cartridge Max", "cartridge", 40, ("cartridge",), brand="Lotus"),
        Entity("P4", "Heron cartridge Pro", "cartridge", 30, ("cartridge",), brand="Heron"),
    ]
    profile = Profile(150, ("Lotus",), features=("cartridge", "printer", "wireless"), cap=("cartridge", 35))
    known, clash = {entry.key: entry for entry in entries}, frozenset([frozenset(("P1", "P4"))])
    return Instance("retail/hand/test/0", "retail", profile, known, {}, clash)


@pytest.mark.parametrize(("keys", "broken", "soft"), [
    (("P1", "P3"), {"cap": 5}, 1.0),
    (("P1", "P4"), {"compat": 1}, 0.5),
    (("P2", "P4"), {"cost": 40, "features": 1}, 0.0),
    (("P1",), {"features": 1}, 1.0),
    (("P1", "P4", "P4", "P3"), {"cost": 50, "compat": 1, "cap": 65}, 2 / 3),
])  # fmt: skip
def test_retail_constraints(keys, broken, soft):
    # Catches: a product bought twice counted once in the cost or twice in conflicts and preferences.
    instance = hand_bundle()
    plan = {"items": [synplan_retail._item(instance.entities[key]) for key in keys], "total_stated_cost": 0}
    report = synplan.verify(instance, write_plan(plan, compact=True))
    assert {name: report.findings[name].raw for name in report.broken} == broken
    assert report.soft == pytest.approx(soft)


GOOD = text_of(items_of(worked_example(), ("F1", 1), ("H2", 1), ("A1", 2), ("R1", 2)))
ITEM = {"name": "x", "type": "hotel", "day": 1, "stated_price": 1, "db_lookup_key": "H2"}


@pytest.mark.parametrize("text", [
    "",
    "I would fly United #482 and stay at Pod 51.",
    GOOD.replace("</plan>", ""),
    GOOD + GOOD,
    GOOD.replace("{", "{{", 1),
    "<plan>[]</plan>",
    "<plan>NaN</plan>",
    "<plan>" + "[" * 5000 + "</plan>",
    text_of([]),
    text_of([ITEM | {"type": "train"}]),
    text_of([ITEM | {"day": 0}]),
    text_of([ITEM | {"day": "1"}]),
    text_of([ITEM | {"stated_price": -1}]),
    text_of([ITEM | {"stated_price": "free"}]),
    text_of([ITEM | {"start_time": "25:00"}]),
    text_of([{key: ITEM[key] for key in ITEM if key != "db_lookup_key"}]),
    text_of([ITEM] * 61),
    GOOD.replace('"total_stated_cost": 0', '"total_stated_cost": 1e999'),
    GOOD.replace('"day": 1', '"day": 1, "day": 2', 1),
    "x" * 30_000 + GOOD,
])  # fmt: skip
def test_what_is_no_plan_is_a_decode_failure(text):
    # Catches: an exception out of the verifier, or prose that is taken for a plan.
    report = synplan.verify(worked_example(), text)
    assert report.broken == ["decode"] and not report.passed and report.soft == 0.0
    assert report.severity()["normalised"] == 1.0
    assert report.verdict().checks == {"decode": False}


def test_text_around_the_block_is_not_read():
    # Catches: a rationale, or a thought with a plan in it, that makes a good answer fail.
    instance = worked_example()
    for text in (f"<rationale>H1 is too dear.</rationale>\n{GOOD}", f"<think>{GOOD}</think>{GOOD}\nDone."):
        assert synplan.verify(instance, text).passed
    unknown = GOOD.replace('"H2"', '"H9"')
    assert synplan.verify(instance, unknown).findings["lookup"].raw == 1
    wrong_type = GOOD.replace('"type": "hotel"', '"type": "activity"')
    assert "lookup" in synplan.verify(instance, wrong_type).broken


@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_an_instance_is_a_function_of_its_number(domain):
    # Catches: instances that depend on the order in which they are made, or that a record does not restore.
    one, again = (synplan.generate(domain, 5, size="small") for _ in range(2))
    synplan.generate(domain, 6, size="small")
    assert one.record() == again.record() and one.query == again.query
    assert one.record() != synplan.generate(domain, 5, size="small", split="test").record()
    record = {"id": one.id, **json.loads(json.dumps(one.record()))}
    record["messages"] = [{"role": "user", "content": one.query}]
    restored = from_record(record)
    assert restored.record() == one.record() and restored.entities == one.entities
    with pytest.raises(ValueError, match="no instance in the record"):
        from_record({"id": "travel/x"})


@pytest.mark.parametrize("size", ["paper", "tiny", "small"])
@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_every_instance_can_be_solved_and_its_query_names_no_number(domain, size):
    # Catches: a budget below the cheapest valid plan, and a query that gives the budget away.
    for number in range(40):
        instance = synplan.generate(domain, number, size=size)
        plan = WORLDS[domain].cheap_plan(instance)
        report = synplan.verify(instance, write_plan(plan, compact=instance.compact))
        assert report.passed, (instance.id, report.verdict().reasons)
        assert not any(char.isdigit() for char in instance.query)


def test_forty_eight_cities_and_a_fixed_matrix():
    # Catches: a matrix that is drawn per instance, or that is not symmetric.
    assert len(CITIES) == 48
    assert ground_minutes("Boston", "New York", 5) == ground_minutes("New York", "Boston", 5) == 255
    assert ground_minutes("Boston", "Boston", 5) == 30


def record_of(instance):
    return {"id": instance.id, **json.loads(json.dumps(instance.record()))}


@pytest.mark.parametrize("size", ["paper", "small"])
@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_severities_agree_with_a_second_implementation(domain, size):
    # Catches: a rule that the verifier and the generator share and that is wrong in both.
    broken = set()
    for number in range(100):
        instance, rng = synplan.generate(domain, number, size=size), random.Random(number)
        plan = WORLDS[domain].draft(instance, rng)
        spoil(plan, instance, rng)
        raw, soft, cost = synplan_oracle.severities(record_of(instance), plan)
        report = synplan.verify(instance, write_plan(plan, compact=True))
        found = {name: finding.raw for name, finding in report.findings.items() if name != "decode"}
        assert found == raw and report.soft == pytest.approx(soft) and report.cost == cost, instance.id
        broken |= set(report.broken)
    assert broken >= set(instance.hard) - {"hours", "cap"} | {"lookup"}


def spoil(plan, instance, rng):
    """Shuffle, drop, repeat, rename and move items now and then."""
    items = plan["items"]
    if rng.random() < 0.3:
        rng.shuffle(items)
    if rng.random() < 0.3:
        items.append(dict(rng.choice(items)))
    if rng.random() < 0.2:
        items[0]["db_lookup_key"] = rng.choice(["X1", *instance.entities])
    if rng.random() < 0.3 and "day" in items[0]:
        rng.choice(items)["day"] = rng.randint(1, 5)
    if rng.random() < 0.3 and "day" in items[0]:
        rng.choice(items)["start_time"] = f"{rng.randint(0, 23)}:{rng.choice(['00', '30'])}"


def compare_with_brute_force(instance, plan, starts=None):
    edit = minimal_edit(instance, plan, max_changes=2, limit_s=60)
    best = synplan_oracle.smallest_edit(record_of(instance), plan, most=2, starts=starts)
    assert edit.proved
    if best is None:
        assert edit.plan is None
        return 0
    found = len(edit.changed), edit.report.soft, abs(edit.report.cost - wanted(instance, plan))
    assert found == pytest.approx(best), (instance.id, found, best)
    return best[0]


def wanted(instance, plan):
    spent = WORLDS[instance.domain].total(instance, plan["items"])["total_stated_cost"]
    return min(instance.profile.budget, spent)


@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_no_smaller_edit_exists(domain):
    # Catches: a bound that cuts off the best edit. 250 instances of each world against all edits of up to
    # two items.
    sizes = [0, 0, 0]
    for number in range(250):
        instance = synplan.generate(domain, number, size="small", split="val")
        plan = WORLDS[domain].draft(instance, random.Random(number))
        sizes[compare_with_brute_force(instance, plan)] += 1
    assert sizes[1] > 100 and sizes[2] > 10, sizes


def test_no_smaller_edit_exists_where_items_have_times():
    # Catches: a search that never moves an item to another time, or moves one that need not move.
    starts, moved = [f"{hour:02d}:00" for hour in range(9, 23)], 0
    for number in range(40):
        instance = synplan.generate("travel", number, size="small", split="val")
        instance = dataclasses.replace(instance, compact=False)
        chosen = [(instance.entities[key], 1) for key in ("F1", "H1", "R1")]
        plan = synplan_travel.compose(instance, chosen)
        profile = dataclasses.replace(instance.profile, budget=plan["total_stated_cost"], pace=2, hours=None)
        instance = dataclasses.replace(instance, profile=profile)
        synplan_travel.hurry(plan["items"], 2, random.Random(number))
        edit = minimal_edit(instance, plan)
        if edit.plan is None or len(edit.changed) > 1:
            continue
        compare_with_brute_force(instance, plan, starts)
        moved += edit.changed == [("R1", "R1")]
    assert moved > 10


def test_a_plan_that_nothing_mends_and_a_search_out_of_time():
    # Catches: a teacher that hands back a plan that fails, or that claims a proof it had no time for.
    instance = worked_example()
    poor = dataclasses.replace(instance, profile=dataclasses.replace(instance.profile, budget=100))
    plan = read_plan("travel", text_of(items_of(instance, *TRIP)))
    edit = minimal_edit(poor, plan)
    assert edit.plan is None and edit.changed == [] and edit.proved and edit.report is None
    big = synplan.generate("travel", 3)
    hard = dataclasses.replace(big, profile=dataclasses.replace(big.profile, pace=40))
    edit = minimal_edit(hard, synplan_travel.careless(big, random.Random(0)), limit_s=0.05)
    assert edit.plan is None and not edit.proved and edit.seconds < 2


def test_a_valid_plan_comes_back_as_it_is():
    # Catches: a teacher that improves preferences where nothing was broken.
    instance = worked_example()
    plan = read_plan("travel", GOOD)
    edit = minimal_edit(instance, plan)
    assert edit.plan == plan and edit.changed == [] and edit.proved


def test_changed_items_keep_what_they_can():
    # Catches: an edit that moves a dinner to noon because that is as early as can be.
    instance = worked_example()
    known = dict(instance.entities)
    known["R2"] = Entity("R2", "Deli", "restaurant", 5, ("boutique",), city=CITY, minutes=60)
    instance = dataclasses.replace(instance, entities=known, profile=Profile(
        625, ("boutique",), origin=HOME, start=540, end=2 * 1440 + 1200, pace=3))  # fmt: skip
    plan = read_plan("travel", text_of(items_of(instance, *TRIP)))
    for item in plan["items"]:
        if item["type"] == "restaurant":
            item["end_time"] = "20:30"
    edit = minimal_edit(instance, plan)
    (change,) = edit.changed
    assert change in (("R1", "R2"), ("H1", "H2"))
    dinner = edit.plan["items"][3]
    assert dinner["start_time"] == "19:00"


@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_eval_prints_the_papers_numbers(domain, tmp_path, capsys):
    # Catches: S over plans that fail, parse failures counted among broken constraints, a benchmark that
    # eval.py wants a folder for.
    envs = (synplan.load if domain == "travel" else synplan.load_retail)("tiny/val", n=20)
    path, soft, feasible = tmp_path / "o.jsonl", [], 0
    with open(path, "w") as file:
        for i, env in enumerate(envs):
            world, rng = WORLDS[domain], random.Random(i)
            plan = world.cheap_plan(env.instance) if i < 12 else world.draft(env.instance, rng)
            text = write_plan(plan, compact=True) if i < 16 else "Stay at home."
            report = synplan.verify(env.instance, text)
            feasible += report.passed
            soft += [report.soft] if report.passed else []
            file.write(json.dumps({"id": env.task.id, "output": text}) + "\n")
    flags = {"bench": f"synplan_{domain}", "split": "tiny/val", "n": 20, "outputs": str(path)}
    results = evaluation.main(evaluation.Config(out=str(tmp_path / "e"), **flags))
    found = results["metrics"]["cm-dpo"]
    assert (found["PR"], found["DR"]) == (feasible / 20, 0.8) and found["failures"]["parse"] == 0.2
    assert found["S"] == pytest.approx(sum(soft) / len(soft))
    assert results["strict"]["valid_rate"]["value"] == feasible / 20
    assert results["strict"]["decode"]["n"] == 20 and results["strict"]["cost"]["n"] == 16
    assert "failures.parse" in capsys.readouterr().out
    assert synplan.metrics([{"strict": {"pass": False}, "facts": {}}])["cm-dpo"]["S"] is None


@pytest.mark.parametrize("domain", ["travel", "retail"])
def test_load(domain):
    # Catches: a split whose first n are always the same, an environment that eval.py can't run.
    load = synplan.load if domain == "travel" else synplan.load_retail
    envs = load("tiny/test", None, n=20, seed=3)
    assert len({env.task.id for env in envs}) == 20
    assert [e.task.id for e in envs] != [e.task.id for e in load("tiny/test", n=20, seed=4)]
    env = envs[0]
    first, second = env.reset()
    assert (first.role, second.role) == ("system", "user") and env.instance.query == second.content
    good = WORLDS[domain].cheap_plan(env.instance)
    twin = env.fork()
    assert env.step(write_plan(good, compact=True), []) == ([], True)
    assert env.verify().passed and env.measures()["severity"] == 0.0
    assert twin.verify().checks == {"decode": False} and twin.view().text == "(no plan)"
    assert env.official() is None and good["items"][0]["name"] in env.view().text
    for wrong in ({"data": "x"}, {"n": 10**6}):
        with pytest.raises(ValueError, match=r"leave data empty|choose 1 to"):
            load("test", **wrong)
    with pytest.raises(ValueError, match="unknown"):
        load("dev")
    with pytest.raises(ValueError, match="size"):
        synplan.generate(domain, 0, size="huge")
