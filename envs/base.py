"""What every benchmark shares: messages, tools, tasks, verdicts, and the part of an environment's step
that does not know its world. Imported for its types by nanoplan/; knows no tensors and no tokens."""

import copy
from dataclasses import dataclass, field

import jsonschema

MAX_ERROR_CHARS = 240  # characters of an error text that answers a wrong call; ours
MAX_RESULT_CHARS = 6000  # characters of one tool result; ours

NO_PLAN_TEXT = "No plan."  # what a view says of an answer that holds none


@dataclass(slots=True)
class Call:
    name: str  # tool the model named
    arguments: dict  # parsed JSON arguments
    error: str = ""  # why the model's call was malformed; "" = well formed


@dataclass(slots=True)
class Message:
    role: str  # system | user | assistant | tool
    content: str
    calls: list[Call] = field(default_factory=list)  # only of an assistant message


@dataclass(slots=True)
class Tool:
    name: str
    description: str
    parameters: dict  # JSON schema of the arguments object

    def schema(self) -> dict:
        """The OpenAI form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(slots=True)
class Task:
    id: str  # "split/number", e.g. "test/1"
    data: dict  # the benchmark's own record


@dataclass(slots=True)
class Verdict:
    passed: bool  # all checks hold
    checks: dict[str, bool]  # constraint -> holds
    severity: dict[str, float]  # constraint -> 0.0 where it holds, else > 0; the unit is the benchmark's
    reasons: list[str]  # one line per broken rule, for people


@dataclass(slots=True)
class PlanView:
    text: str  # the plan through the benchmark's one renderer; all that a judge may read of it
    features: dict[str, float]  # computed from the database, each in [0, 1], higher is better
    request: str = ""  # what was asked for, in the words the planner got; a judge may read it, too


class Env:
    """One request: tools to call, then a final answer. Subclasses give reset, call, verify, view,
    reference_view, and fork where a shallow copy would share state that changes."""

    task: Task
    tools: list[Tool]

    def __init__(self, task: Task, tools: list[Tool]):
        self.task, self.tools = task, tools
        self.answer_text = ""  # the final answer so far
        self.done = False

    def reset(self) -> list[Message]:
        """Forget everything that happened; returns the system and user messages that open the talk."""
        raise NotImplementedError

    def call(self, name: str, arguments: dict) -> str:
        """Result of a known tool with valid arguments, as text. Raises ValueError for a call that the
        world refuses; its text goes to the model."""
        raise NotImplementedError

    def answer(self, text: str) -> None:
        """Take `text` as the final answer."""
        self.answer_text = text

    def step(self, text: str, calls: list[Call]) -> tuple[list[Message], bool]:
        """One turn of the model: its text and the calls in it.

        returns  one tool message per call, in order, and whether the episode is over. A turn without
                 calls is the final answer. Malformed, unknown and invalid calls are answered with a
                 bounded error text; they never raise.
        """
        if not calls:
            self.answer(text)
            self.done = True
            return [], True
        return [Message("tool", self._result(call)) for call in calls], False

    def _result(self, call: Call) -> str:
        if call.error:
            return error_text(f"malformed call: {call.error}")
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            names = ", ".join(tool.name for tool in self.tools)
            return error_text(f"no tool {str(call.name)[:40]!r}; tools: {names}")
        problem = invalid_arguments(tool, call.arguments)
        if problem:
            return error_text(f"{tool.name}: {problem}")
        try:
            return clip(self.call(tool.name, call.arguments), MAX_RESULT_CHARS)
        except ValueError as error:
            return error_text(f"{tool.name}: {error}")

    def fork(self) -> "Env":
        """A twin whose future is its own; task, tools and database are shared read-only."""
        return copy.copy(self)

    def verify(self) -> Verdict:
        """Verdict on the final answer so far; never raises on what a model wrote."""
        raise NotImplementedError

    def official(self) -> dict[str, bool | None] | None:
        """The final answer by the benchmark's own scorer, holes included: its checks (None where it gives no
        result) and "pass". None where that scorer is not built."""
        return None

    def view(self) -> PlanView:
        """What a judge sees of the final answer."""
        raise NotImplementedError

    def reference_view(self) -> PlanView:
        """What a judge sees of the task's reference plan."""
        raise NotImplementedError


def invalid_arguments(tool: Tool, arguments: dict) -> str:
    """Why `arguments` break the tool's schema; "" if they do not. Arguments that the schema does not
    name are refused, whether or not it says additionalProperties: every prompt carries the schema."""
    try:
        error = next(jsonschema.Draft202012Validator(tool.parameters).iter_errors(arguments), None)
        problem = "" if error is None else f"{json_path(error)}{error.message}"
    except RecursionError:
        return "arguments nested too deeply"
    known = tool.parameters.get("properties", {})
    unknown = "" if problem else ", ".join(sorted(map(str, arguments.keys() - known.keys())))
    return f"unknown argument {unknown[:80]}; arguments: {', '.join(known)}" if unknown else problem


def json_path(error: jsonschema.ValidationError) -> str:
    """Where in the document a schema error lies, as "a.0.b: "; "" at the top."""
    path = ".".join(str(part) for part in error.absolute_path)
    return f"{path}: " if path else ""


def error_text(reason: str) -> str:
    """The answer to a wrong call: one line of at most MAX_ERROR_CHARS characters."""
    return clip("Error: " + " ".join(reason.split()), MAX_ERROR_CHARS)


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, with a visible mark where text was cut."""
    return text if len(text) <= limit else text[: limit - 5] + " [..]"
