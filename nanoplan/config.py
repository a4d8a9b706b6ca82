"""Flags from a frozen dataclass: every field is a flag, its trailing comment is its help.

    @dataclass(frozen=True)
    class Config:
        clip_high: float = 0.25  # upper clip of the ratio, unitless; Anchored GRPO

    cfg = parse(Config)          # python script.py --clip_high 0.28

Types: int, float, str, bool (`true` or `false`; the flag alone is true), Literal["a", "b"], `T | None`
(`none`), tuple[T, ...] (several values after one flag). No abbreviations, no nesting, no files.
"""

import ast
import dataclasses
import difflib
import inspect
import io
import json
import math
import os
import sys
import textwrap
import tokenize
import types
import typing
from pathlib import Path


def parse(cls, argv: list[str] | None = None):
    """Return cls filled from command-line flags; prints help or a one-line error and leaves when it has to.

    argv     the arguments after the script's name; None takes sys.argv[1:]
    raises   SystemExit(0) after --help, SystemExit(2) after a bad flag or value
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    try:
        return from_flags(cls, argv)
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}\n(--help lists every flag)", file=sys.stderr)
        raise SystemExit(2) from None


def from_flags(cls, argv: list[str]):
    """Return cls filled from argv.

    raises   ValueError naming the flag, its value and what was wanted: unknown flag (with the nearest
             known one), missing, repeated or malformed value, required field that was not given
    """
    kinds = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, object] = {}
    for name, words in _split(argv):
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown flag --{name}; the nearest is --{near}")
        if name in values:
            raise ValueError(f"flag --{name} is given twice; give it once")
        values[name] = _value(name, kinds[name], words)
    for name, f in fields.items():
        if name not in values and not _has_default(f):
            raise ValueError(f"flag --{name} is required: {_wanted(kinds[name])}")
    return cls(**values)


def help_text(cls) -> str:
    """One paragraph per field: flag, type, default, and the trailing comment from the source file."""
    kinds, comments = typing.get_type_hints(cls), _comments(cls)
    lines = [inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").split("\n")[0], "", "Flags:"]
    for f in dataclasses.fields(cls):
        default = f"default {_shown(_default(f))}" if _has_default(f) else "required"
        lines.append(f"  --{f.name} ({_wanted(kinds[f.name])}; {default})")
        indent = " " * 6
        lines += textwrap.wrap(comments.get(f.name, ""), 100, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines).lstrip()


def save(cfg, folder) -> Path:
    """Write cfg as folder/config.json (temp file and rename) and return its path."""
    path = Path(folder) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name("config.json.tmp")
    temp.write_text(json.dumps(dataclasses.asdict(cfg), indent=1) + "\n", encoding="utf-8")
    os.replace(temp, path)
    return path


def check_resume(cfg, folder, *, allow: set[str] = frozenset()) -> list[str]:
    """Compare cfg with the config.json of the run that it resumes.

    allow    names of fields that may differ
    returns  one "name: old -> new" for each allowed difference, to be shown to the user
    raises   ValueError listing every other difference; also if there is no config.json
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"cannot resume: {path} does not exist; give --out the folder of an earlier run")
    old = json.loads(path.read_text(encoding="utf-8"))
    new = json.loads(json.dumps(dataclasses.asdict(cfg)))
    names = [name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name]]
    lines = {n: f"{n}: {_shown(old.get(n, 'absent'))} -> {_shown(new.get(n, 'absent'))}" for n in names}
    refused = [line for name, line in lines.items() if name not in allow]
    if refused:
        raise ValueError(
            f"cannot resume {folder}, the config differs from {path.name} (old -> new):\n  "
            + "\n  ".join(refused)
            + "\ngive the old values, or another --out for a fresh run"
        )
    return list(lines.values())


def _split(argv):
    """Cut argv into (flag name, its words); `--flag=word` is one word, `--flag=` none."""
    parts: list[tuple[str, list[str]]] = []
    for arg in argv:
        if arg.startswith("--") and len(arg) > 2:
            name, equals, word = arg[2:].partition("=")
            parts.append((name, [word] if word else [] if not equals else [""]))
        elif parts:
            parts[-1][1].append(arg)
        else:
            raise ValueError(f"{arg!r} stands before any flag; write --name {arg}")
    return parts


def _value(name, kind, words):
    """Turn the words after --name into a value of type kind."""
    bare, optional = _strip_none(kind)
    if optional and words == ["none"]:
        return None
    if typing.get_origin(bare) is tuple:
        args = typing.get_args(bare)
        if words == [""]:
            return ()
        if not words or (args[-1] is not Ellipsis and len(words) != len(args)):
            raise ValueError(f"flag --{name} got {len(words)} values {words}, wanted {_wanted(kind)}")
        kinds = [args[0]] * len(words) if args[-1] is Ellipsis else args
        return tuple(_scalar(name, k, word, kind) for k, word in zip(kinds, words, strict=True))
    if bare is bool and not words:
        return True
    if len(words) != 1:
        got = "no value" if not words else f"{len(words)} values {words}"
        raise ValueError(f"flag --{name} got {got}, wanted one: {_wanted(kind)}")
    return _scalar(name, bare, words[0], kind)


def _scalar(name, bare, word, kind):
    error = ValueError(f"flag --{name} got {word!r}, wanted {_wanted(kind)}")
    if typing.get_origin(bare) is typing.Literal:
        by_text = {str(choice): choice for choice in typing.get_args(bare)}
        if word not in by_text:
            raise error
        return by_text[word]
    if bare is bool:
        if word not in ("true", "false"):
            raise error
        return word == "true"
    if bare not in (int, float, str):
        raise TypeError(f"field {name} has type {bare}, which config.parse does not know")
    try:
        value = bare(word)
    except ValueError:
        raise error from None
    if bare is float and math.isnan(value):
        raise error
    return value


def _wanted(kind) -> str:
    """The type in a user's words."""
    bare, optional = _strip_none(kind)
    if typing.get_origin(bare) is tuple:
        args = typing.get_args(bare)
        text = f"one or more of {_wanted(args[0])}" if args[-1] is Ellipsis else " ".join(map(_wanted, args))
    elif typing.get_origin(bare) is typing.Literal:
        text = " or ".join(map(str, typing.get_args(bare)))
    else:
        text = {bool: "true or false"}.get(bare, bare.__name__)
    return text + (" or none" if optional else "")


def _strip_none(kind):
    """(kind without None, whether None was allowed)."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(rest) != 1:
            raise TypeError(f"type {kind} is a choice of types; a flag has one")
        return rest[0], True
    return kind, False


def _has_default(f) -> bool:
    return f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING


def _default(f):
    return f.default if f.default is not dataclasses.MISSING else f.default_factory()


def _shown(value) -> str:
    """A value as one would type it after the flag."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(_shown, value)) or "(empty)"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "(empty)"


def _comments(cls) -> dict[str, str]:
    """Trailing comment of each field, read from the source of cls and of the dataclasses it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                lines = range(node.lineno, node.end_lineno + 1)
                found[node.target.id] = " ".join(by_line[i] for i in lines if i in by_line)
    return found
