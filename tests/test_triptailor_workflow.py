"""Direct prompting and the workflow as messages, driven by scripted repliers instead of a model."""

import json

import pytest
from llm_server import LLMServer
from toy import Counter

import eval as script
from envs import BENCHMARKS, trips
from envs.base import Message
from envs.triptailor_data import normal
from envs.triptailor_plan import parse_plan
from envs.triptailor_workflow import BATCH, direct_messages, hotel_options, numbers, ride_options, workflow
from nanoplan.agents import Setup, play
from nanoplan.rollout import Budget

triptailor = BENCHMARKS["triptailor"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return trips.build(tmp_path_factory.mktemp("world"), seed=6, cities=4, train=2, test=8, days=(2, 4))


def run(env, reply_to):
    """The final answer, and every prompt on the way."""
    talk, prompts = workflow(env), []
    messages = next(talk)
    while True:
        assert [m.role for m in messages] == ["system", "user"] and messages[1].content == env.request.query
        prompts.append(messages[0].content)
        try:
            messages = talk.send(reply_to(messages))
        except StopIteration as stop:
            return stop.value, prompts


def draft(messages):
    """Answers the last stage with its own draft, all others with the first choice."""
    text = messages[0].content
    return text[text.index('{"hotel":[{"day":1,"name":"') :] if "This draft" in text else "I take [1]."


def test_the_workflow_ends_in_a_plan_of_what_was_chosen(world):
    # Catches: a stage that is skipped, or a choice that the plan does not hold.
    for env in triptailor.load("test", world):
        answer, prompts = run(env, draft)
        plan, request = parse_plan(answer), env.request
        stages = ["one line", "outbound ride", "return ride", "Sort these", "Spread sights", "lunch of day 1"]
        found = [
            next(i for i, prompt in enumerate(prompts) if stage in prompt) for stage in (*stages, "the hotel")
        ]
        assert found == sorted(found) and "This draft" in prompts[-1]
        assert sum("Sort these" in prompt for prompt in prompts) == -(-16 // BATCH)
        env.step(answer, [])
        checks = env.verify().checks
        assert checks["within_sandbox"] and checks["diverse_restaurants"] and checks["diverse_attractions"]
        assert checks["meal_prices"] and len(plan["itinerary"]) == request.days
        hotel = env.data.named("hotel", request.destination, plan["hotel"][0]["name"])[0]
        assert hotel.tags == request.category


@pytest.mark.parametrize(
    "reply", ["", "no idea", "[999]", "[0]", "Day 1: [1, 1, 99]\nDay 9: [2]", "[" * 5000, "[1" * 900]
)
def test_replies_that_say_nothing_take_the_default(world, reply):
    # Catches: an exception, or an endless talk, on what a model writes.
    env = triptailor.load("test", world)[0]
    answer, prompts = run(
        env, lambda messages: draft(messages) if "This draft" in messages[0].content else reply
    )
    assert len(prompts) < 40
    parse_plan(answer)


def test_choices_are_heard(world):
    # Catches: the first option whatever the model says.
    env = triptailor.load("test", world)[0]
    second, _ = run(env, lambda m: draft(m) if "This draft" in m[0].content else "First [1]? No: [2]")
    first, _ = run(env, draft)
    for one, two in zip(*(parse_plan(text)["transportation"] for text in (first, second)), strict=True):
        assert one["number"] != two["number"]
    assert numbers("[3, 1], [3] and [12, 2]", 5) == [3, 1, 2] and numbers("3", 5) == []


def test_options_follow_the_official_windows_and_radius(world):
    # Catches: an evening ride for a morning, or a hotel at the other end of the city before a near one.
    env = triptailor.load("test", world)[0]
    rides = env.data.rides(env.request.origin, env.request.destination)
    morning = ride_options(rides, env.request.weekdays[0], "morning")
    assert morning and all(240 <= ride.depart <= 720 for ride in morning)
    assert ride_options(rides, "", "evening") == [r for r in rides if r.depart >= 1080] or len(rides)
    hotels = hotel_options(env, env.data.places["sight"][normal(env.request.destination)][:3])
    assert 0 < len(hotels) <= 8 and {place.tags for place in hotels} == {env.request.category}
    assert hotel_options(env, []) and ride_options([], "", "") == []


def test_direct_prompts_hold_the_candidates(world):
    # Catches: a prompt without prices, or with the reference's own choice marked.
    env = triptailor.load("test", world)[0]
    system, user = direct_messages(env)
    assert "First call" not in system.content and user.content.endswith(env.request.query)
    info = env.information()
    for row in info["restaurants"]:
        assert json.dumps(row["name"], ensure_ascii=False) in user.content
    assert '"Second_Class_Price"' in user.content and '"reference_time"' in user.content
    with pytest.raises(ValueError, match="train/1: no given_info_data"):
        direct_messages(triptailor.load("train", world)[0])


def test_the_request_s_pool_holds_in_the_workflow(world):
    # Catches: places offered that strict scoring then refuses.
    for env in triptailor.load("test", world, pool="request")[:4]:
        answer, _ = run(env, draft)
        env.step(answer, [])
        assert env.verify().checks["within_sandbox"]


def test_an_endpoint_is_measured_by_the_workflow_and_directly(world, tmp_path):
    # Catches: a pipeline that no command reaches, questions that share a talk, a missing file that ends all.
    def reply(body):
        assert "tools" not in body and len(body["messages"]) == 2
        system, user = body["messages"]
        return draft([Message("system", system["content"]), Message("user", user["content"])])

    with LLMServer(reply) as server:
        flags = {"bench": "triptailor", "data": str(world), "agent": f"{server.url}#m?retries=0", "n": 3}
        results = script.main(script.Config(out=str(tmp_path / "w"), method="workflow", **flags))
        asked = len(server.bodies)
        direct = script.main(script.Config(out=str(tmp_path / "d"), method="direct", **flags))
        flags |= {"split": "train", "n": 1}
        nothing = script.main(script.Config(out=str(tmp_path / "n"), method="direct", **flags))
    assert results["strict"]["within_sandbox"]["value"] == results["strict"]["decode_rate"]["value"] == 1.0
    assert results["per_plan"]["turns"]["value"] * 3 == asked > 3 * 8
    assert results["method"] == "workflow" and results["official"]["within_sandbox"]["value"] > 0
    assert len(server.bodies) == asked + 3 and direct["counts"]["parse_failures"] == 3
    assert nothing["counts"]["env_errors"] == 1
    items = (tmp_path / "n" / "items.jsonl").read_text()
    assert "error: direct: ValueError: train/2: no given_info_data" in items
    with pytest.raises(ValueError, match="a pipeline, which this world lacks"):
        play(Setup(None, Budget(1, 1, 1, 1)), "workflow", [Counter()], seed_of=lambda *_: 0)
