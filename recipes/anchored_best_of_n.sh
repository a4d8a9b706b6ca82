#!/usr/bin/env bash
# Best-of-N of the untrained model, N = 1, 2, 4, 8: constraint filter, LLM reranker, reward model, oracle.
#   TRIPTAILOR=DIR JUDGES="URL#MODEL ..." RERANKER=URL#MODEL REWARD_MODEL=FOLDER recipes/anchored_best_of_n.sh
# Paper, valid: filter 55.2, 60.3, 64.6 % at N = 2, 4, 8; reranker 48.2, 47.5, 46.1. Estimate: eight times the
# sampling of one evaluation, 703 x 8 episodes, under 1 GPU hour. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
[ -e "$RUNS/eval/untrained_eight/items.jsonl" ] || torchrun --nproc_per_node 4 -- eval.py --bench triptailor \
    --data "$TRIPTAILOR" --split test --model Qwen/Qwen3-4B-Instruct-2507 --trials 8 --temperature 0.7 \
    --turns 12 --turn_tokens 2048 --observation_tokens 2048 --total_tokens 12288 --rows 24 \
    --options max_rows=10 hours=true --workers 16 --seed 0 --out "$RUNS/eval/untrained_eight"
for num in 1 2 4 8; do
    for select in constraints oracle "$RERANKER" "rm:$REWARD_MODEL"; do
        name=$(printf %s "$select" | tr -c 'A-Za-z0-9\n' _)
        # shellcheck disable=SC2086
        python eval.py --bench triptailor --data "$TRIPTAILOR" --split test --best_of "$num" --select "$select" \
            --outputs "$RUNS/eval/untrained_eight/items.jsonl" --judge ${JUDGES:-rubric} --cache "$RUNS/judged" \
            --out "$RUNS/eval/best_of_$num/$name"
    done
done
