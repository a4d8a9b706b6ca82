"""An instance that can be satisfied, drawn: what both worlds of SynPlan-R share."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from envs.synplan_verify import Instance

FITTING = {False: 0.25, True: 0.13}  # share of careless plans that the budget lets pass; True: compact
DRAWS = 24  # careless plans that place the budget
ATTEMPTS = 200  # instances drawn until one has a feasible plan


def draw_feasible(
    id: str, draw: Callable[[], Instance], cheap_plan: Callable[[Instance], dict | None],
    careless: Callable[[Instance, random.Random], dict], rng: random.Random,
) -> Instance:  # fmt: skip
    """The first instance of `draw` that has a cheap plan; its budget lets that plan and FITTING of the
    careless ones pass."""
    for _ in range(ATTEMPTS):
        instance = draw()
        plan = cheap_plan(instance)
        if plan is not None:
            break
    else:
        raise AssertionError(f"{id}: no feasible plan in {ATTEMPTS} draws")
    costs = sorted(careless(instance, rng)["total_stated_cost"] for _ in range(DRAWS))
    budget = max(1.05 * plan["total_stated_cost"], costs[int(FITTING[instance.compact] * DRAWS)])
    return replace(instance, profile=replace(instance.profile, budget=10 * math.ceil(budget / 10)))
