"""A critique: what the critic is shown, the form in which it answers, and the rules that its answer keeps.

The critic sees what the agent has seen and done, as text, and writes an analysis and advice for the next
step. It may not call a tool, hand over a complete solution or spell out a full sequence of actions (Caddie,
appendix B). The rules are text rules of ours, each with a name; docs/deviations.md says where they are crude.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import Env, Message, Task, Tool, Verdict

MAX_STEPS = 2  # actions that an advice may name; from three on it is a sequence; ours
MAX_CHARS = 4000  # of a critique; a longer one is malformed unread; ours
MAX_RESULT_CHARS = 4000  # of one message in the critic's transcript; ours

FORM = "Write exactly two parts:\nAnalysis: what goes well or wrong\nAdvice: the next step"
LIMITS = "Call no tool, give no final answer and no full list of actions."
PROMPTS = {  # how the critic is asked: Caddie's role, and two prompted critics as baselines; texts of ours
    "advise": f"You advise an agent at work on a task. {LIMITS}\n{FORM}",
    "review": (
        "You review the work of an agent that is in the middle of a task. Read its last steps critically: "
        "name the most harmful mistake so far, or say that there is none, and tell the agent how to go on. "
        f"{LIMITS}\n{FORM}"
    ),
    "checklist": (
        "You coach an agent that is in the middle of a task. Go through four questions: What does the task "
        "ask for? What has been found? What is still missing? Does the agent repeat itself or lose its goal? "
        f"From the answers derive the one step that helps most. {LIMITS}\n{FORM}"
    ),
}
NO_FEEDBACK = "No feedback is available. Go on by yourself."  # in place of a malformed critique, when asked

_FORM = re.compile(r"\s*Analysis:(?P<analysis>.*?)\n[ \t]*Advice:(?P<advice>.*)", re.DOTALL)
_HEADS = re.compile(r"^[ \t]*(?:Analysis|Advice):", re.MULTILINE)
_JSON_CALL = re.compile(r'\{\s*"(?:name|arguments|function|tool)"\s*:')
_TAGS = re.compile(r"</?tool_(?:call|response)>")
_SOLUTION = re.compile(
    r"\banswer\s*(?:is|=|:|should be|must be)\s*"
    r"(?!(?:not|still|unknown|missing|unclear|unsupported|wrong|yet|in|there|known|clear|now)\b)[\"'\w]",
    re.IGNORECASE,
)
_DOCUMENT = re.compile(r"```|[\[{]\s*[\"{\[]")  # a code block or JSON: a plan to copy
_CLAUSES = re.compile(
    r"[\n;.!?]+(?:\s+|$)|,\s*|\b(?:then|after that|afterwards|finally|next|and|before|or)\b", re.IGNORECASE
)
_MARKER = re.compile(
    r"^(?:[\s\-*•>]|\d+[.):]|step \d+[.:)]?|"
    r"(?:first|second|third|now|please|you should|you must|try to|to)\b)+",
    re.IGNORECASE,
)
VERBS = {  # kind of advice -> verbs that name an action of that kind
    "search": "search look find query retrieve browse read investigate",
    "answer": "answer submit finish conclude respond give commit report",
    "verify": "verify check confirm validate review compare inspect double-check",
    "ask": "ask clarify request inquire",
    "act": (
        "go open close take put move use clean heat cool slice examine pick place turn drop carry bring wash "
        "book cancel update exchange return modify call change pay transfer add remove buy send"
    ),
}
KIND_OF = {verb: kind for kind, verbs in VERBS.items() for verb in verbs.split()}


@dataclass(slots=True)
class Critique:
    text: str  # as the critic wrote it
    analysis: str  # "" where the form is broken
    advice: str
    faults: list[str]  # why it is malformed, "rule: what was found"; [] = well formed

    @property
    def feedback(self) -> str:
        """What the agent is told: a user turn."""
        return f"Feedback\nAnalysis: {self.analysis}\nAdvice: {self.advice}"


def read_critique(text: str, *, tools: Sequence[Tool] = (), finished: bool = True) -> Critique:
    """Split a critique into its parts and check every rule. Never raises on content.

    tools     of the agent: `name(` of one of them is a call
    finished  whether the critic ended by a stop token; one that was cut off is malformed
    source    Caddie appendix B: both parts non-empty, no tools, no complete solution, no full action sequence
    """
    if not finished:
        return Critique(text, "", "", ["cut: the critic did not come to an end"])
    if len(text) > MAX_CHARS:
        return Critique(text, "", "", [f"long: {len(text)} characters, at most {MAX_CHARS}"])
    match = _FORM.fullmatch(text)
    heads = len(_HEADS.findall(text))
    if match is None or heads != 2:
        return Critique(text, "", "", [f"form: wanted Analysis: then Advice:, once each; {heads} such lines"])
    analysis, advice = match["analysis"].strip(), match["advice"].strip()
    faults = []
    if not any(map(str.isalnum, analysis)):
        faults.append("empty_analysis: nothing after Analysis:")
    if not any(map(str.isalnum, advice)):
        faults.append("empty_advice: nothing after Advice:")
    found = _tool_call(text, tools)
    if found:
        faults.append(f"tool_call: {found}")
    solution = _SOLUTION.search(text) or _DOCUMENT.search(text)
    if solution and not found:
        faults.append(f"solution: {text[solution.start() : solution.start() + 60]!r}")
    steps = named_actions(advice)
    if len(steps) > MAX_STEPS:
        faults.append(f"sequence: {len(steps)} actions, at most {MAX_STEPS}: {', '.join(steps)[:80]}")
    return Critique(text, analysis, advice, faults)


def _tool_call(text: str, tools: Sequence[Tool]) -> str:
    """The first thing in the text that is a call; "" if none is."""
    match = _TAGS.search(text) or _JSON_CALL.search(text)
    if match is None:
        for tool in tools:
            match = match or re.search(rf"\b{re.escape(tool.name)}\s*\(", text)
    return repr(text[match.start() : match.start() + 60]) if match else ""


def named_actions(advice: str) -> list[str]:
    """The verbs of an advice that begin a clause and name an action, in order."""
    found = []
    for clause in _CLAUSES.split(advice):
        word = re.match(r"[a-z-]+", _MARKER.sub("", clause.strip()).lower())
        if word and word.group() in KIND_OF:
            found.append(word.group())
    return found


def advice_kind(advice: str) -> str:
    """search | answer | verify | ask | act | other: by the first action named, else the first verb.

    source  Caddie H.2 names the kinds; the rule is ours
    """
    verbs = named_actions(advice) or [w for w in re.findall(r"[a-z-]+", advice.lower()) if w in KIND_OF]
    return KIND_OF[verbs[0]] if verbs else "other"


def transcript(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """What an agent has seen and done, as text for a critic; calls as name and JSON, one line each."""
    names = {"system": "Instructions", "user": "Task", "assistant": "Agent", "tool": "Result"}
    lines = [f"Tools: {', '.join(tool.name for tool in tools)}"] if tools else []
    acted = False
    for message in messages:
        acted = acted or message.role == "assistant"
        name = "User" if message.role == "user" and acted else names[message.role]
        text = text_of(message)
        if len(text) > MAX_RESULT_CHARS:
            text = text[:MAX_RESULT_CHARS] + " [..]"
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def text_of(message: Message) -> str:
    """A message as one text: what it says, then its calls, each as name and JSON."""
    calls = [f"{c.name} {json.dumps(c.arguments, ensure_ascii=False)}" for c in message.calls]
    return " ".join(part for part in (message.content.strip(), *calls) if part)


def critic_messages(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, style: str = "advise"
) -> list[Message]:
    """What the critic is asked. Raises ValueError for a style that PROMPTS does not have."""
    if style not in PROMPTS:
        raise ValueError(f"style={style!r}; must be one of {', '.join(PROMPTS)}")
    return [Message("system", PROMPTS[style]), Message("user", transcript(messages, tools))]


class Review(Env):
    """The critic's own world: one prompt, one turn, no tools. `read` gives what it wrote."""

    def __init__(self, id: str, messages: list[Message], tools: Sequence[Tool]):
        super().__init__(Task(id, {}), [])
        self.messages, self.agent_tools = messages, tools
        self.tried_call = False  # its turn held a tool call

    def reset(self) -> list[Message]:
        self.answer_text, self.done, self.tried_call = "", False, False
        return self.messages

    def step(self, text: str, calls: list) -> tuple[list[Message], bool]:
        self.tried_call = bool(calls)
        self.answer(text)
        self.done = True
        return [], True

    def read(self) -> Critique:
        """The critique, checked; one whose turn was cut off, or held a call, is malformed."""
        critique = read_critique(self.answer_text, tools=self.agent_tools, finished=self.done)
        if self.tried_call and not any(fault.startswith("tool_call") for fault in critique.faults):
            critique.faults.append("tool_call: the turn held one")
        return critique

    def verify(self) -> Verdict:
        faults = self.read().faults
        return Verdict(not faults, {"form": not faults}, {"form": float(bool(faults))}, faults)
