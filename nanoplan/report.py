"""What results.json says, for people: Markdown tables."""

from nanoplan import log
from nanoplan.evaluate import PER_PLAN
from nanoplan.judge_stats import judges_table


def table(results: dict) -> str:
    """The whole report of one run."""
    system = results["outputs"] or results["agent"] or results["model"]
    system += f" + {results['adapter']}" if results["adapter"] else ""
    system += f", method {results['method']}" if results["agent"] else ""
    options = f" ({', '.join(results['options'])})" if results["options"] else ""
    data = results["data"] or "the built-in world"
    lines = [
        f"{results['bench']}, {results['split']} split of {data}{options}: {system}",
        f"judge: {results['judge'] or 'none'}"
        + "; official scoring is not built" * (not results["official"]),
    ]
    tables = (rates(results), success(results), metrics(results["metrics"]), strata(results))
    tables += (judges_table(results["judges"]) if results["judges"] else "",)
    lines += ["\n\n".join(filter(None, tables)), *costs(results)]
    counts = results["counts"]
    stops = ", ".join(f"{name} {count}" for name, count in counts["stops"].items())
    trials = f" x {counts['trials']} trials" if counts["trials"] > 1 else ""
    lines.append(f"{counts['requests']} requests{trials}; ended by: {stops}")
    lines.append(f"answers that hold no plan: {counts['parse_failures']}")
    lines.append(
        f"failures that are not the model's: env {counts['env_errors']}, judge {counts['judge_errors']}"
    )
    return "\n".join(lines)


def rates(results: dict) -> str:
    """Every rate and count with its interval."""
    rows = []
    for part in ("strict", "official", "per_plan"):
        for name, row in (results[part] or {}).items():
            name = label(f"official {name}" if part == "official" else name)
            rows.append([name, *interval(row, share=part != "per_plan"), row["n"]])
    return log.table(["", "mean", "95 % interval", "plans"], rows)


def interval(row: dict, *, share: bool) -> tuple[str, str]:
    """A row's value, and its interval."""
    value, low, high = (number(row[key], share=share) for key in ("value", "low", "high"))
    return value, f"{low} to {high}" if row["n"] else "–"


def success(results: dict) -> str:
    """pass@1 with its standard error over tasks, both intervals, and pass^k for k trials."""
    rows = []
    for name, row in results["success"].items():
        if row is None:
            continue
        wilson, bootstrap = (
            f"{number(ends[0], share=True)} to {number(ends[1], share=True)}" if ends else "–"
            for ends in (row["wilson"], row["bootstrap"])
        )
        mean, sem = number(row["mean"], share=True), number(row["sem"], share=True)
        powers = ", ".join(number(value, share=True) for value in row["pass^"][1:]) or "–"
        rows.append([name, mean, sem, wilson, bootstrap, powers])
    last = max((row["trials"] for row in results["success"].values() if row), default=1)
    powers = "pass^k" if last < 2 else "pass^2" if last == 2 else f"pass^2 to ^{last}"
    return log.table(["success", "pass@1", "SEM", "Wilson", "bootstrap", powers], rows) if rows else ""


def strata(results: dict) -> str:
    """Strict and official pass of each stratum, seconds per request."""
    rows = []
    for name, row in results["strata"].items():
        both = [text for part in ("strict", "official") for text in interval(row[part], share=True)]
        rows.append([name, row["requests"], *both, number(row["seconds"], share=False)])
    head = ["stratum", "requests", "strict", "95 % interval", "official", "95 % interval", "seconds"]
    return log.table(head, rows) if rows else ""


COUNTS = ("plans", "effort", "route", "calls_by_tool")  # of a benchmark's own numbers: no shares


def metrics(found: dict) -> str:
    """The benchmark's own numbers: one row a number, one column a part."""
    columns = {part: dict(_leaves(numbers)) for part, numbers in found.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = []
    for name in names:
        share = not (name.startswith(COUNTS) or name.endswith(".plans"))
        rows.append([name, *(number(column.get(name), share=share) for column in columns.values())])
    return log.table(["benchmark's own", *columns], rows) if rows else ""


def _leaves(numbers: dict, prefix: str = "") -> list[tuple[str, float]]:
    """Every number below, with its path as "a.b". Of a list of numbers the first, which is the reported one;
    a list of rows is told apart by their first column."""
    found = []
    for name, value in numbers.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            by = next(iter(value[0]))
            value = {str(row[by]): {key: row[key] for key in row if key != by} for row in value}
        elif isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            found.append((prefix + name, value))
    return found


def costs(results: dict) -> list[str]:
    """A line on latency and one on queries, tokens and money, where they are known."""
    lines, row = [], results["latency"]
    if row["n"]:
        parts = (f"{name} {row[name]:.2f}" for name in ("mean", "p50", "p95"))
        cached = f"; {row['cached']} with cached replies left out" if row["cached"] else ""
        lines.append(f"seconds per plan: {', '.join(parts)} ({row['n']} plans{cached})")
    elif row["cached"]:
        lines.append(f"seconds per plan: not known, all {row['cached']} plans had cached replies")
    if (cost := results["costs"]) is not None:
        per = ", ".join(
            f"{name.replace('_', ' ')} {cost[name]['value']:.1f}" for name in cost if name != "usd"
        )
        lines.append(f"per plan: {per}; all plans: ${cost['usd']:.4f} at the given prices")
    return lines


def comparison(differences: dict, *, names: tuple[str, str]) -> str:
    """Paired differences, as nanoplan.summary.compare gives them."""
    rows = []
    for name, row in differences.items():
        share = name not in PER_PLAN
        means = [number(row[key], share=share) for key in ("a", "b")]
        diff, low, high = (number(row[key], share=share, sign="+") for key in ("diff", "low", "high"))
        rows.append([label(name), *means, diff, f"{low} to {high}" if row["n"] else "–", row["n"]])
    head = f"A = {names[0]}, B = {names[1]}; paired by id, bootstrap over requests"
    return head + "\n" + log.table(["", "A", "B", "B - A", "95 % interval", "pairs"], rows)


def transitions(found: dict) -> str:
    """What became of A's valid and invalid plans in B, and the benchmark's own rates with p-values, as a
    benchmark's `compare_runs` gives them."""
    rows = [
        [name, *(number(found[name][part], share=True) for part in ("official", "strict"))]
        for name in ("retained", "converted")
    ]
    rows.append(["requests gained", *("–" if n is None else f"{n:+d}" for n in found["net"].values())])
    kept = log.table(["valid plans", "official", "strict"], rows)
    rows = []
    for name, row in found["rates"].items():
        a, b = (number(row[key], share=True) for key in ("a", "b"))
        diff, low, high = (number(row[key], share=True, sign="+") for key in ("diff", "low", "high"))
        rows.append([name, a, b, diff, f"{low} to {high}", f"{row['p']:.3f}", row["pairs"]])
    head = ["benchmark's own", "A", "B", "B - A", "95 % interval", "p", "pairs"]
    return f"\n{kept}\n\n{log.table(head, rows)}"


def label(name: str) -> str:
    """A row's name: counts are per plan."""
    return f"{name} per plan" if name in PER_PLAN else name


def number(value: float | None, *, share: bool, sign: str = "") -> str:
    """A share in percent, a count with two decimals, a dash for what is not known."""
    return "–" if value is None else f"{100 * value:{sign}.1f} %" if share else f"{value:{sign}.2f}"
