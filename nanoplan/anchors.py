"""The anchors: which plan a request's plans are compared with, and which requests have one."""

from pathlib import Path

from envs.base import Env, Task
from nanoplan.evaluate import no_reference, read_items


def comparable(envs: list[Env]) -> tuple[list[Env], list[str]]:
    """Those requests that have a reference plan, and why each of the others has none."""
    reasons = [no_reference(env) for env in envs]
    kept = [env for env, reason in zip(envs, reasons, strict=True) if not reason]
    return kept, [reason for reason in reasons if reason]


def synthetic(envs: list[Env], folder: str | Path) -> list[Env]:
    """Twins whose reference is the plan that another model made: Syn-Anchored GRPO.

    envs    TripTailor's
    folder  of eval.py's run of that model over the same requests; only plans that pass every constraint count
    returns the requests that have such a plan, in their order
    raises  ValueError if none has
    """
    plans = {item["id"]: item["output"] for item in read_items(folder) if item["strict"]["pass"]}
    twins = [env.fork() for env in envs if env.task.id in plans]
    if not twins:
        raise ValueError(
            f"references={folder}: no plan in it passes every constraint of any of the {len(envs)} requests; "
            "was it made by eval.py over the same split?"
        )
    for twin in twins:
        twin.task = Task(twin.task.id, twin.task.data | {"final_plan_json": plans[twin.task.id]})
    return twins
