"""TripTailor folders of the real size: indexed once, then quick and small; and bad files that are named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envs import BENCHMARKS, trips, triptailor_database, triptailor_large
from envs.trip_planner import searches
from envs.triptailor_data import CSV_FILES, Rows, normal
from envs.triptailor_database import Database, Index, Tables
from envs.triptailor_index import INDEX_NAME, members, open_index, write_index

triptailor = BENCHMARKS["triptailor"]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A fiftieth of the real size."""
    return triptailor_large.build(tmp_path_factory.mktemp("large"), scale=0.02, train_n=8, test_n=8)


def indexed(folder, monkeypatch):
    monkeypatch.setattr(triptailor_database, "LARGE", 1)
    return Database(folder)


def test_an_index_holds_what_the_files_hold(large, monkeypatch):
    # Catches: a price, a coordinate or a missing value that comes back from the index as another one.
    monkeypatch.setattr(triptailor_database, "LARGE", 10**12)
    plain = Database(large)
    stored = indexed(large, monkeypatch)
    assert isinstance(plain._tables, Tables) and isinstance(stored._tables, Index)
    for kind, cities in plain.places.items():
        assert list(cities) == list(stored.places[kind]) and len(cities) == triptailor_large.CITIES
        for city in cities:
            assert cities[city] == stored.places[kind][city]
            name = cities[city][-1].name
            assert plain.named(kind, city, name) == stored.named(kind, city.upper(), f" {name} ") != []
    a, b = list(plain.places["hotel"])[:2]
    assert plain.rides(a, b) == stored.rides(a, b) != []
    assert {ride.mode for ride in stored.rides(a, b)} == {"flight", "train"}
    assert plain.information("test", 1) == stored.information("test", 1) != None  # noqa: E711
    assert stored.information("test", 99) is stored.information("train", 1) is None
    assert stored.named("hotel", "nowhere", "x") == [] and "nowhere" not in stored.places["hotel"]


def test_missing_coordinates_survive_the_index(tmp_path, monkeypatch):
    # Catches: NaN stored as null, or as 0.
    folder = trips.build(tmp_path / "w", seed=1, train=2, test=2)
    path = folder / CSV_FILES["sight"]
    lines = path.read_text(encoding="utf-8").split("\n")
    cells = lines[1].split(",")
    header = lines[0].split(",")
    for field in ("latitude", "longitude", "price", "reference_time"):
        cells[header.index(field)] = ""
    path.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]), encoding="utf-8")
    city, name = cells[header.index("city")], cells[header.index("poiName")]
    (place,) = indexed(folder, monkeypatch).named("sight", city, name)
    assert place.lat != place.lat and place.lon != place.lon and (place.price, place.duration) == (0.0, "")
    assert (folder / INDEX_NAME).is_file()


def test_an_index_is_made_once_and_again_when_a_file_changes(large, tmp_path, monkeypatch):
    # Catches: a second start that reads the CSV files again, or an index that outlives its data.
    folder = Path(shutil.copytree(large, tmp_path / "w"))
    indexed(folder, monkeypatch)
    first = (folder / INDEX_NAME).stat().st_ino
    monkeypatch.setattr(Rows, "__iter__", None)
    indexed(folder, monkeypatch)
    assert (folder / INDEX_NAME).stat().st_ino == first
    monkeypatch.undo()
    os.utime(folder / "restaurants.csv", ns=(1, 1))
    indexed(folder, monkeypatch)
    assert (folder / INDEX_NAME).stat().st_ino != first
    (folder / INDEX_NAME).write_bytes(b"SQLite format 3\0" + b"broken" * 999)
    indexed(folder, monkeypatch)
    assert open_index(folder / INDEX_NAME, "other") is None
    assert not list(folder.glob("*.tmp"))


def test_a_folder_that_is_read_only_is_indexed_elsewhere(large, tmp_path, monkeypatch):
    # Catches: data on a read-only disk that cannot be used at all.
    folder = Path(shutil.copytree(large, tmp_path / "w", ignore=shutil.ignore_patterns(INDEX_NAME)))
    monkeypatch.setattr(triptailor_database.os, "access", lambda path, mode: False)
    monkeypatch.setattr(triptailor_database, "__file__", str(tmp_path / "project" / "envs" / "x.py"))
    index = indexed(folder, monkeypatch)._tables
    assert index.path.parent == tmp_path / "project" / ".cache" and not (folder / INDEX_NAME).exists()
    assert indexed(folder, monkeypatch)._tables.path == index.path


def test_half_an_index_is_never_read(tmp_path):
    # Catches: a file that another process reads while it is written, or that a failed one leaves behind.
    def entries():
        yield "a", "1"
        raise ValueError("broken row")

    with pytest.raises(ValueError, match="broken row"):
        write_index(tmp_path / INDEX_NAME, "s", entries())
    assert list(tmp_path.iterdir()) == []
    write_index(tmp_path / INDEX_NAME, "s", [("a", "[1, NaN]")])
    index = open_index(tmp_path / INDEX_NAME, "s")
    assert index.get("a")[0] == 1 and index.get("b", 7) == 7 and index.text("b") is None


def test_large_json_is_read_member_by_member(tmp_path):
    # Catches: a reader that loses a member, or takes a broken file for an empty one.
    content = {"1": {"a": [1, {"b": "}"}]}, "x\n": [], "é": None, "4": "text"}
    path = tmp_path / "info.json"
    for indent in (None, 3):
        path.write_text(json.dumps(content, indent=indent), encoding="utf-8")
        assert {key: json.loads(text) for key, text in members(path)} == content
    path.write_text("{}")
    assert list(members(path)) == []
    for text in (
        "",
        "[1]",
        '{"a": 1',
        '{"a" 1}',
        '{"a": 1,, "b": 2}',
        "{1: 2}",
        '{"a": }',
        '{"a": ' + "[" * 9999,
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"info\.json is not a JSON object"):
            list(members(path))


def test_requests_of_a_large_folder(large):
    # Catches: references that the large world cannot hold, or searches that are slow for its size.
    envs = triptailor.load("train", large) + triptailor.load("test", large)
    for env in envs:
        messages, _ = env.step("", searches(env.request))
        assert not [m.content for m in messages if m.content.startswith("Error")]
        env.answer(json.dumps(env.reference_plan()))
        assert env.verify().passed, env.verify().reasons
        official = env.official()  # its information has the rides of the requested part of day alone
        assert (official is None) == env.task.id.startswith("train")
        assert official is None or {"within_sandbox", "pass"} >= {c for c, ok in official.items() if not ok}
        assert env.view() == env.reference_view()
    twins = [p for places in envs[0].data.places["hotel"].values() for p in places]
    assert len({(p.city, p.name) for p in twins}) < len(twins)


PROBE = """
import json, re, sys, time
from pathlib import Path
start = time.process_time()
from envs import triptailor
imported = time.process_time()
envs = triptailor.load("train", sys.argv[1])
loaded = time.process_time()
for env in envs[:10]:
    env.step("", __import__("envs.trip_planner").trip_planner.searches(env.request))
status = Path("/proc/self/status").read_text()  # ru_maxrss of a child begins at its parent's
print(json.dumps({"load_s": loaded - imported, "search_s": time.process_time() - loaded,
    "gb": int(re.search(r"VmHWM:\\s*(\\d+)", status)[1]) / 1e6}))
"""


def probe(folder):
    command = [sys.executable, "-c", PROBE, str(folder)]
    out = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return json.loads(out)


@pytest.mark.slow
def test_the_real_size_loads_in_seconds_and_little_memory(tmp_path):
    # Catches: 500,000 places made into objects, or parsed again, at every start.
    folder = triptailor_large.build(tmp_path, train_n=12, test_n=2)
    (folder / INDEX_NAME).unlink()
    first, second = probe(folder), probe(folder)
    print(first, second)
    assert first["load_s"] < 60 and first["gb"] < 1.0
    assert second["load_s"] < 3 and second["search_s"] < 10 and second["gb"] < 0.5


MISTAKES = {  # what is done to a folder -> what the error must name
    "no column": (
        lambda f: cut_column(f / "restaurants.csv", "avg_price"),
        r"restaurants\.csv row 1: no column avg_price; found name, real_city",
    ),
    "no weekday": (
        lambda f: cut_column(f / "Flight_Schedule.csv", "Sunday"),
        r"Flight_Schedule\.csv row 1: no column Sunday",
    ),
    "an empty file": (
        lambda f: (f / "attractions.csv").write_text(""),
        r"attractions\.csv row 1: no column poiName.*found nothing",
    ),
    "no file": (
        lambda f: (f / "Train_Schedule.csv").unlink(),
        r"Train_Schedule\.csv is missing; a TripTailor folder holds accommodations\.csv",
    ),
    "no split": (lambda f: (f / "test.json").unlink(), r"test\.json is missing"),
    "record without a city": (
        lambda f: edit(f, lambda r: r[1].pop("destination_city")),
        r"test\.json row 2: destination_city='None', wanted str",
    ),
    "record without a query": (
        lambda f: edit(f, lambda r: r[0].pop("query")),
        r"test\.json row 1: query='None', wanted str",
    ),
    "record without a pid": (
        lambda f: edit(f, lambda r: r[0].pop("pid")),
        r"test\.json row 1: pid='None', wanted int",
    ),
    "record that is a list": (
        lambda f: edit(f, lambda r: r.__setitem__(2, [])),
        r"test\.json row 3 is a list, wanted an object",
    ),
    "a pid twice": (
        lambda f: edit(f, lambda r: r[2].update(pid=1)),
        r"test\.json row 3: pid 1 is that of row 1 too",
    ),
    "meals in words": (
        lambda f: edit(f, lambda r: r[0].update(meal_price_range="cheap")),
        r"row 1: meal_price_range=cheap, wanted \[low, high\]",
    ),
    "budget nowhere": (lambda f: edit(f, no_budget), r"row 1: budget='None', wanted int"),
    "candidates broken": (
        lambda f: (f / "given_info_data.json").write_text('{"1": {'),
        r"given_info_data\.json is not a JSON object",
    ),
    "no candidates of a request": (
        lambda f: give(f, lambda g: g.pop("2")),
        r"row 2: .*given_info_data\.json has no object for pid 2",
    ),
    "candidates without hotels": (
        lambda f: give(f, lambda g: g["1"].pop("hotels")),
        r"row 1: given_info_data\.json 1 has no list hotels or hotel",
    ),
}


def cut_column(path, column):
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(column, f"x{column}", 1), encoding="utf-8")


def edit(folder, change, name="test.json"):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def give(folder, change):
    edit(folder, change, "given_info_data.json")


def no_budget(records):
    del records[0]["budget"]
    records[0]["query"] = records[0]["query"].replace("with a budget of", "with at most")


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_named(tmp_path, name):
    # Catches: KeyError, or a message without file, row and what was wanted.
    folder = trips.build(tmp_path / "w", seed=1, train=1, test=3)
    change, message = MISTAKES[name]
    change(folder)
    with pytest.raises(ValueError, match=message):
        triptailor.load("test", folder, pool="request")


def test_hotels_lie_under_either_key(tmp_path):
    # Catches: a pool of no hotels where the file spells the key as the workflow does.
    folder = trips.build(tmp_path / "w", seed=1, train=1, test=2)
    before = triptailor.load("test", folder, pool="request")
    give(folder, lambda g: [record.update(hotel=record.pop("hotels")) for record in g.values()])
    after = triptailor.load("test", folder, pool="request")
    for one, two in zip(before, after, strict=True):
        assert one.pool == two.pool and len(two.pool["hotel"]) > 3
        two.answer(two.task.data["final_plan_json"])
        assert two.official()["pass"]
        shown = json.loads(two.call("search_hotels", {"city": two.request.destination}))
        assert {normal(row["name"]) for row in shown} <= two.pool["hotel"]
    with pytest.raises(ValueError, match="pool='all', wanted database or request"):
        triptailor.load("test", folder, pool="all")
    with pytest.raises(ValueError, match=r"given_info_data_train\.json has no object for pid 1"):
        triptailor.load("train", folder, pool="request")
