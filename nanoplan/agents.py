"""Ways to get a plan out of a model that can only be asked, with what each costs: queries, tokens, seconds.

    tools      a talk with the world's tools until the model answers
    direct     one question without tools
    react      thought and action in turns (arXiv:2210.03629); what follows "Answer:" is the answer
    reflexion  react; the model judges its answer, says what to do better and tries again (arXiv:2303.11366)
    refine     a drafter and a critic in the manner of LRPlan (Findings of EMNLP 2025): the critic lists what
               the request demands and checks each draft against the list, the drafter revises
    workflow   the benchmark's own pipeline: a program searches, the model chooses (TripTailor)

The model is an llm.Endpoint, or whatever has its `chat`. An episode is its messages; no ids, no log-probs: an
agent that is measured, never trained. Prompts and limits are ours; no paper's prompts are used. No method
sees the world's verdict, but for reflexion with `oracle`. Best-of-N belongs beside METHODS.
"""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from envs.base import Call, Env, Message, clip
from nanoplan.llm import EndpointError, Reply, to_openai
from nanoplan.rollout import MAX_ERROR_CHARS, Budget
from nanoplan.toolcalls import CALL_CLOSE, CALL_OPEN, parse_turn
from nanoplan.trajectory import Trajectory

CHARS_PER_TOKEN = 4  # by which observation_tokens cut a result: the server's tokenizer is not known; ours
TRANSCRIPT_CHARS = 40_000  # of a talk that a reviewer or reflexion reads, the end of it; ours
MAX_LESSONS = 3  # reflections kept, as in Reflexion
EMPTY = "an empty reply"  # of nanoplan.llm: neither text nor calls, however often it was asked
OVERFLOW = ("context length", "context_length", "maximum context", "context window", "max_len")

REACT = (
    "Work in turns. Begin each turn with 'Thought:' and one or two sentences on what is known and what to do "
    "next. Then either call a tool, or, when nothing more is needed, write a line 'Answer:' and after it the "
    "final answer in the form that is asked for, and nothing else."
)
NUDGE = "That was neither a tool call nor an answer. Call a tool, or write 'Answer:' and the final answer."
TEXT_CALLS = (
    "You may call these tools:\n{tools}\nTo call one, write "
    f'{CALL_OPEN}{{{{"name": ..., "arguments": {{{{...}}}}}}}}{CALL_CLOSE}'
    " and wait for the result. A turn without a call is your final answer."
)
LIST = (
    "Read the request below. List every constraint that an answer must keep, one a line, numbered: those it "
    "states, and those that follow from it or from the form it asks for. Write the list and nothing else."
    "\n\nREQUEST\n{request}"
)
CHECK = (
    "You check an answer against the constraints of a request. Go through the constraints one by one, "
    "reason step by step, and say for each whether the answer keeps it and, if not, what is wrong and what "
    "would repair it. End with one line: 'VERDICT: accept' if all are kept, else 'VERDICT: revise'."
    "\n\nREQUEST\n{request}\n\nCONSTRAINTS\n{constraints}\n\nWHAT IS KNOWN\n{known}\n\nANSWER\n{answer}"
)
REVISE = "A reviewer found problems with your answer:\n{review}\nRepair them and give the whole answer again."
JUDGE = (
    "Below is an attempt at a request. Decide whether its answer fulfils the request in every point; check "
    "step by step. End with one line: 'VERDICT: accept' or 'VERDICT: revise'.\n\n{transcript}"
)
REFLECT = (
    "The attempt below failed. In at most five sentences, say why it probably failed and what to do "
    "differently in the next attempt. Give no answer to the request.\n\n{transcript}"
)
LESSONS = "You have tried this before and failed. What you noted:\n{lessons}"


@dataclass(frozen=True, slots=True)
class Setup:
    endpoint: object  # the agent's model: nanoplan.llm.Endpoint or what has its `chat`
    budget: Budget  # turns and tokens of one attempt; tokens by the server's count
    reviewer: object | None = None  # judges and criticises in reflexion and refine; None: the agent's model
    temperature: float = 1.0
    calling: str = "native"  # how tools are offered: native | text (in the prompt, for servers without tools)
    rounds: int = 3  # reflexion: attempts at most; refine: revisions at most
    oracle: bool = False  # reflexion learns from the world's verdict whether an attempt failed


@dataclass(slots=True, eq=False)
class Run:
    """One trial of one request; has what nanoplan.evaluate reads of an Episode."""

    env: Env
    seed: int
    trial: int = 0
    trajectory: Trajectory = field(default_factory=Trajectory)  # for its `stop` alone
    turns: int = 0  # of the agent, all attempts together
    calls: int = 0
    malformed: int = 0
    queries: int = 0  # replies of agent and reviewer
    cached: int = 0  # of these, from the endpoint's disk cache
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    seconds: float = 0.0  # from the request to the end, tools included
    context: int = 0  # tokens of the talk at its last reply, by the server's count
    talks: list[list[Message]] = field(default_factory=list)  # every conversation, the reviewer's too

    def counts(self) -> dict:
        """What an item keeps of the run, beside what it keeps of an episode."""
        names = ("trial", "queries", "cached", "prompt_tokens", "completion_tokens", "usd", "seconds")
        own = {name: getattr(self, name) for name in names}
        return own | {"tokens_sampled": self.completion_tokens, "tokens_observed": None}


def play(
    setup: Setup,
    method: str,
    envs: list[Env],
    *,
    trials: int = 1,
    seed_of: Callable[[str, int], int],
    workers: int = 8,
    progress: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Every trial of every request by a method of METHODS, the trials of a request beside each other.

    seed_of   seed of (id, trial); a reply is cached under it
    workers   runs at once
    progress  called with each run when it is over, in order
    raises    ValueError for direct questions to a world that has no prompt without tools, and for a workflow
              where the world has none
    """
    for env in envs[:1]:
        if method == "direct" and env.tools and not hasattr(env, "direct_messages"):
            raise ValueError(
                "method=direct asks without tools, which this world's prompt needs; use react or tools"
            )
        if method == "workflow" and not hasattr(env, "workflow"):
            raise ValueError("method=workflow is a pipeline, which this world lacks; use tools or react")
    runs = [Run(env.fork(), seed_of(env.task.id, t) % 2**31, t) for env in envs for t in range(trials)]

    def one(run: Run) -> Run:
        start = time.perf_counter()
        try:
            METHODS[method](setup, run)
        except EndpointError as error:
            run.trajectory.stop = _stop_of(error)
        run.seconds = time.perf_counter() - start
        return run

    with ThreadPoolExecutor(max(1, workers)) as pool:
        for run in pool.map(one, runs):
            if progress is not None:
                progress(run)
    return runs


def tools(setup: Setup, run: Run) -> None:
    if (messages := _reset(run)) is not None:
        _converse(setup, run, messages, str)


def direct(setup: Setup, run: Run) -> None:
    messages = _reset(run)
    if messages is None:
        return
    if hasattr(run.env, "direct_messages"):
        try:
            messages = run.env.direct_messages()
        except Exception as error:
            run.trajectory.stop = _error("direct", error)
            return
    run.talks.append(messages)
    if (reply := _ask(setup, run, messages, [])) is not None:
        _step(run, reply.text, [])


def react(setup: Setup, run: Run) -> None:
    if (messages := _reset(run)) is not None:
        _converse(setup, run, _with_system(messages, REACT), _after_answer)


def reflexion(setup: Setup, run: Run) -> None:
    lessons: list[str] = []
    for attempt in range(1, setup.rounds + 1):
        messages = _reset(run)
        if messages is None:
            return
        if lessons:
            messages = _with_system(messages, LESSONS.format(lessons="\n".join(lessons)))
        _converse(setup, run, _with_system(messages, REACT), _after_answer)
        if attempt == setup.rounds or run.trajectory.broken:
            return
        transcript = _transcript(run.talks[-1])
        if setup.oracle:
            good = run.trajectory.stop == "answer" and run.env.verify().passed
        else:
            good = _accepts(_review(setup, run, JUDGE.format(transcript=transcript)))
        if good:
            return
        lessons = [*lessons, _review(setup, run, REFLECT.format(transcript=transcript))][-MAX_LESSONS:]


def refine(setup: Setup, run: Run) -> None:
    messages = _reset(run)
    if messages is None:
        return
    request = "\n\n".join(message.content for message in messages)
    constraints = _review(setup, run, LIST.format(request=request))
    _converse(setup, run, messages, str)
    for _ in range(setup.rounds):
        if run.trajectory.stop != "answer" or messages[-1].calls:  # cut, or a call has ended the world
            return
        draft = run.env.answer_text
        known = _transcript([message for message in messages if message.role == "tool"]) or "(the request)"
        texts = {"request": request, "constraints": constraints, "known": known, "answer": draft}
        review = _review(setup, run, CHECK.format(**texts))
        if _accepts(review):
            return
        messages.append(Message("user", REVISE.format(review=review)))
        _converse(setup, run, messages, str)
        if run.trajectory.stop in (
            "turns",
            "turn_tokens",
            "tokens",
        ):  # no revision came of it: the draft stands
            _step(run, draft, [])
            return


def workflow(setup: Setup, run: Run) -> None:
    """Each question is a talk of its own with all of total_tokens; the pipeline says how many there are."""
    if _reset(run) is None:
        return
    pipeline, said = run.env.workflow(run.seed), None
    while True:
        try:
            messages = pipeline.send(said)
        except StopIteration as end:
            _step(run, end.value, [])
            return
        except Exception as error:
            run.trajectory.stop = _error("workflow", error)
            return
        run.talks.append(messages)
        run.context = 0
        if (reply := _ask(setup, run, messages, [])) is None:
            return
        said = reply.text.rpartition("</think>")[2].strip()


METHODS = {method.__name__: method for method in (tools, direct, react, reflexion, refine, workflow)}


def _reset(run: Run) -> list[Message] | None:
    """The messages that open the talk; None where the world fails, which `stop` then says."""
    try:
        return list(run.env.reset())
    except Exception as error:
        run.trajectory.stop = _error("reset", error)
        return None


def _converse(setup: Setup, run: Run, messages: list[Message], read: Callable[[str], str | None]) -> None:
    """Turns of agent and world until the answer, or until `stop` says why there is none. `messages` grows.

    read  the answer in a turn without a call; None if it holds none, and the agent is told so
    """
    if not any(talk is messages for talk in run.talks):
        run.talks.append(messages)
        run.context = 0
    run.trajectory.stop = ""
    for _ in range(setup.budget.turns):
        reply = _ask(setup, run, messages, run.env.tools)
        if reply is None:
            return
        text = reply.text if reply.calls else read(reply.text)
        if text is None:
            messages.append(Message("user", NUDGE))
            continue
        results = _step(run, text, reply.calls)
        if run.trajectory.stop:
            return
        room = CHARS_PER_TOKEN * setup.budget.observation_tokens
        messages += [Message(message.role, clip(message.content, room)) for message in results]
    run.trajectory.stop = "turns"


def _step(run: Run, text: str, calls: list[Call]) -> list[Message]:
    """Take a turn to the world; sets `stop` where it ends or fails."""
    try:
        results, done = run.env.step(text, calls)
    except Exception as error:
        run.trajectory.stop = _error("step", error)
        return []
    run.trajectory.stop = "answer" if done else ""
    return results


def _ask(setup: Setup, run: Run, messages: list[Message], offered: list) -> Reply | None:
    """The agent's next turn, put behind `messages`; None where the budget cuts it, as `stop` then says."""
    room = setup.budget.total_tokens - run.context
    if room < 1:
        run.trajectory.stop = "tokens"
        return None
    asked = _as_text(messages, offered) if setup.calling == "text" and offered else to_openai(messages)
    native = [tool.schema() for tool in offered] if setup.calling == "native" else []
    options = {"temperature": setup.temperature, "max_tokens": min(room, setup.budget.turn_tokens)}
    reply = setup.endpoint.chat(asked, tools=native or None, seed=run.seed, **options)
    _count(run, setup.endpoint, reply)
    run.context = reply.prompt_tokens + reply.completion_tokens
    run.turns += 1
    if setup.calling == "text" and offered:
        turn = parse_turn(reply.text)
        reply.text, reply.calls = turn.text, turn.calls
    elif not offered:
        reply.calls = []
    messages.append(Message("assistant", reply.text, reply.calls))
    if reply.stop == "length":
        own = options["max_tokens"] == setup.budget.turn_tokens
        run.trajectory.stop = "turn_tokens" if own else "tokens"
        return None
    run.calls += len(reply.calls)
    run.malformed += sum(bool(call.error) for call in reply.calls)
    return reply


def _review(setup: Setup, run: Run, text: str) -> str:
    """A text by the reviewer, in a talk of its own; one that is cut at turn_tokens is taken as it is."""
    endpoint = setup.reviewer or setup.endpoint
    talk = [Message("user", text)]
    options = {"temperature": setup.temperature, "max_tokens": setup.budget.turn_tokens}
    reply = endpoint.chat(to_openai(talk), seed=run.seed, **options)
    _count(run, endpoint, reply)
    run.talks.append([*talk, Message("assistant", reply.text)])
    return reply.text.rpartition("</think>")[2].strip()


def _count(run: Run, endpoint, reply: Reply) -> None:
    price_in, price_out = getattr(endpoint, "prices", (0.0, 0.0))  # US dollars per token
    run.queries += 1
    run.cached += reply.cached
    run.prompt_tokens += reply.prompt_tokens
    run.completion_tokens += reply.completion_tokens
    run.usd += reply.prompt_tokens * price_in + reply.completion_tokens * price_out


def _accepts(review: str) -> bool:
    """Whether the last verdict of a review is to accept; a review without one asks for a revision."""
    verdicts = re.findall(r"verdict\W{1,6}(accept|revise)", review.lower())
    return bool(verdicts) and verdicts[-1] == "accept"


def _after_answer(text: str) -> str | None:
    """What follows the last line that begins with "Answer:"; None where there is no such line."""
    found = list(re.finditer(r"^[ \t*#]*Answer[ \t*]*:[ \t*]*", text, re.MULTILINE | re.IGNORECASE))
    return text[found[-1].end() :].strip() if found else None


def _with_system(messages: list[Message], text: str) -> list[Message]:
    """`messages` with `text` at the end of the system message, or as one where there is none."""
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _as_text(messages: list[Message], offered: list) -> list[dict]:
    """The talk in plain user and assistant turns, calls and results in tags, tools in the system message."""
    schemas = "\n".join(json.dumps(tool.schema()["function"]) for tool in offered)
    plain: list[dict] = []
    for message in _with_system(messages, TEXT_CALLS.format(tools=schemas)):
        role, text = message.role, message.content
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if message.calls:
            text = "\n".join(filter(None, [text, *map(_written, message.calls)]))
        if plain and plain[-1]["role"] == role == "user":
            plain[-1]["content"] += f"\n{text}"
        else:
            plain.append({"role": role, "content": text})
    return plain


def _written(call: Call) -> str:
    return f"{CALL_OPEN}\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n{CALL_CLOSE}"


def _transcript(messages: list[Message]) -> str:
    """A talk as text, its end where it is too long."""
    parts = []
    for message in messages:
        calls = "".join(f"\n{call.name}({json.dumps(call.arguments)})" for call in message.calls)
        parts.append(f"{message.role.upper()}: {message.content}{calls}")
    return "\n\n".join(parts)[-TRANSCRIPT_CHARS:]


def _stop_of(error: EndpointError) -> str:
    """Why an episode ends for want of a reply: a context that is full, a model that says nothing, or a server
    that fails, which is no fault of the plan."""
    text = str(error).lower()
    if any(words in text for words in OVERFLOW):
        return "tokens"
    return "empty" if EMPTY in text else _error("agent", error)


def _error(place: str, error: Exception) -> str:
    return f"error: {place}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
