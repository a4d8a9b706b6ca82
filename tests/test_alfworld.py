import json
import random
from collections import Counter
from pathlib import Path

import pytest

from envs import BENCHMARKS, alfworld_make
from envs import alfworld_sim as sim
from envs.alfworld_game import demangle, read_game
from envs.alfworld_text import DOMAIN
from envs.base import Call

alfworld = BENCHMARKS["alfworld"]

REAL = Path(__file__).parents[2] / "shared" / "data" / "alfworld"
real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"no ALFWorld data in {REAL}")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """48 made games, 8 of each family."""
    return alfworld_make.build(tmp_path_factory.mktemp("alfworld"), train=48, valid_unseen=12)


ROOM = """(define (problem kitchen)
(:domain alfred)
(:objects agent1 - agent
  loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_9 - location
  Shelf_bar_1 Shelf_bar_2 Cabinet_bar_1 Microwave_bar_1 Fridge_bar_1 Sink_bar_1_bar_SinkBasin - receptacle
  ShelfType CabinetType MicrowaveType FridgeType SinkBasinType - rtype
  Apple_bar_1 Knife_bar_1 Plate_bar_1 Pea_bar_1 DeskLamp_bar_1 - object
  AppleType KnifeType ButterKnifeType PlateType PeaType DeskLampType - otype)
(:init
  (atLocation agent1 loc_bar_9)
  (receptacleType Shelf_bar_1 ShelfType) (receptacleAtLocation Shelf_bar_1 loc_bar_1)
  (receptacleType Shelf_bar_2 ShelfType) (receptacleAtLocation Shelf_bar_2 loc_bar_2)
  (receptacleType Cabinet_bar_1 CabinetType) (receptacleAtLocation Cabinet_bar_1 loc_bar_1)
  (openable Cabinet_bar_1)
  (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_2)
  (openable Microwave_bar_1)
  (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_3)
  (openable Fridge_bar_1)
  (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
  (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_3)
  (objectType Apple_bar_1 AppleType) (inReceptacle Apple_bar_1 Shelf_bar_1)
  (objectAtLocation Apple_bar_1 loc_bar_1)
  (pickupable Apple_bar_1) (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1)
  (sliceable Apple_bar_1)
  (objectType Knife_bar_1 KnifeType) (inReceptacle Knife_bar_1 Cabinet_bar_1)
  (objectAtLocation Knife_bar_1 loc_bar_1) (pickupable Knife_bar_1)
  (objectType Plate_bar_1 PlateType) (inReceptacle Plate_bar_1 Shelf_bar_2)
  (objectAtLocation Plate_bar_1 loc_bar_2) (pickupable Plate_bar_1) (isReceptacleObject Plate_bar_1)
  (objectType Pea_bar_1 PeaType) (inReceptacleObject Pea_bar_1 Plate_bar_1)
  (objectType DeskLamp_bar_1 DeskLampType) (inReceptacle DeskLamp_bar_1 Cabinet_bar_1)
  (objectAtLocation DeskLamp_bar_1 loc_bar_1) (toggleable DeskLamp_bar_1)
  (canContain ShelfType AppleType) (canContain CabinetType AppleType) (canContain ShelfType KnifeType)
  (canContain FridgeType AppleType)
)
(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (heatable ?o) (objectType ?o AppleType)
  (receptacleType ?r FridgeType) (isHot ?o) (inReceptacle ?o ?r))))))
)
"""


IN_CABINET = "The cabinet 1 is open. In it, you see a desklamp 1, and a knife 1."


def game_file(folder, **changes):
    """A game of ours in a folder of the family heat; `changes` replace parts of the file."""
    path = folder / "json_2.1.1" / "train" / "pick_heat_then_place_in_recep-Apple-None-Fridge-1" / "trial_T1"
    path.mkdir(parents=True, exist_ok=True)
    data = {
        "pddl_domain": DOMAIN,
        "grammar": alfworld_make.grammar("put a hot apple in fridge."),
        "pddl_problem": ROOM,
        "solvable": True,
        "walkthrough": [],
    }
    (path / "game.tw-pddl").write_text(json.dumps(data | changes), encoding="utf-8")
    return path / "game.tw-pddl"


def act(command):
    return Call("act", {"command": command})


def one(folder, **options):
    game_file(folder)
    (env,) = alfworld.load("train", folder, **options)
    env.reset()
    return env


def test_every_command_and_its_text(tmp_path):
    # Catches: a wrong article or list, an effect that is missing, a quirk of the original that was mended.
    env = one(tmp_path, max_actions=99)
    assert env.reset()[1].content == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, "
        "you see a cabinet 1, a fridge 1, a microwave 1, a shelf 2, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a hot apple in fridge."
    )
    script = f"""
    look | You are in the middle of a room. Looking quickly around you, you see nothing.
    inventory | You are not carrying anything.
    take apple 1 from shelf 2 | Nothing happens.
    go to shelf 2 | You arrive at shelf 2. On the shelf 2, you see a apple 1.
    go to cabinet 1 | Nothing happens.
    look | You are facing the cabinet 1, and shelf 2. Next to it, you see nothing.
    examine cabinet 1 | The cabinet 1 is closed.
    use desklamp 1 | You turn on the desklamp 1.
    take knife 1 from cabinet 1 | Nothing happens.
    examine apple 1 | Nothing happens.
    open cabinet 1 | You open the cabinet 1. {IN_CABINET}
    take desklamp 1 from cabinet 1 | Nothing happens.
    take knife 1 from cabinet 1 | You pick up the knife 1 from the cabinet 1.
    take apple 1 from shelf 2 | Nothing happens.
    examine knife 1 | There's nothing special about knife 1.
    look | You are facing the cabinet 1, and shelf 2. Next to it, you see nothing.
    go to shelf 1 | You arrive at shelf 1. On the shelf 1, you see a plate 1.
    slice apple 1 with knife 1 | Nothing happens.
    go to cabinet 1 | You arrive at cabinet 1. The cabinet 1 is open. In it, you see a desklamp 1.
    slice apple 1 with knife 1 | You sliced the apple 1 with the knife 1.
    move knife 1 to cabinet 1 | Nothing happens.
    move knife 1 to shelf 2 | You move the knife 1 to the shelf 2.
    look | You are facing the cabinet 1, and shelf 2. Next to it, you see a knife 1.
    examine shelf 2 | On the shelf 2, you see a apple 1, and a knife 1.
    take apple 1 from shelf 2 | You pick up the apple 1 from the shelf 2.
    examine apple 1 | This is a sliced apple 1.
    move apple 1 to shelf 2 | You move the apple 1 to the shelf 2.
    look | You are facing the cabinet 1, and shelf 2. Next to it, you see a knife 1.
    take apple 1 from shelf 2 | You pick up the apple 1 from the shelf 2.
    move apple 1 to cabinet 1 | You move the apple 1 to the cabinet 1.
    look | You are facing the cabinet 1, and shelf 2. Next to it, you see a apple 1, and a knife 1.
    take apple 1 from cabinet 1 | You pick up the apple 1 from the cabinet 1.
    inventory | You are carrying: a apple 1.
    close cabinet 1 | You close the cabinet 1.
    heat apple 1 with microwave 1 | Nothing happens.
    go to sinkbasin 1 | You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.
    clean apple 1 with sinkbasin 1 | You clean the apple 1 using the sinkbasin 1.
    examine apple 1 | This is a clean sliced apple 1.
    cool apple 1 with fridge 1 | You cool the apple 1 using the fridge 1.
    examine apple 1 | This is a cool and clean sliced apple 1.
    move apple 1 to fridge 1 | Nothing happens.
    go to microwave 1 | You arrive at microwave 1. The microwave 1 is closed.
    heat apple 1 with microwave 1 | You heat the apple 1 using the microwave 1.
    examine apple 1 | This is a hot and clean sliced apple 1.
    go to fridge 1 | You arrive at fridge 1. The fridge 1 is closed.
    cool apple 1 with fridge 1 | You cool the apple 1 using the fridge 1.
    examine apple 1 | This is a cool and clean sliced apple 1.
    go to microwave 1 | You arrive at microwave 1. The microwave 1 is closed.
    heat apple 1 with microwave 1 | You heat the apple 1 using the microwave 1.
    examine apple 1 | This is a hot and clean sliced apple 1.
    move apple 1 to microwave 1 | Nothing happens.
    go to fridge 1 | You arrive at fridge 1. The fridge 1 is closed.
    open fridge 1 | You open the fridge 1. The fridge 1 is open. In it, you see nothing.
    go  to shelf 1 | Nothing happens.
    GO TO SHELF 1 | Nothing happens.
    move apple 1 to fridge 1 | You move the apple 1 to the fridge 1.
    """
    for line in script.strip().split("\n"):
        command, _, text = line.strip().partition(" | ")
        assert command in env.admissible() or text == "Nothing happens.", command
        messages, done = env.step("", [act(command)])
        assert messages[0].content == text, command
    assert (
        env.state.cool == frozenset()
        and env.state.hot == env.state.clean == env.state.sliced != env.state.cool
    )
    assert (
        done and env.ended == "won" and env.verify().passed and env.official() == {"won": True, "pass": True}
    )
    assert env.step("", [act("look")])[0][0].content.startswith("Error")


def test_what_else_an_object_looks_like(tmp_path):
    # Catches: hot and cold at once, the word for a cold whole object, a plate that looks empty.
    env = one(tmp_path, max_actions=99)
    for commands, text in (
        ("go to shelf 1,take plate 1 from shelf 1,examine plate 1",
         "This is a normal plate 1. In it, you see a pea 1."),
        ("go to shelf 2,take apple 1 from shelf 2,go to fridge 1,cool apple 1 with fridge 1,examine apple 1",
         "This is a cold apple 1."),
        ("go to shelf 2,take apple 1 from shelf 2,go to microwave 1,heat apple 1 with microwave 1,"
         "examine apple 1", "This is a hot apple 1."),
        ("go to shelf 2,take apple 1 from shelf 2,go to sinkbasin 1,clean apple 1 with sinkbasin 1,"
         "examine apple 1", "This is a clean apple 1."),
    ):  # fmt: skip
        env.reset()
        texts = [env.step("", [act(command)])[0][0].content for command in commands.split(",")]
        assert texts[-1] == text


def test_names_count_down_in_sorted_order():
    # Catches: numbers that count up, basins that lose their name, ids that are sorted with their case.
    words = ["shelf_bar_2", "shelf_bar_10", "sink_bar_1_bar_sinkbasin", "shelftype", "sink_bar_1"]
    ids, names = demangle([*words, *words])
    assert ids == ["shelf_bar_10", "shelf_bar_2", "sink_bar_1", "sink_bar_1_bar_sinkbasin"]
    assert names == ("shelf 2", "shelf 1", "sink 1", "sinkbasin 1")


def test_walkthroughs_of_made_games_win(made):
    # Catches: made games that cannot be won, are won at the start, or lack a family.
    envs = alfworld.load("train", made)
    assert Counter(env.stratum for env in envs) == dict.fromkeys(alfworld.FAMILIES, 8)
    for env in envs:
        env.reset()
        assert not env.verify().passed
        for i, call in enumerate(env.gold(), start=1):
            messages, done = env.step("", [call])
            assert "Nothing happens" not in messages[0].content and done == (i == len(env.gold()))
        assert env.verify().passed and env.view() == env.reference_view()
        assert env.view().features == {"won": 1.0, "brief": 1.0}
    assert {env.task.id.split("/")[0] for env in envs} == {"train"} and len({e.task.id for e in envs}) == 48


def test_made_games_depend_on_seed_and_number_only(tmp_path):
    # Catches: games that change when more are made, or that one seed shares with another.
    few = alfworld_make.build(tmp_path / "a", train=2, valid_unseen=0)
    more = alfworld_make.build(tmp_path / "b", train=4, valid_unseen=0, places=5, things=4)
    other = alfworld_make.build(tmp_path / "c", seed=1, train=2, valid_unseen=0)
    texts = [
        [path.read_text() for path in sorted(folder.rglob("game.tw-pddl"), key=lambda path: path.parent.name)]
        for folder in (few, more, other)
    ]
    assert texts[0] == texts[1][:2] and not set(texts[0]) & set(texts[2])
    for broken, words in (
        ({"families": ("cook",)}, "cook"),
        ({"places": 1}, "places=1"),
        ({"things": 0}, "things=0"),
    ):
        with pytest.raises(ValueError, match=words):
            alfworld_make.build(tmp_path, **broken)


def walk(env, rng, steps):
    """Random admissible commands; returns all texts and whether the goal held after each."""
    out = []
    for _ in range(steps):
        if env.done:
            break
        by_verb = {}
        for command in env.admissible():
            by_verb.setdefault(command.split()[0], []).append(command)
        command = rng.choice(by_verb[rng.choice(sorted(by_verb))])
        messages, done = env.step("", [act(command)])
        out.append((command, messages[0].content, done, tuple(env.admissible())))
    return out


def check_forks(envs, *, steps):
    for i, env in enumerate(envs):
        env.reset()
        walk(env, random.Random(i), steps // 2)
        if env.done:
            env.reset()
        before = (env.state, env.commands, env.done, env.ended)
        twins = [env.fork() for _ in range(3)]
        futures = [
            walk(twin, random.Random(seed), steps) for twin, seed in zip(twins, (7, 7, 8), strict=True)
        ]
        assert futures[0] == futures[1] and futures[0] != futures[2]
        assert (env.state, env.commands, env.done, env.ended) == before
        assert walk(env.fork(), random.Random(7), steps) == futures[0]


def test_every_fork_has_the_same_future(made):
    # Catches: state shared between twins, an order that depends on hashing.
    check_forks(alfworld.load("train", made, n=12), steps=20)


def test_budgets_and_what_ends_an_episode(tmp_path):
    # Catches: a prefix whose actions are not counted, wrong calls that go on, an answer that wins.
    env = one(tmp_path, max_actions=alfworld.TRAIN_ACTIONS)
    for _ in range(8):
        assert not env.step("", [act("look")])[1]
    twin = env.fork()
    assert [twin.step("", [act("dance")])[1] for _ in range(4)] == [False, False, False, True]
    assert (twin.ended, len(twin.commands), len(env.commands)) == ("actions", 12, 8)
    assert "ended: actions" in twin.verify().reasons[0] and not twin.verify().passed
    messages, done = env.step("", [act("look")] * 6)
    assert (
        done
        and env.ended == "actions"
        and [m.content[:5] == "Error" for m in messages] == [False] * 4 + [True] * 2
    )

    for calls, ended in (
        ([Call("act", {}, "no JSON")], "malformed"),
        ([Call("do", {"command": "look"})], "invalid"),
        ([Call("act", {})], "invalid"),
        ([Call("act", {"command": "look " * 50})], "invalid"),
        ([], "malformed"),
    ):
        env.reset()
        messages, done = env.step("I look around", calls)
        assert done and env.ended == ended and env.commands == () and not env.verify().passed
        loose = one(tmp_path, end_on_invalid=False)
        assert loose.step("x", calls)[1] == (not calls)
    strict = one(tmp_path, end_on_nothing=True)
    assert strict.step("", [act("look"), act("dance")])[1] and strict.ended == "nothing"
    env.reset()
    assert (env.done, env.ended, env.commands) == (False, "", ())


def test_stored_episodes_are_scored(made):
    # Catches: a record that is scored without playing it, beyond the budget, or in the middle of an episode.
    env = alfworld.load("train", made, n=1)[0]
    plan = list(env.game.walkthrough)

    def scored(text, *, after=0):
        env.reset()
        for command in plan[:after]:
            env.step("", [act(command)])
        env.step(text, [])
        return env.verify().passed

    assert scored(json.dumps({"actions": plan}))
    assert env.ended == "won" and scored(json.dumps({"actions": [*plan, "look"]}))
    assert not scored(json.dumps({"actions": plan[:-1]})) and env.ended == "malformed"
    assert not scored(json.dumps({"actions": plan[1:]}), after=1)
    assert not scored(json.dumps({"actions": ["look"] * 50 + plan})) and env.ended == "actions"
    for text in ("", "x", "{", "{" * 5000, '{"actions": 3}', '{"actions": [1]}', "[]", json.dumps(plan)):
        assert not scored(text) and env.ended == "malformed"


def test_commands_are_shown_on_demand(made):
    # Catches: a list of commands that is not the one of the state shown with it.
    env = alfworld.load("train", made, n=1, show_commands=True)[0]
    first = env.reset()[1].content
    assert first.endswith("Commands: " + ", ".join(env.admissible()))
    text = env.step("", [env.gold()[0]])[0][0].content
    assert text.endswith(", ".join(env.admissible())) and "examine" in text and "examine" not in first
    assert "Commands:" not in alfworld.load("train", made, n=1)[0].reset()[1].content


def test_which_games_are_loaded(made):
    # Catches: families mixed up, a draw that the seed does not decide, a folder without games that is empty.
    training = alfworld.load("train", made, families=alfworld.TRAINING)
    assert {env.stratum for env in training} == {"place", "heat", "light"} and len(training) == 24
    drawn = [[env.task.id for env in alfworld.load("train", made, n=12, seed=seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    kinds = Counter(alfworld.family_of(id) for id in drawn[0])
    assert kinds == dict.fromkeys(alfworld.FAMILIES, 2)
    for broken, words in (({"families": ("cook",)}, "cook"), ({"families": ()}, "families"),
                          ({"max_actions": 0}, "max_actions=0"), ({"n": 99}, "n=99")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            alfworld.load("train", made, **broken)
    with pytest.raises(ValueError, match=r"no game\.tw-pddl in .*valid_seen"):
        alfworld.load("valid_seen", made)


@pytest.mark.parametrize(("changes", "words"), [
    ({"pddl_problem": ROOM[:-200]}, "as many"),
    ({"pddl_problem": ROOM + ")"}, "closes nothing"),
    ({"pddl_problem": ROOM.replace("(:init", "(:start")}, r"\(:init ...\) is missing"),
    ({"pddl_problem": ROOM.replace("(:goal", "(:metric")}, r"\(:goal ...\) is missing"),
    ({"pddl_problem": ROOM.replace("(sliceable Apple_bar_1)", "(juicy Apple_bar_1)")}, "juicy"),
    ({"pddl_problem": ROOM.replace("(sliceable Apple_bar_1)", "(sliceable)")}, "sliceable"),
    ({"pddl_problem": ROOM.replace("(atLocation agent1 loc_bar_9)", "")}, "atLocation"),
    ({"pddl_problem": ROOM.replace("(objectType Apple_bar_1 AppleType)", "")}, "apple_bar_1"),
    ({"pddl_problem": ROOM.replace("(isHot ?o)", "(or (isHot ?o))")}, "goal"),
    ({"pddl_problem": ROOM.replace("(isHot ?o)", "(isHot ?x)")}, "'\\?x'"),
    ({"pddl_problem": 7}, "pddl_problem"),
    ({"walkthrough": [1]}, "walkthrough"),
    ({"walkthrough": None}, "walkthrough"),
    ({"pddl_domain": DOMAIN.replace("(isHot ?o) (not (isCool ?o))", "(isHot ?o)")}, "HeatObject"),
    ({"pddl_domain": DOMAIN.replace(":action SliceObject", ":action Cut")}, "SliceObject is missing"),
    ({"grammar": alfworld_make.grammar("x.").replace("move {o} to {r}", "put {o} in/on {r}")}, "PutObject"),
    ({"grammar": alfworld_make.grammar("x.").replace("You open", "You pull")}, "OpenObject.feedback"),
    ({"grammar": alfworld_make.grammar("x.").replace("Your task is to", "Please")}, "task"),
    ({"grammar": ""}, "command of look"),
])  # fmt: skip
def test_a_broken_game_is_named(tmp_path, changes, words):
    # Catches: a game that is half read, or whose own rules are silently replaced by ours.
    path = game_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        alfworld.load("train", tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_game(tmp_path):
    # Catches: an error of the JSON reader without the file's name.
    path = game_file(tmp_path)
    for text in ("", "[]", '{"pddl_domain": ', "[" * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="wanted a game") as caught:
            alfworld.load("train", tmp_path)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="is missing"):
        read_game(tmp_path / "no")
    with pytest.raises(ValueError, match="task family"):
        alfworld.family_of("json_2.1.1/train/cook_dinner-1")


@real_data
def test_official_walkthroughs_win():
    # Catches: rules, names or goals that differ from the official games'.
    envs = [env for split in ("train", "valid_seen", "valid_unseen") for env in alfworld.load(split, REAL)]
    assert len(envs) == 30 and Counter(env.stratum for env in envs) == dict.fromkeys(alfworld.FAMILIES, 5)
    for env in envs:
        env.reset()
        for i, call in enumerate(env.gold(), start=1):
            messages, done = env.step("", [call])
            assert "Nothing happens" not in messages[0].content, (env.task.id, call)
            assert done == (i == len(env.gold())), (env.task.id, i)
        assert env.verify().passed, env.task.id


@real_data
def test_the_newest_rules_are_read_too(tmp_path):
    # Catches: a check of rules that refuses a later release, or forgets that it cleans in basins alone.
    path = next(REAL.rglob("valid_seen/pick_clean*/*/game.tw-pddl"))
    newest = json.loads(path.read_text(encoding="utf-8"))
    newest["pddl_domain"] = (REAL / "alfred.pddl").read_text(encoding="utf-8")
    newest["grammar"] = (REAL / "alfred.twl2").read_text(encoding="utf-8").replace("UNKNOWN GOAL", "clean")
    (tmp_path / "game.tw-pddl").write_text(json.dumps(newest), encoding="utf-8")
    game = read_game(tmp_path / "game.tw-pddl")
    assert game.task == "clean." and game.uses["CleanObject"] == {"sinkbasintype"}
    assert read_game(path).uses["CleanObject"] == {"sinktype", "sinkbasintype"}
    state = game.start
    for command in game.walkthrough:
        state, _ = sim.step(game, state, command)
    assert sim.won(game, state)


@real_data
def test_forks_of_official_games_have_the_same_future():
    # Catches: state shared between twins in a room with many things in many places.
    check_forks(alfworld.load("valid_unseen", REAL), steps=15)


@real_data
def test_the_training_games_are_1557():
    # Catches: families other than the paper's, or games of another split.
    paths = REAL / "all_game_paths.txt"
    assert len(alfworld.listed(paths, "train", alfworld.TRAINING)) == 1557
    counts = Counter(alfworld.family_of(path) for path in alfworld.listed(paths, "valid_unseen"))
    assert counts == {"place": 24, "light": 18, "clean": 31, "heat": 23, "cool": 21, "two": 17}
    assert len(alfworld.listed(paths, "train")) == 3553


def compare_with_textworld(path, *, steps, seed):
    """Walk both through a game, every state compared; returns the steps taken."""
    textworld = pytest.importorskip("textworld", reason="the textworld package is not installed")
    wrappers = pytest.importorskip(
        "alfworld.agents.environment.alfred_tw_env", reason="the alfworld package is not installed"
    )
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    original = textworld.start(str(path), infos, wrappers=[wrappers.AlfredDemangler(), wrappers.AlfredInfos])
    theirs = original.reset()
    game, rng = read_game(path), random.Random(f"{seed}/{path.parent}")
    state, plan = game.start, list(game.walkthrough)
    assert sim.opening(game) == theirs.feedback
    for _ in range(steps):
        ours = sorted(sim.commands(game, state))
        assert ours == theirs.admissible_commands, path
        draw, by_verb = rng.random(), {}
        for command in ours:
            by_verb.setdefault(command.split()[0], []).append(command)
        command = rng.choice(by_verb[rng.choice(sorted(by_verb))])
        if draw < 0.05:
            command = rng.choice(("go to moon 1", "LOOK", "examine  shelf 1", "", " look "))
        elif draw < 0.35 and plan:
            command = plan.pop(0)
        state, text = sim.step(game, state, command)
        theirs, _, done = original.step(command)
        assert (text, sim.won(game, state), done) == (theirs.feedback, theirs.won, theirs.won), (
            path,
            command,
        )
    return steps


def test_made_games_run_alike_in_textworld(tmp_path):
    # Catches: made games that only this simulator can read, or that play differently in the original.
    game_file(tmp_path / "ours")
    alfworld_make.build(tmp_path / "made", train=6, valid_unseen=0)
    for path in sorted(tmp_path.rglob("game.tw-pddl")):
        compare_with_textworld(path, steps=80 if "ours" in path.parts else 20, seed=0)


@pytest.mark.slow
@real_data
def test_textworld_says_the_same():
    # Catches: any difference in text, admissible commands or goal between the simulator and the original.
    for path in sorted(REAL.rglob("game.tw-pddl")):
        compare_with_textworld(path, steps=40, seed=0)
