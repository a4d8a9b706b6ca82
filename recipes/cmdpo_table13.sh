#!/usr/bin/env bash
# Table 13 of CM-DPO: weight of the soft objective.   PAIRS=pairs.jsonl recipes/cmdpo_table13.sh
# Paper, PR and S: alpha 0: 89.4, 0.51; 0.3: 89.4, 0.64; 0.6: 88.3, 0.66; 1: 86.7, 0.68.
set -eu
cd "$(dirname "$0")"
for alpha in 0.0 0.3 0.6 1.0; do
    ./cmdpo_pref.sh "alpha_$alpha" --alpha "$alpha"
done
