"""ALFWorld: do a household task in a text world, one command at a time.

The environment over official games (a folder with json_2.1.1/SPLIT/.../game.tw-pddl) or made ones
(envs/alfworld_make.py), played by a simulator in Python that says what TextWorld says. One tool, `act`;
success is the game's own goal within the budget of actions. A fork shares the game and the state, which is
never changed in place.
Benchmarks: ALFWorld (arXiv:2010.03768), games of release 2.1.2; budgets of Caddie (arXiv:2610.09858).
"""

import json
from functools import lru_cache
from pathlib import Path

from envs import alfworld_sim as sim
from envs.alfworld_game import Game, read_game
from envs.base import Call, Env, Message, PlanView, Task, Tool, Verdict, clip, invalid_arguments
from envs.strata import stratified

FAMILIES = {  # family -> how the folders of its games begin
    "place": "pick_and_place_simple",
    "light": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
TRAINING = ("place", "heat", "light")  # families of Caddie's 1,557 training games
EVAL_ACTIONS = 50  # actions of an episode in evaluation; Caddie
TRAIN_ACTIONS = 12  # of prefix and continuation together in training; Caddie
MAX_COMMAND_CHARS = 120
SYSTEM = (
    "Do the task in this house: one command a turn. Commands: look; inventory; go to R; open R; close R; "
    "take O from R; move O to R; examine X; use O; heat O with R; cool O with R; clean O with R; slice O "
    "with O. R is a place such as shelf 1, O a thing such as mug 2."
)
TOOLS = [
    Tool(
        "act",
        "Do one command",
        {
            "type": "object",
            "properties": {"command": {"type": "string", "maxLength": MAX_COMMAND_CHARS}},
            "required": ["command"],
        },
    )
]


class AlfWorld(Env):
    """One game.

    max_actions      actions of the episode, those of a prefix included: a fork goes on counting
    end_on_invalid   a malformed call, an unknown tool or wrong arguments end the episode; a turn without a
                     call always does
    end_on_nothing   so does a command that the game refuses with "Nothing happens."
    show_commands    each observation ends with the admissible commands
    commands         done so far, refused ones too
    ended            why the episode is over: "" it is not, "won", "actions", "malformed" (a call that could
                     not be read, or none), "invalid" (tool or arguments), "nothing"
    stratum          the family, "heat": what sampling and tables are stratified by
    """

    def __init__(
        self,
        task: Task,
        game: Game,
        *,
        max_actions: int = EVAL_ACTIONS,
        end_on_invalid: bool = True,
        end_on_nothing: bool = False,
        show_commands: bool = False,
    ):
        super().__init__(task, TOOLS)
        self.game, self.max_actions = game, max_actions
        self.end_on_invalid, self.end_on_nothing = end_on_invalid, end_on_nothing
        self.show_commands = show_commands
        self.stratum = task.data["family"]
        self.state = game.start
        self.commands: tuple[str, ...] = ()
        self.ended = ""

    def reset(self) -> list[Message]:
        self.answer_text, self.done = "", False
        self.state, self.commands, self.ended = self.game.start, (), ""
        return [Message("system", SYSTEM), Message("user", self._shown(sim.opening(self.game)))]

    def admissible(self) -> list[str]:
        """The commands that do something, sorted, as TextWorld lists them."""
        return sorted(sim.commands(self.game, self.state))

    def step(self, text: str, calls: list[Call]) -> tuple[list[Message], bool]:
        """One action per call, in order. Calls after the end are refused and do nothing.

        A first turn without a call that is a JSON object {"actions": [command, ...]} is the record of an
        episode that was played elsewhere; it is played again within the budget.
        """
        if not calls:
            self.answer(text)
            if not self.done:
                self.done, self.ended = True, "malformed"
            return [], True
        messages = []
        for call in calls:
            refused = "" if self.done else self._refused(call)
            messages.append(Message("tool", self._result(call)))
            if refused and self.end_on_invalid:
                self.done, self.ended = True, refused
        return messages, self.done

    def _refused(self, call: Call) -> str:
        """Why a call is none: "malformed", "invalid", or "" if it is one."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if call.error:
            return "malformed"
        return "invalid" if tool is None or invalid_arguments(tool, call.arguments) else ""

    def call(self, name: str, arguments: dict) -> str:
        if self.done:
            raise ValueError(f"the episode is over ({self.ended})")
        return self._shown(self.act(arguments["command"]))

    def act(self, command: str) -> str:
        """The observation of a command; counts it, and ends the episode by goal or budget."""
        before = self.state
        self.state, text = sim.step(self.game, before, command)
        self.commands += (command.strip(),)
        if sim.won(self.game, self.state):
            self.done, self.ended = True, "won"
        elif text == sim.NOTHING and self.end_on_nothing:
            self.done, self.ended = True, "nothing"
        elif len(self.commands) >= self.max_actions:
            self.done, self.ended = True, "actions"
        return text

    def _shown(self, text: str) -> str:
        return f"{text}\nCommands: {', '.join(self.admissible())}" if self.show_commands else text

    def answer(self, text: str) -> None:
        self.answer_text = text
        if not self.commands and not self.done:
            for command in read_actions(text):
                if not self.done:
                    self.act(command)

    def verify(self) -> Verdict:
        """won: the goal held after an action within the budget. severity: 1.0, or 0.0."""
        won = self.ended == "won"
        reasons = (
            [] if won else [f"won: no, after {len(self.commands)} actions; ended: {self.ended or 'not yet'}"]
        )
        return Verdict(won, {"won": won}, {"won": float(not won)}, reasons)

    def official(self) -> dict[str, bool | None]:
        """The benchmark's own success, which is the same: the goal was reached."""
        won = self.ended == "won"
        return {"won": won, "pass": won}

    def view(self) -> PlanView:
        return commands_view(self.game, self.commands)

    def reference_view(self) -> PlanView:
        return commands_view(self.game, self.game.walkthrough)

    def gold(self) -> list[Call]:
        """The game's walkthrough as calls; it knows where things are."""
        return [Call("act", {"command": command}) for command in self.game.walkthrough]


def read_actions(text: str) -> list[str]:
    """Commands of a stored episode, {"actions": [...]} as JSON text; [] for any other text."""
    if not text.startswith("{"):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    actions = value.get("actions") if isinstance(value, dict) else None
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        return []
    return [action[:MAX_COMMAND_CHARS] for action in actions[:1000]]


def commands_view(game: Game, commands: tuple[str, ...]) -> PlanView:
    """The commands as numbered lines. Features: won, and brief (walkthrough / commands, 0 if not won)."""
    state, won = game.start, False
    for command in commands:
        state, _ = sim.step(game, state, command)
        won = won or sim.won(game, state)
    lines = [f"{i}. {clip(command, MAX_COMMAND_CHARS)}" for i, command in enumerate(commands, start=1)]
    brief = min(1.0, len(game.walkthrough) / max(1, len(commands))) if won else 0.0
    return PlanView("\n".join(lines) or "(nothing done)", {"won": float(won), "brief": brief})


def family_of(path: str) -> str:
    """Family of a game, read from its path. Raises ValueError for a path without one."""
    for family, start in FAMILIES.items():
        if any(part.startswith(f"{start}-") for part in Path(path).parts):
            return family
    raise ValueError(
        f"{path}: no folder of a task family; wanted one that begins with {' or '.join(FAMILIES.values())}"
    )


def listed(path: str | Path, split: str, families: tuple[str, ...] = tuple(FAMILIES)) -> list[str]:
    """Paths of a split's games in a list of paths, one a line, such as all_game_paths.txt."""
    lines = Path(path).read_text(encoding="utf-8").split()
    return [line for line in lines if split in line.split("/") and family_of(line) in families]


@lru_cache(maxsize=4096)
def _cached(path: Path, mtime_ns: int) -> Game:
    return read_game(path)


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    families: tuple[str, ...] | None = None,
    max_actions: int = EVAL_ACTIONS,
    end_on_invalid: bool = True,
    end_on_nothing: bool = False,
    show_commands: bool = False,
) -> list[AlfWorld]:
    """One environment per game of a split: "train", "valid_seen", "valid_unseen".

    data      a folder with json_2.1.1/SPLIT (or SPLIT itself)
    n         that many, stratified by family; None: all, sorted by path
    families  only these, e.g. TRAINING; None: all six
    others    see AlfWorld
    raises    ValueError naming the folder, or the game file and what was wanted
    """
    if max_actions < 1:
        raise ValueError(f"max_actions={max_actions}, wanted 1 or more")
    unknown = set(families or ()) - FAMILIES.keys()
    if unknown or families == ():
        raise ValueError(f"families={families}, wanted some of {', '.join(FAMILIES)}")
    folder, root = Path(data) / split, Path(data)
    for home in sorted(Path(data).glob("json_*")):
        if (home / split).is_dir():
            folder, root = home / split, home
    paths = sorted(folder.glob("*/*/game.tw-pddl"))
    paths = [path for path in paths if families is None or family_of(str(path.relative_to(root))) in families]
    if not paths:
        kinds = " of " + ", ".join(families) if families else ""
        raise ValueError(
            f"no game.tw-pddl{kinds} in {folder}; wanted ALFWorld's data, or a folder that was made"
        )
    names = [path.parent.relative_to(root).as_posix() for path in paths]
    order = range(len(paths))
    if n is not None:
        order = stratified([family_of(name) for name in names], n, seed=seed)
    envs = []
    for i in order:
        game = _cached(paths[i], paths[i].stat().st_mtime_ns)
        task = Task(names[i], {"family": family_of(names[i]), "task": game.task})
        env = AlfWorld(
            task,
            game,
            max_actions=max_actions,
            end_on_invalid=end_on_invalid,
            end_on_nothing=end_on_nothing,
            show_commands=show_commands,
        )
        envs.append(env)
    return envs
