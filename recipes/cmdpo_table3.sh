#!/usr/bin/env bash
# Tables 3 and 5 of CM-DPO: its trained rows on TravelPlanner, NaturalPlan and PlanBench.
#   PAIRS=pairs.jsonl REWRITES=rewrites.jsonl TRAVELPLANNER=... NATURALPLAN=... PLANBENCH=... recipes/cmdpo_table3.sh
# PAIRS are minimal edits (RT-MED), REWRITES full rewrites of the same drafts. Paper, PR on TravelPlanner:
# SFT 35.6, rewrites + DPO 64.1, edits + DPO 78.3, rewrites + CM-DPO 72.6, edits + CM-DPO 89.2.
set -eu
cd "$(dirname "$0")"
export RUNS=${RUNS:-runs/cmdpo}
[ -e "../$RUNS/sft/model" ] || ./cmdpo_sft.sh
PAIRS=$REWRITES ./cmdpo_pref.sh rewrite_dpo --loss dpo
PAIRS=$REWRITES ./cmdpo_pref.sh rewrite_cmdpo --loss cmdpo
./cmdpo_pref.sh edit_dpo --loss dpo
./cmdpo_pref.sh edit_cmdpo --loss cmdpo
for name in sft rewrite_dpo edit_dpo rewrite_cmdpo edit_cmdpo; do
    ./cmdpo_eval.sh "$RUNS/$name/model" "$RUNS/eval/$name"
done
