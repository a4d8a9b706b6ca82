"""Training data from final plans alone, for the paper's two baselines that imitate or prefer plans.

    python -m envs.triptailor_traces traces --data DIR --out traces.jsonl        # SFT on imputed traces
    python -m envs.triptailor_traces pairs --data DIR --run runs/e --out pairs.jsonl          # Anchored DPO

A trace is a conversation that ends with the request's reference plan, before it the fewest searches that a
greedy choice finds after which every ride and place of the plan has been read in a result. Requests whose
plan no search can lead to (a name that is not in the database) are counted and left out.
A pair is two final plans of one request from a run of eval.py --split train --trials K: one that earns the
anchored reward and one that does not. Its prompt is the request: the searches before a plan get no signal.
Both files are what train_cmdpo.py --stage sft and --stage pref read. --data may be left out for the built-in
world.
Source: Anchored GRPO's baselines; that the calls are made turn by turn, rides and hotel first, is ours.
"""

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path

from envs import trips, triptailor
from envs.base import Call, Env, Message
from envs.triptailor_data import WEEKDAYS, Place, normal
from envs.triptailor_plan import Priced

MAX_PAIRS = 4  # of one request, so that no request outweighs the others; ours


def trace(env: triptailor.TripTailor) -> list[Message]:
    """The conversation, made in a twin of `env`: request, two turns of searches with their results, plan.

    raises  ValueError: no reference plan, or a part of it that no search shows
    """
    twin = env.fork()
    trip = twin.reference()
    turns = [[trip.hotel, *trip.rides], [*trip.activities("sight"), *trip.activities("restaurant")]]
    messages = twin.reset()
    for parts in turns:
        calls = _cover(twin, parts)
        if calls:
            results, _ = twin.step("", calls)
            messages += [Message("assistant", "", calls), *results]
    return [*messages, Message("assistant", triptailor.to_json(trip.plan))]


def _cover(env: triptailor.TripTailor, parts: list[Priced]) -> list[Call]:
    """Calls after which each part has been read, plain ones first; none that shows nothing new."""
    calls, missing = [], [_known(part) for part in parts]
    while missing:
        calls.append(_best(env, missing))
        shown = _shown(env, calls[-1])
        missing = [part for part in missing if not _reads(part, shown)]
    return calls


def _known(part: Priced) -> Priced:
    if part.found is None:
        raise ValueError(f"{part.kind} that is not in the database: {part.name[:60]!r}")
    return part


def _best(env: triptailor.TripTailor, missing: list[Priced]) -> Call:
    """Of the calls that show the first missing part, the one that shows the most; on a tie the plainest."""
    first = missing[0]
    best, most = None, 0
    for call in _candidates(env, first):
        shown = _shown(env, call)
        num = sum(_reads(part, shown) for part in missing) if _reads(first, shown) else 0
        if num > most:
            best, most = call, num
    if best is None:
        raise ValueError(f"{first.kind} that no search shows: {first.name[:60]!r}")
    return best


def _candidates(env: triptailor.TripTailor, part: Priced) -> list[Call]:
    """Ways to search for a part, the plainest first."""
    found, request = part.found, env.request
    if part.kind == "ride":
        way = {"origin": found.origin, "destination": found.destination}
        if found.mode == "train":
            return [Call("search_trains", way)]
        asked = request.weekdays[found.origin != request.origin] or None
        days = [asked] if asked else [day for day in WEEKDAYS if found.runs(day)]
        return [Call("search_flights", way | {"weekday": day}) for day in days]
    city = {"city": found.city}
    exact = {"min_price": found.price, "max_price": found.price}
    if part.kind == "hotel":
        wishes = ({}, {"category": found.tags}, {"max_price": found.price})
        return [Call("search_hotels", city | wish) for wish in wishes]
    if part.kind == "restaurant":
        low, high = request.meals
        nears = ({}, {"near": found.name})
        prices = ({"min_price": low, "max_price": high}, exact)
        return [Call("search_restaurants", city | price | near) for price, near in product(prices, nears)]
    words = [*request.interests, *(tag.strip() for tag in found.tags.split(";")), found.name]
    wishes = ({}, *({"keyword": word} for word in dict.fromkeys(words) if word))
    return [Call("search_attractions", city | wish) for wish in wishes]


def _shown(env: triptailor.TripTailor, call: Call) -> list[dict]:
    """Rows that the call answers with; none where the world refuses it."""
    try:
        return triptailor.search(env.data, call.name, call.arguments, env.output, env.pool)
    except ValueError:
        return []


def _reads(part: Priced, rows: list[dict]) -> bool:
    if isinstance(part.found, Place):
        return any(normal(row.get("name", "")) == normal(part.found.name) for row in rows)
    return any(row.get("number") == part.found.number for row in rows)


def traces(envs: list[triptailor.TripTailor]) -> tuple[list[dict], dict[str, int]]:
    """Records {"id", "messages", "tools"} and, of the requests left out, reason -> how many."""
    records, left_out = [], Counter()
    for env in envs:
        try:
            messages = [openai(message) for message in trace(env)]
        except ValueError as error:
            left_out[str(error).removeprefix(f"{env.task.id}: ").partition(": ")[0]] += 1
            continue
        records.append({"id": env.task.id, "messages": messages, "tools": [t.schema() for t in env.tools]})
    return records, dict(left_out.most_common())


def pairs(envs: list[Env], items: list[dict]) -> tuple[list[dict], dict[str, int]]:
    """Records {"id", "messages", "tools", "chosen", "rejected"} from items of eval.py, several per request.

    items    chosen: passes every constraint and is preferred to the reference (win > 0.5); rejected: any
             other plan. A judge's error is neither, a plan that cannot be read is never chosen
    returns  at most MAX_PAIRS of a request, each plan in one pair; and reason -> requests left out
    """
    by_id: dict[str, list[dict]] = {}
    for item in items:
        by_id.setdefault(item["id"], []).append(item)
    records, left_out = [], Counter()
    for env in envs:
        known = [item for item in by_id.get(env.task.id, []) if item["outcome"] != "error" and item["output"]]
        won = [item["output"] for item in known if item["strict"]["pass"] and (item["win"] or 0) > 0.5]
        lost = [item["output"] for item in known if item["output"] not in won]
        won, lost = list(dict.fromkeys(won)), list(dict.fromkeys(lost))
        if not won or not lost:
            left_out["no plan" if not known else "no plan won" if not won else "every plan won"] += 1
            continue
        prompt = {"messages": [openai(m) for m in env.reset()], "tools": [t.schema() for t in env.tools]}
        for number, (chosen, rejected) in enumerate(zip(won[:MAX_PAIRS], lost, strict=False)):
            record = {"id": f"{env.task.id}#{number}", **prompt, "chosen": chosen, "rejected": rejected}
            records.append(record)
    return records, dict(left_out.most_common())


def openai(message: Message) -> dict:
    """A message in OpenAI's form, arguments as an object."""
    out = {"role": message.role, "content": message.content}
    if message.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
        out["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("traces", "pairs"))
    parser.add_argument("--data", type=Path, help="the benchmark's folder; none: the built-in world")
    parser.add_argument("--split", default="train")
    parser.add_argument("--run", type=Path, help="eval.py's folder, for pairs")
    parser.add_argument("--max_rows", type=int, default=5, help="rows of a tool result, as in train_grpo.py")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    flags = parser.parse_args(arguments)
    if (flags.what == "pairs") != (flags.run is not None):
        parser.error("--run is the folder of eval.py for pairs, and for nothing else")
    data = flags.data or trips.builtin()
    envs = triptailor.load(flags.split, data, max_rows=flags.max_rows, hours=False)
    if flags.what == "traces":
        records, left_out = traces(envs)
    else:
        lines = (flags.run / "items.jsonl").read_text(encoding="utf-8").splitlines()
        records, left_out = pairs(envs, [json.loads(line) for line in lines])
    print(f"{len(records)} {flags.what} of {len(envs)} requests; left out: {left_out or 'none'}")
    if not records:
        raise SystemExit(f"{flags.out} was not written: there is nothing in it")
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    temp = flags.out.with_name(flags.out.name + ".tmp")
    temp.write_text(text, encoding="utf-8")
    temp.replace(flags.out)


if __name__ == "__main__":
    main()
