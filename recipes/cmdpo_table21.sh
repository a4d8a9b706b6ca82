#!/usr/bin/env bash
# Appendix 21 of CM-DPO: how many pairs are worth their cost.   PAIRS=pairs25000.jsonl recipes/cmdpo_table21.sh
# Paper, gain of PR over SFT and API cost: 5,000 pairs 18.4 points, $110; 10,000: 24.3, $215; 15,000: 25.0, $320;
# 25,000: 25.6, $535. What a synthesis cost is in the summary that nanoplan.synth leaves beside its pairs.
set -eu
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/cmdpo}
for pairs in 5000 10000 15000 25000; do
    mkdir -p "$RUNS"
    head -n "$pairs" "$PAIRS" > "$RUNS/first_$pairs.jsonl"
    PAIRS="$RUNS/first_$pairs.jsonl" RUNS="$RUNS/pairs_$pairs" recipes/cmdpo_sft.sh
    PAIRS="$RUNS/first_$pairs.jsonl" RUNS="$RUNS/pairs_$pairs" recipes/cmdpo_pref.sh edit_cmdpo
done
