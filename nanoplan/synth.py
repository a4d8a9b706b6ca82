"""SynPlan-R: verified preference pairs for CM-DPO, made of a flawed plan and its smallest correction.

A pair is one line of pairs.jsonl, an object with everything that is needed to check it again:

    id                "travel/tiny/train/17": domain, size, split, number of the instance
    profile           the constraint profile: hard constraints, preferences, weights
    knowledge         the instance's database: entities and, for travel, minutes between cities
    messages          the prompt of both members, [{"role", "content"}, ...]: system text, user's query
    chosen, rejected  completions, each one "<plan>{...}</plan>"; no reasoning (stage 2 trains on plans only)
    sft               "<rationale>...</rationale>\\n<plan>...</plan>": completion of the warm start; its plan is
                      `chosen`
    verdict_chosen, verdict_rejected
                      {constraint: {"passed", "raw", "unit", "tau", "normalised", "weight"}}
    soft_chosen, soft_rejected      preference scores in [0, 1]
    severity          of `rejected`: {"normalised": sum of weight x normalised, at most 1, "raw": sum of
                      weight x raw in mixed units, "unit": 1.0}
    edit              {"teacher", "changed": items that differ, "proved": whether no smaller edit exists,
                      "tokens": token distance of the two plans, "seconds"}
    query, draft      who wrote the user's query and the rejected plan
"""
