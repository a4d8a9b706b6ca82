#!/usr/bin/env bash
# Table 11 of CM-DPO: where the margin comes from. All rows share pairs and warm start.
#   PAIRS=pairs.jsonl HELD_OUT=labelled.jsonl recipes/cmdpo_table11.sh
# HELD_OUT are about 1,000 pairs beside PAIRS: the reward model is a policy trained on them by plain DPO.
# Paper, PR: random 65.6, length 67.8, reward model 73.3, raw severity 84.4, normalised severity 89.4.
set -eu
cd "$(dirname "$0")"
export RUNS=${RUNS:-runs/cmdpo}
for margin in random length raw unit normalised; do
    ./cmdpo_pref.sh "margin_$margin" --margin "$margin"
done
PAIRS=$HELD_OUT ./cmdpo_pref.sh reward_model --loss dpo
./cmdpo_pref.sh margin_reward_model --margin reward_model --reward_model "$RUNS/reward_model/model"
