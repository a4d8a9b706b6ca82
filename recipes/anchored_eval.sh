#!/usr/bin/env bash
# One system on TripTailor's 703 test requests: every column of Table 1, both orders of every judge.
#   TRIPTAILOR=DIR JUDGES="URL#gpt-4o URL#claude-4.5-haiku rm:FOLDER" recipes/anchored_eval.sh NAME [--flag ...]
# NAME's adapter is $RUNS/NAME/adapter; `untrained` has none. The calls to judges: 703 x 2 per judge.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
name=$1
shift
adapter=()
[ "$name" = untrained ] || adapter=(--adapter "$RUNS/$name/adapter")
# shellcheck disable=SC2086
torchrun --nproc_per_node 4 -- eval.py --bench triptailor --data "$TRIPTAILOR" --split test \
    --model Qwen/Qwen3-4B-Instruct-2507 "${adapter[@]}" --judge ${JUDGES:-rubric} --cache "$RUNS/judged" \
    --temperature 0.7 --turns 12 --turn_tokens 2048 --observation_tokens 2048 --total_tokens 12288 --rows 24 \
    --options max_rows=10 hours=true --workers 16 --seed 0 "$@" --out "$RUNS/eval/$name"
