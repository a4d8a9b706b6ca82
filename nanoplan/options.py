"""A benchmark's own options, without a flag for each in the script: they are the keyword arguments of its
`load` besides n and seed, with their types and defaults. `--shots 0` beside `--bench planbench` is the same
as `--options shots=0`. The functions here get `load` itself, so this file knows no benchmark.
"""

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Collection

from nanoplan import config

COMMON = ("n", "seed")  # keyword arguments of every load, which scripts set themselves


def declared(load: Callable) -> dict[str, tuple[object, object]]:
    """Option -> (type, default) of a benchmark's load."""
    kinds = typing.get_type_hints(load)
    options = {}
    for name, parameter in inspect.signature(load).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in COMMON:
            options[name] = (kinds[name], parameter.default)
    return options


def read(load: Callable, pairs: Collection[str], *, bench: str) -> dict:
    """The keyword arguments that "name=value" pairs stand for; "blocks=3,4" is a tuple where one is wanted.

    raises  ValueError: no "=", an option that `load` does not have (with the nearest that it has), one that
            is given twice, a value of another type
    """
    options, argv = declared(load), []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"options: {pair!r}, wanted NAME=VALUE")
        if name not in options:
            raise ValueError(f"{bench} has no option {name!r}; {_nearest(name, options)}")
        kinds = (options[name][0], *typing.get_args(options[name][0]))
        several = any(typing.get_origin(kind) is tuple for kind in kinds)
        argv += [f"--{name}", *value.split(",")] if several else [f"--{name}={value}"]
    fields = [(name, kind, dataclasses.field(default=default)) for name, (kind, default) in options.items()]
    values = config.from_flags(dataclasses.make_dataclass("Options", fields, frozen=True), argv)
    return {name: getattr(values, name) for name in options if any(p.startswith(f"{name}=") for p in pairs)}


def gather(argv: list[str], fields: Collection[str], load: Callable) -> list[str]:
    """argv with every flag that is no field of the script but an option of `load` moved behind --options.

    raises  ValueError for a flag that is neither, with the nearest of both
    """
    options, kept, moved = declared(load), [], []
    here = kept
    for word in argv:
        if not word.startswith("--") or len(word) == 2:
            here.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if name in fields or name == "help":
            here = kept
            kept.append(word)
        elif name in options:
            here = [name, *([value] if equals else [])]
            moved.append(here)
        else:
            near = difflib.get_close_matches(name, [*fields, *options], n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown flag --{name}; the nearest is --{near}")
    pairs = [f"{name}={','.join(words) if words else 'true'}" for name, *words in moved]
    return [*kept, "--options", *pairs] if pairs else kept


def help_text(load: Callable, *, bench: str) -> str:
    """The options of a benchmark: names, types and defaults, and what its load says of them."""
    lines = [f"Options of {bench}, as flags or behind --options:"]
    for name, (kind, default) in declared(load).items():
        shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
        lines.append(f"  --{name} (default {shown}): {inspect.formatannotation(kind)}")
    return "\n".join([*lines, "", inspect.cleandoc(load.__doc__ or "")])


def _nearest(name: str, options: Collection[str]) -> str:
    if not options:
        return "it has none"
    return f"the nearest is {difflib.get_close_matches(name, options, n=1, cutoff=0.0)[0]!r}"
