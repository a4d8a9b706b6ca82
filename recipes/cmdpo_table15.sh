#!/usr/bin/env bash
# Appendix 15 of CM-DPO: the full splits, by one model, greedy.
#   MODEL=runs/cmdpo/edit_cmdpo/model TRAVELPLANNER=DIR NATURALPLAN=DIR PLANBENCH=DIR recipes/cmdpo_table15.sh
# Paper, SynPlan-8B: meetings SR 92.1 (921 of 1,000; LRPlan 94.6), trips 61.4 (of 1,600), calendars 73.2 (of 1,000),
# Blocksworld 66.5 (399 of 600). TravelPlanner's test split has no public labels: its 1,000 plans go to
# submission.jsonl, by the benchmark's own plan form, for the leaderboard.
# Estimate: 4,200 answers of about 300 tokens and 1,000 of 900: half an hour on four A100s. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
run() { torchrun --nproc_per_node 4 -- eval.py --model "$MODEL" --temperature 0 --turns 1 --seed 0 "$@"; }
for task in meeting trip calendar; do
    run --bench naturalplan --data "$NATURALPLAN" --split "$task" --options shots=0 hint=true \
        --turn_tokens 1500 --total_tokens 8192 --out "$RUNS/full/$task"
done
run --bench planbench --data "$PLANBENCH" --split blocksworld_3+blocksworld --options shots=0 \
    --turn_tokens 1000 --total_tokens 8192 --out "$RUNS/full/blocksworld"
run --bench travelplanner --data "$TRAVELPLANNER" --split test --options mode=sole \
    --turn_tokens 3000 --total_tokens 32768 --out "$RUNS/full/travelplanner_test"
