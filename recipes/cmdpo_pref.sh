#!/usr/bin/env bash
# One row of CM-DPO's tables: the preference stage from the shared warm start (recipes/cmdpo_sft.sh), on four GPUs
# of 80 GB, with the paper's values: beta 0.1, lambda 0.01, gamma 1.5, alpha 0.3, lr 5e-7, batch 32, 1 epoch.
#   PAIRS=pairs.jsonl recipes/cmdpo_pref.sh NAME [--flag value ...]         a flag given here counts
# Writes $RUNS/NAME/model. The reference is scored once for all rows that use the same pairs.
# Not run here: no such GPUs, and no Llama-3-8B-Instruct weights. The paper gives about 2.5 hours.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
name=$1
shift
declare -A value=(
    [beta]=0.1 [margin]=normalised [margin_scale]=0.01 [gamma]=1.5 [alpha]=0.3 [loss]=cmdpo
    [lr]=5e-7 [batch]=32 [epochs]=1 [schedule]=cosine [seed]=0
)
while [ $# -gt 1 ]; do
    value[${1#--}]=$2
    shift 2
done
flags=()
for key in "${!value[@]}"; do flags+=("--$key" "${value[$key]}"); done
torchrun --nproc_per_node 4 train_cmdpo.py --stage pref --model "$RUNS/sft/model" --data "$PAIRS" \
    --max_tokens 8192 --micro_tokens 16384 --checkpointing true --eval_n 0 --save_every 100 \
    "${flags[@]}" --out "$RUNS/$name"
