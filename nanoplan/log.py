"""What a run leaves behind: metrics.jsonl, trajectories.jsonl, summary.json, and lines a person can read.

Only rank 0 writes. A line is flushed when it is written, so a killed run loses at most the line it was
writing; a resumed run drops that torn line and every line after the step that it continues from. So write
the line of a step before its checkpoint.
"""

import itertools
import json
import math
import os
from pathlib import Path

from tqdm import tqdm

from nanoplan import dist

FILES = ("metrics.jsonl", "trajectories.jsonl")


class RunLog:
    """The two growing files of a run folder and its summary.

    folder       the run folder; made if it is missing
    resume_step  last step in the checkpoint: lines with a larger step are dropped; None starts afresh
    overwrite    a fresh start may delete the lines of an earlier run
    raises       ValueError if a fresh start finds an earlier run's lines, or a line in the middle is no JSON
    """

    def __init__(self, folder, *, resume_step: int | None = None, overwrite: bool = False):
        self.folder = Path(folder)
        self.files = {}
        if not dist.is_main():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            path = self.folder / name
            if resume_step is not None:
                _truncate(path, resume_step)
            elif overwrite:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size:
                raise ValueError(
                    f"{path} holds an earlier run; resume it, delete it, or give --out another folder"
                )
            self.files[name] = open(path, "a", encoding="utf-8")

    def metrics(self, row: dict) -> None:
        """Append one line to metrics.jsonl; row has `step` (int), values are numbers or 0-dim tensors."""
        self._append("metrics.jsonl", [row])

    def trajectories(self, rows: list[dict]) -> None:
        """Append one line per episode to trajectories.jsonl; each row has `step` (int)."""
        self._append("trajectories.jsonl", rows)

    def line(self, text: str) -> None:
        """Print text on rank 0 without tearing a progress bar."""
        if dist.is_main():
            tqdm.write(text)

    def bar(self, *, total: int, start: int = 0, unit: str = "step") -> tqdm:
        """A progress bar that is silent on the other ranks and where the output is not a terminal."""
        return tqdm(total=total, initial=start, unit=unit, disable=None if dist.is_main() else True)

    def summary(self, row: dict) -> None:
        """Write summary.json in one piece: {"before": {...}, "after": {...}, "seconds": s}."""
        if dist.is_main():
            write_json(self.folder / "summary.json", row)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files = {}

    def _append(self, name, rows):
        if not dist.is_main():
            return
        for row in rows:
            assert isinstance(row.get("step"), int), (
                f"a line of {name} needs an int step, got {row.get('step')!r}"
            )
        self.files[name].write("".join(to_json(row) + "\n" for row in rows))
        self.files[name].flush()


def move_aside(folder: Path) -> None:
    """Give an earlier run's folder (one with a config.json) a number at the end, and print it. For rank 0."""
    if not (folder / "config.json").exists():
        return
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    os.rename(folder, free)
    print(f"an earlier run in {folder} was moved to {free}")


def to_json(row) -> str:
    """One line of strict JSON: 0-dim tensors and numpy numbers become numbers, nan and infinity null."""
    try:
        return json.dumps(row, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(row))


def write_json(path: Path, row) -> None:
    """Write row as indented JSON through a temp file and a rename, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(path.name + ".tmp")
    temp.write_text(json.dumps(_finite(row), indent=1) + "\n", encoding="utf-8")
    os.replace(temp, path)


def before_after(before: dict, after: dict) -> str:
    """Markdown table of the keys of `after`: value before, value after, change.

    before, after  name -> number, or (number, low, high) with an interval; None, nan or absent shows as a
                   dash. Names that end in _rate, or contain `success`, are shares and print in percent.
    """
    rows = []
    for name in after:
        share = name.endswith("_rate") or "success" in name
        old, new = before.get(name), after[name]
        first, last = (v[0] if isinstance(v, (tuple, list)) else v for v in (old, new))
        change = "–" if _unknown(first) or _unknown(last) else _number(last - first, share, sign=True)
        rows.append([name, _cell(old, share), _cell(new, share), change])
    return table(["", "before", "after", "change"], rows)


def table(head: list[str], rows: list[list]) -> str:
    """Markdown table with aligned columns: the first to the left, the others to the right."""
    cells = [[str(c).replace("|", "\\|") for c in row] for row in [head, *rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
        for r in cells
    ]
    lines.insert(1, ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _unknown(value) -> bool:
    return value is None or value != value  # nan


def _cell(value, share):
    if _unknown(value):
        return "–"
    if isinstance(value, (tuple, list)):
        middle, low, high = (_number(v, share) for v in value)
        return f"{middle} [{low}, {high}]"
    return _number(value, share)


def _number(value, share, sign=False):
    plus = "+" if sign else ""
    if share:
        return f"{100 * value:{plus}.1f}{' points' if sign else ' %'}"
    return f"{value:{plus}d}" if isinstance(value, int) else f"{value:{plus}.4g}"


def _truncate(path, last_step):
    """Keep the complete lines of path whose step is at most last_step; the file is replaced in one piece."""
    if not path.exists():
        return
    temp = path.with_name(path.name + ".tmp")
    with open(path, "rb") as old, open(temp, "wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill in the middle of a write: only the last line can be
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} line {number} is no JSON object with a step ({error})") from None
            if step <= last_step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temp, path)


def _plain(value):
    """json's `default`: the number inside a 0-dim tensor or numpy scalar."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} does not fit into JSON")


def _finite(value):
    """value with nan and infinity replaced by None, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    value = value if isinstance(value, float) else _plain(value)
    return value if not isinstance(value, float) or math.isfinite(value) else None
