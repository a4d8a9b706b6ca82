#!/usr/bin/env bash
# L3-SFT, the warm start of every row of CM-DPO's tables, on four GPUs of 80 GB: lr 2e-5, batch 32, 3 epochs.
#   PAIRS=pairs.jsonl recipes/cmdpo_sft.sh            (15,000 records of nanoplan.synth, see nanoplan/synth.py)
# Not run here: no such GPUs, and no Llama-3-8B-Instruct weights. The paper gives about 4 hours.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
torchrun --nproc_per_node 4 train_cmdpo.py --stage sft --model meta-llama/Meta-Llama-3-8B-Instruct \
    --data "$PAIRS" --rationale always --sft_lr 2e-5 --sft_batch 32 --sft_epochs 3 --schedule cosine \
    --max_tokens 8192 --micro_tokens 16384 --checkpointing true --eval_n 0 --save_every 200 --seed 0 \
    --out "$RUNS/sft"
