#!/usr/bin/env bash
# Table 4 of CM-DPO, the 2x2 of data and loss: the four trained rows of Table 3, on TravelPlanner alone.
#   PAIRS=pairs.jsonl REWRITES=rewrites.jsonl TRAVELPLANNER=DIR recipes/cmdpo_table4.sh
# Paper, PR: DPO 64.1 (rewrites), 78.3 (edits); CM-DPO 72.6 (rewrites), 89.2 (edits). Token distance 245 and 32.
set -eu
cd "$(dirname "$0")"
export RUNS=${RUNS:-runs/cmdpo}
[ -e "../$RUNS/sft/model" ] || ./cmdpo_sft.sh
for loss in dpo cmdpo; do
    PAIRS=$REWRITES ./cmdpo_pref.sh "rewrite_$loss" --loss "$loss"
    PAIRS=$PAIRS ./cmdpo_pref.sh "edit_$loss" --loss "$loss"
done
cd ..
for name in rewrite_dpo edit_dpo rewrite_cmdpo edit_cmdpo; do
    torchrun --nproc_per_node 4 -- eval.py --bench travelplanner --data "$TRAVELPLANNER" --split validation \
        --options mode=cmdpo --model "$RUNS/$name/model" --temperature 0 --turns 1 --turn_tokens 3000 \
        --total_tokens 32768 --out "$RUNS/eval/$name/travelplanner"
done
