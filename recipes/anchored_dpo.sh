#!/usr/bin/env bash
# Anchored DPO, a row of Table 1: final plans are sampled, compared with the reference, and paired; the searches
# before a plan get no signal. Paper: its plans pass the visit-duration check 74.0 % of the time (GRPO 97.9 %).
#   TRIPTAILOR=DIR JUDGE=URL#MODEL recipes/anchored_dpo.sh
# Not in our copy, chosen here: 8 plans a request, beta 0.1, lr 5e-6, batch 32, 1 epoch. Estimate: sampling as one
# epoch of anchored_grpo.sh; the pairs, 1,000 tokens a side, under 1 GPU hour. Judge: 3,145 x 8 x 2 comparisons at
# most. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
[ -e "$RUNS/eight/items.jsonl" ] || torchrun --nproc_per_node 4 -- eval.py --bench triptailor --split train \
    --data "$TRIPTAILOR" --model Qwen/Qwen3-4B-Instruct-2507 --trials 8 --temperature 1 \
    --judge "${JUDGE:-rubric}" --cache "$RUNS/judged" --turns 12 --turn_tokens 2048 --observation_tokens 2048 \
    --total_tokens 12288 --rows 24 --options max_rows=10 hours=true --workers 16 --seed 0 --out "$RUNS/eight"
python -m envs.triptailor_traces pairs --data "$TRIPTAILOR" --run "$RUNS/eight" --out "$RUNS/pairs.jsonl"
torchrun --nproc_per_node 4 train_cmdpo.py --stage pref --loss dpo --beta 0.1 --lr 5e-6 --batch 32 --epochs 1 \
    --model Qwen/Qwen3-4B-Instruct-2507 --lora_r 16 --data "$RUNS/pairs.jsonl" --max_tokens 12288 \
    --micro_tokens 24576 --checkpointing true --eval_n 0 --save_every 50 --seed 0 --out "$RUNS/dpo"
