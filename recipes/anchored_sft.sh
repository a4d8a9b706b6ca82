#!/usr/bin/env bash
# SFT on imputed traces, the imitation row of Table 1: searches that lead to the human plan by construction, then
# that plan. Paper: Final Surpass 43.7 %, LLM win 39.5 %.
#   TRIPTAILOR=DIR recipes/anchored_sft.sh
# Not in our copy, chosen here: rank 16, lr 1e-4, batch 32, 2 epochs. Estimate: 2 x 3,145 traces of 8,000 tokens,
# 50e6 tokens, 3 GPU hours of an A100 at 40 % of its bf16 peak. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
[ -e "$RUNS/traces.jsonl" ] ||
    python -m envs.triptailor_traces traces --data "$TRIPTAILOR" --max_rows 10 --out "$RUNS/traces.jsonl"
torchrun --nproc_per_node 4 train_cmdpo.py --stage sft --model Qwen/Qwen3-4B-Instruct-2507 --lora_r 16 \
    --data "$RUNS/traces.jsonl" --sft_lr 1e-4 --sft_batch 32 --sft_epochs 2 --max_tokens 12288 \
    --micro_tokens 16384 --checkpointing true --eval_n 0 --save_every 50 --seed 0 --out "$RUNS/sft"
