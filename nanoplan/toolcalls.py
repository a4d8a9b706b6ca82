"""What a model wrote in one turn: text, and tool calls in Hermes form.

Malformed output is data, not an exception: the call carries a bounded error text, which answers the model.
Training and evaluation are equally strict.
"""

import json
import math
import re
from dataclasses import dataclass

from envs.base import Call

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_CHARS = 64  # characters of a tool's name in a call; ours
MAX_DEPTH = 32  # nesting of a call's arguments; ours, far below where recursion ends
MAX_FAULT_CHARS = 160  # characters of a fault's description; ours

_SPACE = re.compile(r"\s*")
_EITHER_TAG = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Turn:
    text: str  # what the model wrote outside its call blocks; edges stripped where there are calls
    calls: list[Call]  # in order; a malformed one has its error set


def parse_turn(text: str) -> Turn:
    """Split a model's turn into text and tool calls. Never raises on content.

    A block is <tool_call>, one JSON object with `name` and `arguments`, </tool_call>. The object is read by a
    decoder from its first brace, so a closing tag inside a JSON string doesn't end the block. `arguments` may
    be missing or null (read as {}), or a string that holds JSON (parsed once more).
    Malformed: broken or truncated JSON, NaN and numbers beyond a float, a key twice, any other key, a lone
    surrogate, nesting beyond MAX_DEPTH, no closing tag.
    """
    calls, outside, position = [], [], 0
    while (start := text.find(CALL_OPEN, position)) >= 0:
        outside.append(text[position:start])
        call, position = _read_block(text, start + len(CALL_OPEN))
        calls.append(call)
    if not calls:
        return Turn(text, [])
    outside.append(text[position:])
    return Turn("".join(outside).strip(), calls)


def _read_block(text: str, position: int) -> tuple[Call, int]:
    """The call whose block's content begins at `position`, and where reading goes on."""
    start = end = _SPACE.match(text, position).end()
    name = None
    try:
        if not text.startswith("{", start):
            raise ValueError(f"no JSON object after {CALL_OPEN}")
        value, end = _DECODER.raw_decode(text, start)
        name = value.get("name")
        call = _to_call(value)
        close = _SPACE.match(text, end).end()
        if not text.startswith(CALL_CLOSE, close):
            raise ValueError(f"no {CALL_CLOSE} after the JSON object")
        return call, close + len(CALL_CLOSE)
    except json.JSONDecodeError as fault:
        where = f"at character {fault.pos - start}" if fault.doc is text else "inside the arguments string"
        error = f"{fault.msg} {where}"
    except RecursionError:
        error = f"nested deeper than {MAX_DEPTH}"
    except ValueError as fault:
        error = str(fault)
    # the block ends at its closing tag, or where the next one opens
    tag = _EITHER_TAG.search(text, end)
    position = len(text) if tag is None else tag.start() if tag.group() == CALL_OPEN else tag.end()
    name = name[:MAX_NAME_CHARS] if isinstance(name, str) and not _SURROGATE.search(name) else ""
    return Call(name, {}, f"malformed tool call: {error[:MAX_FAULT_CHARS]}"), position


def _to_call(value: dict) -> Call:
    """The call that a decoded object holds. Raises ValueError with what the model should know."""
    unknown = sorted(set(value) - {"name", "arguments"})
    if unknown:
        raise ValueError(f"unexpected key {unknown[0][:40]!a}; the keys are name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"name must be a string of 1 to {MAX_NAME_CHARS} characters")
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be a JSON object, not {type(arguments).__name__}")
    _require_plain(name)
    _require_plain(arguments)
    return Call(name, arguments)


def _require_plain(value: object) -> None:
    """Raises ValueError for what JSON allows but later code could stumble over."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if isinstance(item, str) and _SURROGATE.search(item):
            raise ValueError("a lone surrogate in a string, which is no text")
        if isinstance(item, dict):
            pending += [(key, depth) for key in item]
            pending += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            pending += [(inner, depth + 1) for inner in item]


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _integer(number: str) -> int:
    _finite(number)  # more digits than a float can hold: no tool wants them, and arithmetic on them raises
    return int(number)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    result = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key[:40]!a} appears twice")
        result[key] = value
    return result


_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_int=_integer, parse_constant=_no_constant, object_pairs_hook=_unique_keys
)
