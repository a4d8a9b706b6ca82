"""The rules and the wording of ALFWorld's games (release 2.1.2, "move ... to ..."), written out once.

DOMAIN is the PDDL domain and `grammar` the text grammar that envs/alfworld_sim.py plays by: made games
carry them, and envs/alfworld_game.py refuses a game whose own say something else. A made game therefore
runs in TextWorld too.
Source: the facts of ALFWorld's alfred.pddl and alfred.twl2 (github.com/alfworld/alfworld ca98194); the
"examine" of an object that is not held is left out, since its branch can never apply there.
"""

import json

DOMAIN = """(define (domain alfred)
 (:requirements :adl :typing)
 (:types agent location receptacle object rtype otype)
 (:predicates
  (atLocation ?a - agent ?l - location)
  (receptacleAtLocation ?r - receptacle ?l - location)
  (objectAtLocation ?o - object ?l - location)
  (inReceptacle ?o - object ?r - receptacle)
  (inReceptacleObject ?inner - object ?outer - object)
  (isReceptacleObject ?o - object)
  (receptacleType ?r - receptacle ?rt - rtype)
  (objectType ?o - object ?ot - otype)
  (canContain ?rt - rtype ?ot - otype)
  (openable ?r - receptacle) (opened ?r - receptacle)
  (holds ?a - agent ?o - object) (holdsAny ?a - agent)
  (pickupable ?o - object) (toggleable ?o - object) (isToggled ?o - object) (isOn ?o - object)
  (cleanable ?o - object) (isClean ?o - object)
  (heatable ?o - object) (isHot ?o - object)
  (coolable ?o - object) (isCool ?o - object)
  (sliceable ?o - object) (isSliced ?o - object)
  (checked ?x))
 (:action look
  :parameters (?a - agent ?l - location)
  :precondition (and (atLocation ?a ?l))
  :effect (and (checked ?l)))
 (:action inventory
  :parameters (?a - agent)
  :precondition ()
  :effect (and (checked ?a)))
 (:action help
  :parameters (?a - agent)
  :precondition ()
  :effect (and (checked ?a)))
 (:action examineReceptacle
  :parameters (?a - agent ?r - receptacle)
  :precondition (and (exists (?l - location) (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l))))
  :effect (and (checked ?r)))
 (:action examineObject
  :parameters (?a - agent ?o - object)
  :precondition (holds ?a ?o)
  :effect (and (checked ?o)))
 (:action GotoLocation
  :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
  :precondition (and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
  :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd)))
 (:action OpenObject
  :parameters (?a - agent ?l - location ?r - receptacle)
  :precondition (and (openable ?r) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (not (opened ?r)))
  :effect (and (opened ?r)))
 (:action CloseObject
  :parameters (?a - agent ?l - location ?r - receptacle)
  :precondition (and (openable ?r) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (opened ?r))
  :effect (and (not (opened ?r))))
 (:action PickupObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and (pickupable ?o) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r)
   (not (holdsAny ?a)) (or (not (openable ?r)) (opened ?r)))
  :effect (and (holds ?a ?o) (holdsAny ?a) (not (inReceptacle ?o ?r)) (not (objectAtLocation ?o ?l))))
 (:action PutObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle ?ot - otype ?rt - rtype)
  :precondition (and (holds ?a ?o) (atLocation ?a ?l) (receptacleAtLocation ?r ?l)
   (or (not (openable ?r)) (opened ?r)) (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot))
  :effect (and (inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a))))
 (:action CleanObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and (cleanable ?o) (or (receptacleType ?r SinkBasinType)) (atLocation ?a ?l)
   (receptacleAtLocation ?r ?l) (holds ?a ?o))
  :effect (and (isClean ?o)))
 (:action HeatObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and (heatable ?o) (or (receptacleType ?r MicrowaveType)) (atLocation ?a ?l)
   (receptacleAtLocation ?r ?l) (holds ?a ?o))
  :effect (and (isHot ?o) (not (isCool ?o))))
 (:action CoolObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and (coolable ?o) (or (receptacleType ?r FridgeType)) (atLocation ?a ?l)
   (receptacleAtLocation ?r ?l) (holds ?a ?o))
  :effect (and (isCool ?o) (not (isHot ?o))))
 (:action ToggleObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and (toggleable ?o) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r))
  :effect (and (when (isOn ?o) (not (isOn ?o))) (when (not (isOn ?o)) (isOn ?o)) (isToggled ?o)))
 (:action SliceObject
  :parameters (?a - agent ?l - location ?co - object ?ko - object)
  :precondition (and (sliceable ?co) (or (objectType ?ko KnifeType) (objectType ?ko ButterKnifeType))
   (atLocation ?a ?l) (objectAtLocation ?co ?l) (holds ?a ?ko))
  :effect (and (isSliced ?co)))
)
"""
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
TEMPLATES = {  # action -> its command
    "look": "look",
    "inventory": "inventory",
    "help": "help",
    "examineReceptacle": "examine {r}",
    "examineObject": "examine {o}",
    "GotoLocation": "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
    "OpenObject": "open {r}",
    "CloseObject": "close {r}",
    "PickupObject": "take {o} from {r}",
    "PutObject": "move {o} to {r}",
    "CleanObject": "clean {o} with {r}",
    "HeatObject": "heat {o} with {r}",
    "CoolObject": "cool {o} with {r}",
    "ToggleObject": "use {o}",
    "SliceObject": "slice {co} with {ko}",
}
_HERE = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
_FLOOR = (
    "atlocation(a:agent, l:location) & objectatlocation(o:object, l:location) & "
    "receptacleatlocation(r:receptacle, l:location) & not_inreceptacle(o:object, r:receptacle)"
)
_INSIDE = "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_EXAMINED = (  # facts of an object, what it is then called; the first that holds
    ("isclean ishot issliced", "hot and clean sliced"),
    ("isclean iscool issliced", "cool and clean sliced"),
    ("isclean issliced", "clean sliced"),
    ("ishot issliced", "hot sliced"),
    ("iscool issliced", "cool sliced"),
    ("isclean ishot", "hot and clean"),
    ("isclean iscool", "cool and clean"),
    ("ishot", "hot"),
    ("isclean", "clean"),
    ("iscool", "cold"),
)
_OBJECT = "[{o2.indefinite + ' ' + o2.name | inreceptacleobject(o2:object, o:object)}]"
RULES: dict[str, list[tuple[str, str]]] = {  # rule -> (condition, text), the first whose condition holds
    "intro": [("", "-= Welcome to TextWorld, ALFRED! =-\n\n#look.feedback#\n\n#task#")],
    "GotoLocation.feedback": [("", "You arrive at {r.name}. #examineReceptacle.feedback#")],
    "OpenObject.feedback": [("", "You open the {r.name}. #examineReceptacle.feedback#")],
    "CloseObject.feedback": [("", "You close the {r.name}.")],
    "PickupObject.feedback": [("", "You pick up the {o.name} from the {r.name}.")],
    "PutObject.feedback": [("", "You move the {o.name} to the {r.name}.")],
    "inventory.feedback": [
        (
            "holdsany(a:agent)",
            "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}].",
        ),
        ("", "You are not carrying anything."),
    ],
    "examineReceptacle.feedback": [
        (
            "openable(r:receptacle) & opened(r:receptacle)",
            f"The {{r.name}} is open. In it, you see {_INSIDE}.",
        ),
        ("openable(r:receptacle)", "The {r.name} is closed."),
        ("", f"On the {{r.name}}, you see {_INSIDE}."),
    ],
    "examineObject.feedback": [
        ("isreceptacleobject(o:object)", f"This is a normal {{o.name}}. In it, you see {_OBJECT}."),
        *(
            (" & ".join(f"{fact}(o:object)" for fact in facts.split()), f"This is a {words} {{o.name}}.")
            for facts, words in _EXAMINED
        ),
        ("toggleable(o:object) & istoggled(o:object)", "This {o.name} is on."),
        ("toggleable(o:object) & not_istoggled(o:object)", "This {o.name} is off."),
        ("sliceable(o:object) & issliced(o:object)", "This is a sliced {o.name}."),
        ("", "There's nothing special about {o.name}."),
    ],
    "toggleObject.feedback": [
        ("toggleable(o:object) & istoggled(o:object)", "You turn on the {o.name}."),
        ("toggleable(o:object)", "You turn off the {o.name}."),
        ("", "You don't see any switch on the {o.name}."),
    ],
    "heatObject.feedback": [("", "You heat the {o.name} using the {r.name}.")],
    "cleanObject.feedback": [("", "You clean the {o.name} using the {r.name}.")],
    "coolObject.feedback": [("", "You cool the {o.name} using the {r.name}.")],
    "sliceObject.feedback": [("", "You sliced the {co.name} with the {ko.name}.")],
    "look.feedback": [
        (_HERE, "#look-variations#. Next to it, you see #list_objects_on_the_floor#."),
        ("", "You are in the middle of a room. Looking quickly around you, you see #list_appliances#."),
    ],
    "look-variations": [("", f"You are facing the [{{r.name | {_HERE}}}]")],
    "list_objects_on_the_floor": [(_FLOOR, f"[{{#overview(o)# | {_FLOOR}}}]"), ("", "nothing")],
    "list_appliances": [
        (
            "receptacleatlocation(r:receptacle, l:location)",
            "[{#overview(r)# | receptacleatlocation(r:receptacle, l:location)}]",
        ),
        ("", "nothing"),
    ],
    "overview(o)": [("", "{o.indefinite} {o.name}")],
    "overview(r)": [("", "{r.indefinite} {r.name or r.id}")],
    "list_empty": [("", "nothing")],
    "list_separator": [("", ", ")],
    "list_last_separator": [("", ", and ")],
}
FEEDBACK = {  # actions whose rule is not named NAME.feedback
    name: f"{name[0].lower()}{name[1:]}.feedback"
    for name in ("HeatObject", "CleanObject", "CoolObject", "SliceObject", "ToggleObject")
}


def grammar(task: str) -> str:
    """The text grammar of a game whose goal sentence is `task`, in TextWorld's notation."""
    rules = RULES | {"task": [("", f"Your task is to: {task}")]}
    rows = {
        name: [
            {"condition": condition, "rhs": text} if condition else {"rhs": text} for condition, text in alts
        ]
        for name, alts in rules.items()
    }
    parts = ['grammar :: """\n' + json.dumps(rows, indent=4) + '\n""";\n']
    for name, template in TEMPLATES.items():
        feedback = HELP if name == "help" else f"#{FEEDBACK.get(name, f'{name}.feedback')}#"
        parts.append(f'action {name} {{\n    template :: "{template}";\n    feedback :: "{feedback}";\n}}\n')
    return "\n".join(parts)
