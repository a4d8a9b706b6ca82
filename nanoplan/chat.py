"""Conversation as ids: what the model is shown, and what comes back from it.

The ids that a model sampled are the record and stay as they are. Only text that the model did not write
becomes ids here: `open` for the first prompt, `observe` for what follows a turn. Nothing encodes a decoded id
again. Control tokens come from the template alone: in a message, a tool's schema or a call's arguments the
same characters are data and become ordinary tokens (tokens.py).

Convention for templates that lack a form. What a template can do is tried out when it is loaded:
- Tools. The template's own form is used where a call that it prints reads back through `parse_turn` and it
  prints the results, as Qwen3's does. Otherwise (SmolLM2 and Llama 3 have no form, Llama 3.1 another one,
  Gemma 3 raises on the role) the Hermes text goes into ordinary content: signatures and instructions at the
  end of the system message, calls in the assistant's content, results as one user turn, each between
  <tool_response> tags.
- System. Where the template refuses or drops a system message, its text opens the first user message, with an
  empty line after it.
- Alternation. Where it refuses two user messages in a row, they become one, with an empty line between them.

Left out: images, documents, reasoning fields.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envs.base import Call, Message, Tool
from nanoplan.tokens import Tokens, read_json
from nanoplan.toolcalls import CALL_CLOSE, CALL_OPEN, Turn, parse_turn

# what Qwen3 was trained on; here it is data, for templates without a form for tools
HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n%s\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
TEMPLATE_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Chat:
    """A model folder's template and tokenizer.

    folder   HF folder: tokenizer.json, a chat template (chat_template.jinja, additional_chat_templates/ or
             inside tokenizer_config.json), and where present tokenizer_config.json, generation_config.json,
             config.json
    raises   ValueError that names the file and what to do: no tokenizer.json, no template, a template that
             closes a turn with no token to stop at, files that contradict each other
    """

    num_ids: int  # ids that the tokenizer knows, added tokens included; the model's matrix may have more rows
    stop_ids: frozenset[int]  # of generation_config, config and tokenizer, and end_id
    end_id: int  # the token with which the template closes an assistant turn
    native_tools: bool  # False: tools are written by the convention above
    generation_config: dict  # the file, to be printed; none of its sampling parameters is applied here

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        self._tokens = Tokens(folder)
        self.num_ids = self._tokens.num_ids
        self._templates = _compile(folder, _read_templates(folder))
        self._heads: dict[tuple, str] = {}  # of `_after_turn`
        self._try_out_template()
        self.generation_config = read_json(folder / "generation_config.json")
        stops = {self.end_id}
        for config in (self.generation_config, read_json(folder / "config.json")):
            named = config.get("eos_token_id")
            stops.update(named if isinstance(named, list) else [] if named is None else [named])
        if "eos_token" in self._tokens.special:
            stops.add(self._tokens.id_of(self._tokens.special["eos_token"]))
        self.stop_ids = frozenset(stops)

    # ids

    def open(self, messages: list[Message], tools: Sequence[Tool] = (), *, prompt: bool = True) -> list[int]:
        """Ids of the first prompt: the messages and, unless prompt is False, the generation prompt."""
        messages, tools, mark = self._tokens.mark(messages, tools)
        return self._tokens.encode_rendered(self.render(messages, tools, prompt=prompt), mark)

    def observe(self, messages: list[Message], *, stopped: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Ids to append after a model's turn: the rest of its closing, the messages, the next prompt.

        messages  tool results and user turns; may be empty
        stopped   the turn's last sampled id is a stop id. False (cut off at a limit): the closing token is
                  part of what is returned, so that the record holds it as observed, never as sampled.
        raises    ValueError if the template prints the turn before it differently now (see `check`)
        """
        messages, tools, mark = self._tokens.mark(messages, tools)
        ids = self._tokens.encode_rendered(self._after_turn(messages, tools), mark)
        return ids[ids.index(self.end_id) + 1 :] if stopped else ids

    def write(self, message: Message) -> list[int]:
        """Ids of an assistant message as a model would write it: content, calls, the token that ends it.
        For demonstrations: `open`, then `write` and `observe` in turn, give a conversation's ids."""
        (message,), _, mark = self._tokens.mark([message], ())
        before = self.render([Message("user", "u")], prompt=True)
        after = self.render([Message("user", "u"), message], prompt=False)
        if not after.startswith(before):
            raise ValueError(
                f"{self.folder}: the chat template begins a finished turn otherwise than its prompt does, "
                f"{after[-80:]!r} after {before[-40:]!r}; see Chat.check"
            )
        ids = self._tokens.encode_rendered(after[len(before) :], mark)
        return ids[: ids.index(self.end_id) + 1]

    def encode(self, text: str) -> list[int]:
        """Ids of plain data: no control token arises, none is added."""
        return self._tokens.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokens.decode(ids)

    def parse(self, ids: list[int]) -> Turn:
        """What the model said in one turn; a stop id may be last. Never raises (see `parse_turn`)."""
        return parse_turn(self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids))

    def stop_string_hit(self, ids: list[int], stops: Sequence[str]) -> str | None:
        """The stop string that the last of a turn's sampled ids completes, or None.

        Compared as text over a window of ids, because a stop string rarely begins and ends at an id's border.
        The caller keeps every id, the last one whole; only text may be cut.
        """
        window = ids[-max((len(stop.encode()) for stop in stops), default=0) - 4 :]
        now, before = self.decode(window), self.decode(window[:-1])
        return next((stop for stop in stops if now.count(stop) > before.count(stop)), None)

    # text

    def render(self, messages: list[Message], tools: Sequence[Tool] = (), *, prompt: bool) -> str:
        """The conversation as text, byte for byte what transformers' apply_chat_template gives (after this
        file's convention, where the template has no form). For people and comparisons: `open` gives the ids.

        prompt  adds the generation prompt
        raises  ValueError if the template refuses
        """
        messages, tools = self._in_template_roles(messages, tools)
        entries = []
        for message in messages:
            entry = {"role": message.role, "content": message.content}
            if message.calls:
                entry["tool_calls"] = [
                    {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in message.calls
                ]
            entries.append(entry)
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        schemas = [tool.schema() for tool in tools] or None
        names = self._tokens.special
        try:
            return template.render(
                messages=entries, tools=schemas, documents=None, add_generation_prompt=prompt, **names
            )
        except TEMPLATE_FAULTS as fault:
            raise ValueError(
                f"{self.folder}: the chat template refuses the roles {_roles(messages)}: {fault}"
            ) from fault

    def _in_template_roles(self, messages: list[Message], tools: Sequence[Tool]):
        """Messages and tools in roles that the template has, by the convention at the top."""
        if not self.native_tools:
            messages, tools = _hermes(messages, tools), ()
        if not self._has_system and messages and messages[0].role == "system":
            first, rest = messages[0].content, messages[1:]
            if rest and rest[0].role == "user":
                first, rest = f"{first}\n\n{rest[0].content}", rest[1:]
            messages = [Message("user", first), *rest]
        if self._alternates:
            merged: list[Message] = []
            for message in messages:
                if merged and merged[-1].role == message.role == "user":
                    merged[-1] = Message("user", f"{merged[-1].content}\n\n{message.content}")
                else:
                    merged.append(message)
            messages = merged
        return messages, tools

    def _after_turn(self, messages: list[Message], tools: Sequence[Tool]) -> str:
        """Text that follows a finished assistant turn, from its closing to the next generation prompt. It is
        cut from a two-message conversation: where `check` passes, what came before doesn't change it."""
        num_results = next((i for i, message in enumerate(messages) if message.role != "tool"), len(messages))
        stub = [Message("user", "u"), Message("assistant", "a", [Call("f", {})] * num_results)]
        text = self.render(stub + messages, tools, prompt=True)
        key = (num_results, *(tool.name for tool in tools))
        head = self._heads.get(key)
        if head is None or not text.startswith(head + self._closing):
            head = self.render(stub, tools, prompt=False).removesuffix(self._closing)
            if not text.startswith(head + self._closing):
                raise ValueError(
                    f"{self.folder}: the chat template is not prefix-preserving: it prints a turn "
                    f"differently once {_roles(messages)} follows; Chat.check names the place"
                )
            self._heads[key] = head
        return text[len(head) :]

    # what the template can do

    def _try_out_template(self) -> None:
        """Find out which roles the template has and how it closes an assistant turn."""
        self.native_tools, self._has_system, self._alternates = True, True, False
        user, answer = Message("user", "QUESTION"), Message("assistant", "ANSWER")
        plain = self.render([user, answer], prompt=False)  # raises where not even that is possible
        self._has_system = "SYSTEM" in self._attempt([Message("system", "SYSTEM"), user])
        self._alternates = not self._attempt([user, user])
        call, tool = (
            Call("probe_call", {"city": "Zürich", "n": 2}),
            Tool("probe_call", "PURPOSE", {"type": "object"}),
        )
        printed = self._attempt([user, Message("assistant", "", [call]), Message("tool", "RESULT")], (tool,))
        self.native_tools = "PURPOSE" in printed and "RESULT" in printed and call in parse_turn(printed).calls
        if "ANSWER" not in plain:
            raise ValueError(
                f"{self.folder}: the chat template leaves out what the assistant said; replace it"
            )
        self._closing = plain[plain.rindex("ANSWER") + len("ANSWER") :]
        ids = self._tokens.encode_rendered(self._closing, "")
        self.end_id = next((index for index in ids if index in self._tokens.control_ids), -1)
        if self.end_id < 0:
            raise ValueError(
                f"{self.folder}: the chat template closes an assistant turn with {self._closing!r}, in which "
                "there is no control token to stop at; use a template that closes turns with one"
            )
        sample = [user, answer, Message("user", "two  spaces\n\n 12 é")]
        self._tokens.check_split(self.render(sample, prompt=True))

    def _attempt(self, messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        """The rendered text, or "" where the template refuses."""
        try:
            return self.render(messages, tools, prompt=False)
        except ValueError:
            return ""

    def check(self) -> None:
        """Render a dummy conversation step by step; call it before the first rollout.

        raises  ValueError naming the place, when a step changes what was printed before (a template that
                drops thinking from the history, for one) or is printed otherwise in a long conversation
                than after one turn. Ids of earlier turns could then not be kept.
        """
        tool = Tool("look_up", "Looks up.", {"type": "object", "properties": {"q": {"type": "string"}}})
        one, two = Call("look_up", {"q": "a"}), Call("look_up", {"q": "b", "n": 2})
        talk = [[Message("assistant", "One.")], [Message("user", "Second?")], [Message("assistant", "Two.")]]
        with_tools = [
            [Message("user", "Third?")],
            [Message("assistant", "Let me see.", [one])],
            [Message("tool", "[]")],
            [Message("assistant", "", [one, two])],
            [Message("tool", '{"a": 1}'), Message("tool", "none")],
            [Message("assistant", "", [two])],
            [Message("tool", "[1]"), Message("user", "Think again.")],
            [Message("assistant", "Three.")],
            [Message("user", "Fourth?")],
            [Message("assistant", "Four.")],
        ]
        for opening in (
            [Message("user", "First?")],
            [Message("system", "Rules."), Message("user", "First?")],
        ):
            self._check_steps([opening, *talk], ())
            self._check_steps([opening, *talk, *with_tools], (tool,))

    def _check_steps(self, steps: list[list[Message]], tools: Sequence[Tool]) -> None:
        messages: list[Message] = []
        ends: list[int] = []  # length of the text after each step
        text = ""
        for step in steps:
            before, messages = text, messages + step
            asks = step[-1].role != "assistant"
            text = self.render(messages, tools, prompt=asks)
            place = f"step {len(ends)} ({_roles(step)}) of a dummy conversation"
            if not text.startswith(before):
                at = next(
                    (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text)
                )
                changed = next(i for i, end in enumerate(ends) if at < end)
                raise ValueError(
                    f"{self.folder}: the chat template is not prefix-preserving: {place} changes how step "
                    f"{changed} ({_roles(steps[changed])}) is printed, {before[at : at + 40]!r} becomes "
                    f"{text[at : at + 40]!r}. Take a model whose template keeps its history (Qwen3 "
                    "Instruct-2507, Llama 3, SmolLM2), or put a chat_template.jinja that does into the folder"
                )
            if asks and ends and text != before.removesuffix(self._closing) + self._after_turn(step, tools):
                raise ValueError(
                    f"{self.folder}: the chat template prints {place} otherwise than after a single turn, so "
                    "its ids cannot be appended; put a simpler chat_template.jinja into the folder"
                )
            ends.append(len(text))


def _read_templates(folder: Path) -> dict[str, str]:
    """Template sources by name. Files take the place of what tokenizer_config.json holds."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if not sources:
        inside = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(inside, list):
            sources = {entry["name"]: entry["template"] for entry in inside}
        elif inside:
            sources = {"default": inside}
    if "default" not in sources:
        has = f"chat templates {sorted(sources)} but no default one" if sources else "no chat template"
        raise ValueError(
            f"{folder} has {has}; take an instruct model, or put a chat_template.jinja into the folder "
            "(assets/tiny has that of Qwen3 Instruct-2507)"
        )
    return sources


def _compile(folder: Path, sources: dict[str, str]) -> dict[str, jinja2.Template]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as fault:
        raise ValueError(
            f"{folder}: a chat template among {sorted(sources)} does not compile (line {fault.lineno}): "
            f"{fault}"
        ) from fault


class _Generation(jinja2.ext.Extension):
    """{% generation %}: others find the assistant's text by it; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(form):
    return datetime.now().strftime(form)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Hugging Face's filter; jinja's own sorts keys and escapes <, >, & and '."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _roles(messages: Iterable[Message]) -> str:
    return ", ".join(message.role for message in messages)


def _hermes(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Tools, calls and results as ordinary content of system, assistant and user messages."""
    result: list[Message] = []
    if tools:
        opening = [message.content for message in messages[:1] if message.role == "system"]
        schemas = "\n".join(_to_json(tool.schema()) for tool in tools)
        result.append(Message("system", "\n\n".join([*opening, HERMES_TOOLS % schemas])))
        messages = messages[len(opening) :]
    for are_results, run in groupby(messages, key=lambda message: message.role == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{message.content}\n</tool_response>" for message in run]
            result.append(Message("user", "\n".join(texts)))
        else:
            result += [replace(message, content=_with_calls(message), calls=[]) for message in run]
    return result


def _with_calls(message: Message) -> str:
    blocks = [
        f'{CALL_OPEN}\n{{"name": {_to_json(call.name)}, "arguments": {_to_json(call.arguments)}}}\n'
        + CALL_CLOSE
        for call in message.calls
    ]
    return "\n".join([message.content, *blocks] if message.content else blocks)
