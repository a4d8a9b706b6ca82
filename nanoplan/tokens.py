"""A model folder's tokenizer, with data and control tokens kept apart.

Rendered chat text is encoded as transformers would encode it. The characters of a control token
(`<|im_end|>`) that come from data must not become that token: `mark` breaks them before the text is rendered,
and `encode_rendered` then finds the real control tokens itself and encodes what lies between as ordinary
text. Not here: slow tokenizers, and special tokens added around a text (a chat template writes its own BOS).
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from envs.base import Call, Message, Tool

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokens:
    """Text to ids and back.

    folder   with tokenizer.json, and tokenizer_config.json or special_tokens_map.json where present
    raises   ValueError for files that are missing or contradict each other, and for a tokenizer in which data
             could not be kept apart from control tokens
    """

    num_ids: int  # ids that the tokenizer knows, added tokens included
    special: dict[str, str]  # bos_token, eos_token, ... -> text, those that the model has
    control_ids: list[int]  # added tokens that are markup

    def __init__(self, folder: Path):
        config = read_json(folder / "tokenizer_config.json")
        self._folder = folder
        self._tokenizer = _read_tokenizer(folder, config)
        named = {**read_json(folder / "special_tokens_map.json"), **config}
        found = {name: named[name] for name in SPECIAL_NAMES if named.get(name)}
        self.special = {
            name: item if isinstance(item, str) else item["content"] for name, item in found.items()
        }
        for name, text in self.special.items():
            if self._tokenizer.token_to_id(text) is None:
                raise ValueError(
                    f"{folder}: {name} {text!r} is not in tokenizer.json; take both files from one model"
                )
        added = self._tokenizer.get_added_tokens_decoder()
        self.num_ids = max([self._tokenizer.get_vocab_size(), *(index + 1 for index in added)])
        self._split_off_control_tokens(added)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: list[int]) -> str:
        """Text, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Ids of plain data: no control token arises, none is added."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Ids of text with control tokens in it. `mark` is what `Tokens.mark` returned for its data: without
        one the tokenizer does it all, which is the usual case."""
        if not mark:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text):
            ids += self.encode(text[position : match.start()].replace(mark, ""))
            ids.append(self.control_ids[match.lastindex - 1])
            position = match.end()
        return ids + self.encode(text[position:].replace(mark, ""))

    def mark(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[Tool], str]:
        """Break every control token in data by putting an unused private character behind its first one.

        What an assistant says may hold the tags that a model writes itself (`<think>`), but no special token.
        returns  messages, tools and that character; what was given and "" where nothing had to be broken
        """
        data: list[str] = []
        own: list[str] = []  # what assistant messages say
        _map_strings(messages, tools, data.append, own.append)
        if not any(map(self._begins.search, data)) and not any(map(self._begins_special.search, own)):
            return messages, list(tools), ""
        used = set().union(*data, *own)
        mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        broken = r"\g<0>" + mark
        change = partial(self._begins.sub, broken), partial(self._begins_special.sub, broken)
        return *_map_strings(messages, tools, *change), mark

    def check_split(self, text: str) -> None:
        """Raises ValueError if finding the control tokens here gives other ids than the tokenizer does."""
        if self.encode_rendered(text, "") != self.encode_rendered(text, "\U000f0000"):
            raise ValueError(
                f"{self._folder}: the tokenizer reads text between control tokens differently from the same "
                "text alone (a prefix for the first word, or normalized tokens), so control tokens in data "
                "could not be made harmless; use another tokenizer"
            )

    def _split_off_control_tokens(self, added: dict[int, AddedToken]) -> None:
        """An added token of two characters or more, not only white space, is a control token. The others
        (some models' indentation) are vocabulary."""
        control = {index: token for index, token in added.items() if len(token.content.strip()) > 1}
        self._plain = Tokenizer(self._tokenizer.model)  # the same model, shared, without its added tokens
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(self._tokenizer, part) is not None:
                setattr(self._plain, part, getattr(self._tokenizer, part))
        for index in sorted(added.keys() - control.keys()):
            self._plain.add_tokens([added[index]])
            if self._plain.token_to_id(added[index].content) != index:
                raise ValueError(
                    f"{self._folder}: added token {added[index].content!r} loses its id {index} without the "
                    "control tokens before it; use a tokenizer that has it in its vocabulary"
                )
        for token in control.values():
            if token.single_word:
                raise ValueError(
                    f"{self._folder}: control token {token.content!r} has single_word=true, which is not "
                    "supported; set it to false in tokenizer.json"
                )
            if control.keys() & set(self.encode(token.content)):
                raise ValueError(
                    f"{self._folder}: {token.content!r} becomes a control token even as plain text, so data "
                    "could act as markup; use another tokenizer"
                )
        self.control_ids = sorted(control, key=lambda index: -len(control[index].content))
        # group k + 1 is control token k; white space that lstrip and rstrip swallow belongs to the match
        self._control = _any_of(
            r"\s*" * control[index].lstrip
            + f"({re.escape(control[index].content)})"
            + r"\s*" * control[index].rstrip
            for index in self.control_ids
        )
        self._begins = _first_character_of(token.content for token in control.values())
        self._begins_special = _first_character_of(
            token.content for token in control.values() if token.special
        )


def read_json(path: Path) -> dict:
    """The object in a file; {} without the file. Raises ValueError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ValueError(f"{path} is not valid JSON ({fault}); download the model again") from fault
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, an object was wanted; download the model again"
        )
    return value


def _read_tokenizer(folder: Path, config: dict) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; save it with transformers' save_pretrained first")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises a bare Exception for every fault in the file
        raise ValueError(
            f"{path} cannot be read ({fault}); download it again or update tokenizers"
        ) from fault
    tokenizer.no_truncation()
    tokenizer.no_padding()
    entries = config.get("added_tokens_decoder", {})
    for index in sorted(map(int, entries)):
        entry = entries[str(index)]
        if tokenizer.token_to_id(entry["content"]) is None:
            tokenizer.add_tokens([AddedToken(**{key: entry[key] for key in entry if key != "__type"})])
        found = tokenizer.token_to_id(entry["content"])
        if found != index:
            raise ValueError(
                f"{folder}: {entry['content']!r} is id {found} in tokenizer.json but {index} in "
                "tokenizer_config.json; take both files from one model"
            )
    return tokenizer


def _any_of(patterns: Iterable[str]) -> re.Pattern:
    return re.compile("|".join(patterns) or "(?!)")


def _first_character_of(tokens: Iterable[str]) -> re.Pattern:
    """Matches one character wherever one of the tokens begins, so that overlapping ones are found too."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    return _any_of(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())


def _map_strings(messages: list[Message], tools: Sequence[Tool], data: Callable, own: Callable):
    """Copies with every string from the world through `data`, what an assistant says through `own`."""

    def inside(value):
        if isinstance(value, str):
            return data(value)
        if isinstance(value, dict):
            return {inside(key): inside(item) for key, item in value.items()}
        return [inside(item) for item in value] if isinstance(value, (list, tuple)) else value

    changed = [
        Message(
            message.role,
            own(message.content) if message.role == "assistant" else data(message.content),
            [Call(data(call.name), inside(call.arguments)) for call in message.calls],
        )
        for message in messages
    ]
    return changed, [Tool(data(tool.name), data(tool.description), inside(tool.parameters)) for tool in tools]
