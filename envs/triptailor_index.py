"""A keyed store of JSON values in one SQLite file: written once, then read by key without loading the rest.

What makes TripTailor's real files (100 MB of CSV, 100 MB of JSON) start in seconds: one value per city and
kind, per pair of cities, per request (envs/triptailor_database.py). Nothing is executed that is read.
"""

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

INDEX_NAME = "nanoplan_index.sqlite"
STAMP = "stamp"  # key of what the index was made from


class Index:
    """The values of an index file; safe to share between threads and forked processes."""

    def __init__(self, path: Path):
        self.path = path

    def text(self, key: str) -> str | None:
        """The JSON text of a key; None if it is not there."""
        with closing(_connect(self.path)) as connection:
            row = connection.execute("SELECT value FROM entry WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def get(self, key: str, default=None):
        text = self.text(key)
        return default if text is None else json.loads(text)


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)


def open_index(path: Path, stamp: str) -> Index | None:
    """The index at a path if it was made from what `stamp` says; None if it is old, broken or not there."""
    if not path.is_file():
        return None
    index = Index(path)
    try:
        return index if index.get(STAMP) == stamp else None
    except (sqlite3.Error, ValueError):
        return None


def write_index(path: Path, stamp: str, entries: Iterable[tuple[str, str]]) -> Index:
    """Write (key, JSON text) pairs; through a temp file and a rename, so that no process reads half of it.

    raises  OSError where the folder cannot be written to
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=INDEX_NAME, suffix=".tmp")
    os.close(handle)
    try:
        with closing(sqlite3.connect(name)) as connection, connection:
            connection.execute("CREATE TABLE entry (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
            connection.executemany("INSERT INTO entry VALUES (?, ?)", entries)
            connection.execute("INSERT INTO entry VALUES (?, ?)", (STAMP, json.dumps(stamp)))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return Index(path)


def members(path: Path) -> Iterator[tuple[str, str]]:
    """(key, JSON text) of every member of a file that holds one JSON object, one after the other, so that a
    large file is never parsed as a whole. Raises ValueError that names the file and what is wrong."""
    text = path.read_text(encoding="utf-8")
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    try:
        at = _expect(text, at, "{")
        while text[at] != "}":
            key, at = decoder.raw_decode(text, at)
            if not isinstance(key, str):
                raise ValueError(f"key {str(key)[:40]!r}")
            start = _expect(text, _skip(text, at), ":")
            _, at = decoder.raw_decode(text, start)
            yield key, text[start:at]
            at = _skip(text, at)
            if text[at] != "}":
                at = _expect(text, at, ",")
    except (ValueError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object, near character {at}: {error}") from None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in " \t\r\n":
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"wanted {mark!r}, found {text[at : at + 1]!r}")
    return _skip(text, at + 1)
