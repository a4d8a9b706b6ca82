#!/usr/bin/env bash
# The transfer question: a trained adapter on benchmarks it never saw, beside the untrained model.
#   TRAVELPLANNER=DIR NATURALPLAN=DIR recipes/anchored_transfer.sh anchored
# Paper: TravelPlanner final pass 1.1 -> 5.6 %; NaturalPlan within 1.5 points. TaskBench, UltraTool and tau2-bench are
# not built. Estimate: 180 x 10,000 and 1,500 x 1,500 tokens a system, minutes on four A100s. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
run() {  # system, name of the result, flags
    local adapter=() system=$1 result=$2
    shift 2
    [ "$system" = untrained ] || adapter=(--adapter "$RUNS/$system/adapter")
    torchrun --nproc_per_node 4 -- eval.py --model Qwen/Qwen3-4B-Instruct-2507 "${adapter[@]}" --seed 0 \
        --temperature 0.7 --rows 24 "$@" --out "$RUNS/transfer/$system/$result"
}
for system in untrained "$@"; do
    run "$system" travelplanner --bench travelplanner --data "$TRAVELPLANNER" --split validation --workers 16 \
        --turns 20 --turn_tokens 2048 --observation_tokens 3000 --total_tokens 16384
    for task in trip meeting calendar; do
        run "$system" "$task" --bench naturalplan --data "$NATURALPLAN" --split "$task" --n 500 \
            --turns 1 --turn_tokens 2048 --observation_tokens 1 --total_tokens 16384
    done
done
