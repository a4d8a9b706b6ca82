"""Conversation as ids: the model's own template and tokenizer, and what comes back from the model.

The ids that a model sampled are the record and stay as they are. Only text that the model did not write is turned
into ids: `open` for the first prompt, `observe` for what follows a turn. Nothing encodes a decoded id again.

Control tokens (`<|im_end|>`, `<tool_call>`, ...) come from the template alone. The same characters inside a system,
user or tool message, a tool's schema or a call's arguments are data and become ordinary tokens. An assistant message
may hold the tags that a model writes itself, but no special token.

Convention for templates that lack a form. What the template can do is tried out when it is loaded:
- Tools. Its own form is used where a call that it prints reads back through `parse_turn` and results are printed,
  which is so for Qwen3. Otherwise (SmolLM2 and Llama 3 have none, Llama 3.1 has another, Gemma 3 raises on the role)
  the Hermes text goes into ordinary content: signatures and instructions at the end of the system message, calls in
  the assistant's content, results as one user turn, each between <tool_response> and </tool_response>.
- System. Where the template refuses a system message, its text opens the first user message, an empty line after it.
- Alternation. Where it refuses two user messages in a row, they become one, an empty line between them.

Left out: images, documents, reasoning fields, slow (non-`tokenizers`) tokenizers.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from envs.base import Call, Message, Tool

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_CHARS = 64  # characters of a tool's name in a call; ours
MAX_DEPTH = 32  # nesting of a call's arguments; ours, far below where recursion ends
# the text that Qwen3 was trained on, used as data by the convention above
HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# ---- what the model wrote


@dataclass(slots=True)
class Turn:
    text: str  # what the model wrote outside its call blocks; edges stripped where there are calls
    calls: list[Call]  # in order; a malformed one has its error set


def parse_turn(text: str) -> Turn:
    """Split a model's turn into text and tool calls. Never raises on content.

    A block is <tool_call>, one JSON object with `name` and `arguments`, </tool_call>. The object is read by a decoder
    from its first brace, so a closing tag inside a JSON string doesn't end the block. `arguments` may be missing or
    null ({}), or a string that holds JSON (parsed once more). Malformed, each with a bounded error for the model:
    broken or truncated JSON, NaN and infinities, a key twice, any other key, a lone surrogate, nesting beyond
    MAX_DEPTH, no closing tag. Training and evaluation are equally strict.
    """
    calls, outside, position = [], [], 0
    while (start := text.find(CALL_OPEN, position)) >= 0:
        outside.append(text[position:start])
        call, position = _read_call(text, start + len(CALL_OPEN))
        calls.append(call)
    if not calls:
        return Turn(text, [])
    outside.append(text[position:])
    return Turn("".join(outside).strip(), calls)


def _read_call(text: str, position: int) -> tuple[Call, int]:
    """The call whose block's content begins at `position`, and where reading goes on."""
    start = _SPACE.match(text, position).end()
    name = ""
    try:
        if not text.startswith("{", start):
            raise ValueError(f"no JSON object after {CALL_OPEN}")
        value, end = _DECODER.raw_decode(text, start)
        name = value.get("name")
        call = _checked_call(value)
        end = _SPACE.match(text, end).end()
        if not text.startswith(CALL_CLOSE, end):
            raise ValueError(f"no {CALL_CLOSE} after the JSON object")
        return call, end + len(CALL_CLOSE)
    except json.JSONDecodeError as fault:
        where = f" at character {fault.pos - start}" if fault.doc is text else " inside the arguments string"
        error = fault.msg + where
    except RecursionError:
        error = f"nested deeper than {MAX_DEPTH}"
    except ValueError as fault:
        error = str(fault)
    following = _EITHER_TAG.search(text, start)
    if following is None:
        position = len(text)
    else:
        position = following.start() if following.group() == CALL_OPEN else following.end()
    name = name[:MAX_NAME_CHARS] if isinstance(name, str) and not _SURROGATE.search(name) else ""
    return Call(name, {}, f"malformed tool call: {error[:160]}"), position


def _checked_call(value: dict) -> Call:
    """The call in a decoded object. Raises ValueError with what the model should know."""
    unknown = sorted(set(value) - {"name", "arguments"})
    if unknown:
        raise ValueError(f"unexpected key {ascii(unknown[0][:40])}; the keys are name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"name must be a string of 1 to {MAX_NAME_CHARS} characters")
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be a JSON object, not {type(arguments).__name__}")
    pending: list[tuple[object, int]] = [(name, 0), (arguments, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(item, str) and _SURROGATE.search(item):
            raise ValueError("a lone surrogate in a string, which is no text")
        if isinstance(item, dict):
            pending += [(key, depth) for key in item]
            item = list(item.values())
        if isinstance(item, list):
            pending += [(inner, depth + 1) for inner in item]
    return Call(name, arguments)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {ascii(twice[:40])} appears twice")
    return result


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")
_EITHER_TAG = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")


# ---- files


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ValueError(f"{path} is not valid JSON ({fault}); download the model again") from fault
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; download the model again")
    return value


def _read_tokenizer(folder: Path, config: dict) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises a bare Exception for every fault in the file
        raise ValueError(
            f"{path} cannot be read ({fault}); download it again or update tokenizers"
        ) from fault
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for index, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda pair: int(pair[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in entry if key != "__type"})])
        found = tokenizer.token_to_id(entry["content"])
        if found != int(index):
            raise ValueError(
                f"{folder}: {entry['content']!r} is id {found} in tokenizer.json but id {index} in "
                "tokenizer_config.json; take both files from one model"
            )
    return tokenizer


def _read_templates(folder: Path, config: dict) -> dict[str, str]:
    """Template sources by name; .jinja files take the place of what tokenizer_config.json holds."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if not sources:
        inside = config.get("chat_template")
        if isinstance(inside, list):
            sources = {entry["name"]: entry["template"] for entry in inside}
        elif inside:
            sources = {"default": inside}
    if "default" not in sources:
        has = (
            f"only the chat templates {sorted(sources)}, none of them the default"
            if sources
            else "no chat template"
        )
        raise ValueError(
            f"{folder} has {has}; take an instruct model, or add a chat_template.jinja "
            "(assets/tiny/chat_template.jinja is the one of Qwen3-Instruct-2507)"
        )
    return sources


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for others; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Hugging Face's filter; jinja's own sorts keys and escapes <, >, & and '."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _compile_templates(folder: Path, sources: dict[str, str]) -> dict[str, jinja2.Template]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    compiled = {}
    for name, source in sources.items():
        try:
            compiled[name] = environment.from_string(source)
        except jinja2.TemplateError as fault:
            raise ValueError(f"{folder}: chat template {name!r} does not compile: {fault}") from fault
    return compiled


def _stop_ids(tokenizer: Tokenizer, special: dict[str, str], configs: Sequence[dict]) -> set[int]:
    """End-of-turn ids from every place that names one; an id beyond the tokenizer cannot be sampled."""
    stops = set()
    for config in configs:
        named = config.get("eos_token_id")
        stops.update(named if isinstance(named, list) else [] if named is None else [named])
    if "eos_token" in special:
        found = tokenizer.token_to_id(special["eos_token"])
        if found is None:
            raise ValueError(
                f"eos_token {special['eos_token']!r} is not in the tokenizer; "
                "take tokenizer.json and tokenizer_config.json from one model"
            )
        stops.add(found)
    return stops


# ---- the chat


class Chat:
    """A model folder's template and tokenizer.

    folder   HF folder: tokenizer.json, a chat template (chat_template.jinja, additional_chat_templates/, or inside
             tokenizer_config.json), and where present tokenizer_config.json, generation_config.json, config.json
    raises   ValueError that names the file and what to do: no tokenizer.json, no template, no stop token, files that
             contradict each other, or a tokenizer in which data cannot be kept apart from control tokens

    generation_config is the file as it is, to be printed: none of its sampling parameters is applied here.
    """

    num_ids: int  # ids that the tokenizer knows, added tokens included; the model's matrix may have more rows
    stop_ids: frozenset[
        int
    ]  # generation_config, config and tokenizer, and the token that the template closes with
    end_id: int  # the token with which the template closes an assistant turn
    native_tools: bool  # False: tools are written by the convention above

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        self.generation_config = _read_json(folder / "generation_config.json")
        self._tokenizer = _read_tokenizer(folder, config)
        self._templates = _compile_templates(folder, _read_templates(folder, config))
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        special = {name: named[name] for name in SPECIAL_NAMES if named.get(name)}
        self._special = {
            name: token if isinstance(token, str) else token["content"] for name, token in special.items()
        }
        self._split_off_control_tokens()
        self._try_out_template()
        model_config = _read_json(folder / "config.json")
        stops = _stop_ids(self._tokenizer, self._special, (self.generation_config, model_config))
        self.stop_ids = frozenset(stops | {self.end_id})

    # -- ids

    def open(self, messages: list[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the first prompt: the messages and the generation prompt."""
        messages, tools, mark = self._mark(messages, tools)
        return self._encode(self._render(messages, tools, prompt=True), mark)

    def observe(self, messages: list[Message], *, stopped: bool, tools: Sequence[Tool] = ()) -> list[int]:
        """Ids to append after a model's turn: the rest of its closing, the messages, the next generation prompt.

        messages  tool results and user turns; may be empty
        stopped   the turn's last sampled id is a stop id. False (cut off at a limit): the closing token is part of
                  the answer, so that it enters the record as observed, never as sampled.
        raises    ValueError if the template prints the turn before differently now (see `check`)
        """
        messages, tools, mark = self._mark(messages, tools)
        ids = self._encode(self._after_turn(messages, tools), mark)
        return ids[ids.index(self.end_id) + 1 :] if stopped else ids

    def write(self, message: Message) -> list[int]:
        """Ids of an assistant message as a model would write it: content, calls, and the token that ends the turn.
        For demonstrations; `open`, `write`, `observe`, ... joined are the conversation's ids."""
        (message,), _, mark = self._mark([message], ())
        before = self._render([Message("user", "u")], (), prompt=True)
        after = self._render([Message("user", "u"), message], (), prompt=False)
        if not after.startswith(before):
            raise ValueError(
                f"{self.folder}: the template's generation prompt is not how it begins an assistant turn"
            )
        ids = self._encode(after[len(before) :], mark)
        return ids[: ids.index(self.end_id) + 1]

    def encode(self, text: str) -> list[int]:
        """Ids of plain data: no control token arises, none is added."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: list[int]) -> Turn:
        """What the model said in one turn; a stop id may be last. Never raises on content (see `parse_turn`)."""
        return parse_turn(self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids))

    def stop_string_hit(self, ids: list[int], stops: Sequence[str]) -> str | None:
        """The stop string that the last of a turn's sampled ids completes, or None.

        Compared as text over a window of ids, for a stop string rarely begins and ends at an id's border. The caller
        keeps every id, the last one whole; only text may be cut.
        """
        window = ids[-(max((len(stop.encode()) for stop in stops), default=0) + 4) :]
        now, before = self.decode(window), self.decode(window[:-1])
        return next((stop for stop in stops if now.count(stop) > before.count(stop)), None)

    # -- text

    def render(self, messages: list[Message], tools: Sequence[Tool] = (), *, prompt: bool) -> str:
        """The conversation as text, byte for byte what transformers' apply_chat_template gives (after the convention
        of this file, where the template has no form). For people and for comparison: `open` gives the ids.

        prompt  adds the generation prompt
        """
        return self._render(messages, tools, prompt=prompt)

    def _render(self, messages: list[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        messages, tools = self._to_template_roles(messages, tools)
        entries = []
        for message in messages:
            entry = {"role": message.role, "content": message.content}
            if message.calls:
                entry["tool_calls"] = [
                    {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in message.calls
                ]
            entries.append(entry)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        schemas = [tool.schema() for tool in tools] or None
        try:
            return self._templates[name].render(
                messages=entries, tools=schemas, documents=None, add_generation_prompt=prompt, **self._special
            )
        except TEMPLATE_FAULTS as fault:
            roles = [message.role for message in messages]
            raise ValueError(
                f"{self.folder}: the chat template refuses the roles {roles}: {fault}"
            ) from fault

    def _to_template_roles(self, messages: list[Message], tools: Sequence[Tool]):
        """Messages and tools in roles that the template has; see the convention at the top."""
        if not self.native_tools:
            messages, tools = _hermes(messages, tools), ()
        if not self._has_system and messages and messages[0].role == "system":
            rest = [
                replace(message, role="user") if message.role == "system" else message
                for message in messages[1:]
            ]
            if rest and rest[0].role == "user":
                rest[0] = replace(rest[0], content=f"{messages[0].content}\n\n{rest[0].content}")
                messages = rest
            else:
                messages = [replace(messages[0], role="user"), *rest]
        if self._alternates:
            merged: list[Message] = []
            for message in messages:
                if merged and merged[-1].role == message.role == "user":
                    merged[-1] = replace(merged[-1], content=f"{merged[-1].content}\n\n{message.content}")
                else:
                    merged.append(message)
            messages = merged
        return messages, tools

    def _after_turn(self, messages: list[Message], tools: Sequence[Tool]) -> str:
        """Text that follows a finished assistant turn, from its closing to the next generation prompt. It is cut from
        a two-message conversation: where `check` passes, what came before doesn't change it."""
        num_results = next((i for i, message in enumerate(messages) if message.role != "tool"), len(messages))
        stub = [Message("user", "u"), Message("assistant", "a", [Call("f", {})] * num_results)]
        text = self._render(stub + messages, tools, prompt=True)
        key = (num_results, *(tool.name for tool in tools))
        head = self._heads.get(key)
        if head is None or not text.startswith(head + self._closing):
            head = self._render(stub, tools, prompt=False).removesuffix(self._closing)
            if not text.startswith(head + self._closing):
                raise ValueError(
                    f"{self.folder}: the chat template is not prefix-preserving: a turn is printed "
                    "differently once another follows; Chat.check names the place"
                )
            self._heads[key] = head
        return text[len(head) :]

    def _try_out_template(self) -> None:
        """Find out which roles the template has, and how it closes an assistant turn."""
        self._heads: dict[tuple, str] = {}
        self.native_tools, self._has_system, self._alternates = True, True, False
        user, answer = Message("user", "QUESTION"), Message("assistant", "ANSWER")
        plain = self._render([user, answer], (), prompt=False)  # raises where not even that is possible
        self._has_system = "SYSTEM" in self._attempt([Message("system", "SYSTEM"), user], ())
        self._alternates = not self._attempt([user, user], ())
        call, tool = (
            Call("probe_call", {"city": "Zürich", "days": 2}),
            Tool("probe_call", "PURPOSE", {"type": "object"}),
        )
        talk = [user, Message("assistant", "", [call]), Message("tool", "RESULT")]
        printed = self._attempt(talk, (tool,))
        self.native_tools = "PURPOSE" in printed and "RESULT" in printed and call in parse_turn(printed).calls
        if "ANSWER" not in plain:
            raise ValueError(
                f"{self.folder}: the chat template does not print what the assistant said; replace it"
            )
        self._closing = plain[plain.rindex("ANSWER") + len("ANSWER") :]
        ends = [index for index in self._encode(self._closing, "") if index in self._control_ids]
        if not ends:
            raise ValueError(
                f"{self.folder}: the chat template closes an assistant turn with {self._closing!r}, which "
                "holds no control token to stop at; use a template that closes turns with one"
            )
        self.end_id = ends[0]
        sample = self._render([user, answer, Message("user", " a\n\n b 12 é ")], (), prompt=True)
        if self._encode(sample, "") != self._encode(sample, "\U000f0000"):
            raise ValueError(
                f"{self.folder}: the tokenizer reads text between two control tokens differently from the "
                "same text alone (normalized tokens, or a prefix for the first word), so control tokens "
                "in data could not be neutralised; use another tokenizer"
            )

    def _attempt(self, messages: list[Message], tools: Sequence[Tool]) -> str:
        """The rendered text, or "" where the template refuses."""
        try:
            return self._render(messages, tools, prompt=False)
        except ValueError:
            return ""

    def check(self) -> None:
        """Render a dummy conversation step by step.

        raises  ValueError naming the place, when a step changes what was printed before (a template that drops or adds
                thinking in the history, for one) or prints a turn differently in a longer conversation. Ids of earlier
                turns could then not be kept. Call it before the first rollout.
        """
        tool = Tool("look_up", "Looks up.", {"type": "object", "properties": {"q": {"type": "string"}}})
        one, two = Call("look_up", {"q": "a"}), Call("look_up", {"q": "b", "n": 2})
        talk = [[Message("assistant", "One.")], [Message("user", "Second?")], [Message("assistant", "Two.")]]
        calls = [
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
            self._check_steps([opening, *talk, *calls], (tool,))

    def _check_steps(self, steps: list[list[Message]], tools: Sequence[Tool]) -> None:
        messages: list[Message] = []
        ends: list[int] = []  # length of the text once a step was the last
        text = ""
        for step in steps:
            before, messages = text, messages + step
            asks = step[-1].role != "assistant"
            text = self._render(messages, tools, prompt=asks)
            if not text.startswith(before):
                at = next(
                    (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text)
                )
                changed = next(i for i, end in enumerate(ends) if at < end)
                raise ValueError(
                    f"{self.folder}: the chat template is not prefix-preserving: once step {len(ends)} "
                    f"({_roles(step)}) follows, step {changed} ({_roles(steps[changed])}) of a dummy conversation is "
                    f"printed differently, {before[at : at + 40]!r} becomes {text[at : at + 40]!r}. Take a model whose "
                    "template keeps its history (Qwen3 Instruct-2507, Llama 3, SmolLM2), or put a chat_template.jinja "
                    "that does into the folder"
                )
            if asks and ends and text != before.removesuffix(self._closing) + self._after_turn(step, tools):
                raise ValueError(
                    f"{self.folder}: the chat template prints step {len(ends)} ({_roles(step)}) of a dummy conversation "
                    "differently in a longer conversation than after one turn, so it cannot be appended as ids; "
                    "put a simpler chat_template.jinja into the folder"
                )
            ends.append(len(text))

    # -- control tokens

    def _split_off_control_tokens(self) -> None:
        """Sort the added tokens. One with two characters or more, not only white space, is a control token; the rest
        (some models' indentation) is vocabulary."""
        tokenizer = self._tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.num_ids = max(tokenizer.get_vocab_size(), *(index + 1 for index in added), 0)
        control = {index: token for index, token in added.items() if len(token.content.strip()) > 1}
        self._plain = Tokenizer(tokenizer.model)  # the same model, shared, with no token added
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(tokenizer, part) is not None:
                setattr(self._plain, part, getattr(tokenizer, part))
        for index in sorted(added.keys() - control.keys()):
            self._plain.add_tokens([added[index]])
            if self._plain.token_to_id(added[index].content) != index:
                raise ValueError(
                    f"{self.folder}: added token {added[index].content!r} is id {index} only behind the "
                    "control tokens; use a tokenizer that has it in its vocabulary"
                )
        for token in control.values():
            if token.single_word:
                raise ValueError(
                    f"{self.folder}: control token {token.content!r} has the single_word flag, which is "
                    "not supported; set it to false in tokenizer.json"
                )
            if control.keys() & set(self.encode(token.content)):
                raise ValueError(
                    f"{self.folder}: the tokenizer spells {token.content!r} as a control token even in "
                    "plain text, so data could act as markup; use another tokenizer"
                )
        longest_first = sorted(control, key=lambda index: -len(control[index].content))
        self._control_ids = longest_first
        # group k + 1 is control token k; white space that lstrip and rstrip swallow belongs to the match
        self._control = _any_of(
            r"\s*" * control[index].lstrip
            + f"({re.escape(control[index].content)})"
            + r"\s*" * control[index].rstrip
            for index in longest_first
        )
        self._begins = _first_character_of(token.content for token in control.values())
        self._begins_special = _first_character_of(
            token.content for token in control.values() if token.special
        )

    def _mark(self, messages: list[Message], tools: Sequence[Tool]):
        """Break every control token in data by putting an unused private character behind its first one.

        returns  messages, tools, that character; the arguments themselves and "" where nothing had to be broken
        """
        data: list[str] = []
        own: list[str] = []  # what an assistant message says
        _map_data(messages, tools, data.append, own.append)
        if not any(map(self._begins.search, data)) and not any(map(self._begins_special.search, own)):
            return messages, tools, ""
        used = set().union(*data, *own)
        mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        broken = r"\g<0>" + mark
        data_sub, own_sub = partial(self._begins.sub, broken), partial(self._begins_special.sub, broken)
        return *_map_data(messages, tools, data_sub, own_sub), mark

    def _encode(self, text: str, mark: str) -> list[int]:
        """Ids of rendered text. Without a mark the tokenizer itself finds the control tokens. With one they are found
        here, and the text between them, its marks taken out, is encoded as plain data."""
        if not mark:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text):
            ids += self.encode(text[position : match.start()].replace(mark, ""))
            ids.append(self._control_ids[match.lastindex - 1])
            position = match.end()
        return ids + self.encode(text[position:].replace(mark, ""))


def _map_strings(value, change: Callable[[str], str]):
    """The same JSON value with every string, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _map_data(messages: list[Message], tools: Sequence[Tool], data, own):
    """Messages and tools with every string from the world through `data`, an assistant's content through `own`."""
    changed = [
        Message(
            message.role,
            (own if message.role == "assistant" else data)(message.content),
            [Call(data(call.name), _map_strings(call.arguments, data)) for call in message.calls],
        )
        for message in messages
    ]
    described = [
        Tool(data(tool.name), data(tool.description), _map_strings(tool.parameters, data)) for tool in tools
    ]
    return changed, described


def _any_of(patterns) -> re.Pattern:
    return re.compile("|".join(patterns) or "(?!)")


def _first_character_of(tokens) -> re.Pattern:
    """Matches one character, wherever one of the tokens begins, so that overlapping ones are found too."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    return _any_of(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())


def _roles(step: list[Message]) -> str:
    return ", ".join(message.role for message in step)


def _hermes(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Tools, calls and results as ordinary content of system, assistant and user messages."""
    result: list[Message] = []
    if tools:
        has_system = bool(messages) and messages[0].role == "system"
        system = f"{messages[0].content}\n\n" if has_system else ""
        schemas = "\n".join(_to_json(tool.schema()) for tool in tools)
        result.append(Message("system", system + HERMES_TOOLS.format(schemas=schemas)))
        messages = messages[1:] if has_system else messages
    for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{message.content}\n</tool_response>" for message in group]
            result.append(Message("user", "\n".join(texts)))
        else:
            result += [replace(message, content=_with_calls(message), calls=[]) for message in group]
    return result


def _with_calls(message: Message) -> str:
    blocks = [
        f'{CALL_OPEN}\n{{"name": {_to_json(call.name)}, "arguments": {_to_json(call.arguments)}}}\n{CALL_CLOSE}'
        for call in message.calls
    ]
    return "\n".join([message.content, *blocks] if message.content else blocks)
