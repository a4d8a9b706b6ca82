#!/usr/bin/env bash
# PR, DR, S and SR of one model on the paper's benchmarks, greedy: TravelPlanner validation (180 requests),
# NaturalPlan meeting planning (200), PlanBench Blocksworld (150).
#   TRAVELPLANNER=DIR NATURALPLAN=DIR PLANBENCH=DIR recipes/cmdpo_eval.sh MODEL OUT
set -eu
cd "$(dirname "$0")/.."
model=$1 out=$2
run() { torchrun --nproc_per_node 4 -- eval.py --model "$model" --temperature 0 --turns 1 "$@"; }
run --bench travelplanner --data "$TRAVELPLANNER" --split validation --options mode=cmdpo \
    --turn_tokens 3000 --total_tokens 32768 --out "$out/travelplanner"
run --bench naturalplan --data "$NATURALPLAN" --split meeting_planning --n 200 \
    --turn_tokens 1500 --total_tokens 16384 --out "$out/naturalplan"
run --bench planbench --data "$PLANBENCH" --split blocksworld --n 150 \
    --turn_tokens 1000 --total_tokens 8192 --out "$out/planbench"
