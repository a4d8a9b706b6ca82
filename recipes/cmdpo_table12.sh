#!/usr/bin/env bash
# Table 12 of CM-DPO: sensitivity to lambda and gamma.   PAIRS=pairs.jsonl recipes/cmdpo_table12.sh
# Paper, PR for gamma 0.5, 1.5, 3.0: lambda 0.005: 81.7 84.4 83.3; 0.01: 84.4 89.4 87.8; 0.02: 83.3 87.2 82.2.
set -eu
cd "$(dirname "$0")"
for scale in 0.005 0.01 0.02; do
    for gamma in 0.5 1.5 3.0; do
        ./cmdpo_pref.sh "lambda_${scale}_gamma_$gamma" --margin_scale "$scale" --gamma "$gamma"
    done
done
