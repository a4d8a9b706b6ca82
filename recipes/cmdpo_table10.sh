#!/usr/bin/env bash
# Table 10 of CM-DPO: 8-grams that plans and queries of the pairs share with the benchmarks' texts.
#   TRAVELPLANNER=DIR NATURALPLAN=DIR PLANBENCH=DIR recipes/cmdpo_table10.sh
# Paper: at most 0.0 % with each.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
for world in travel retail; do
    python -m nanoplan.synth --do contamination --out "$RUNS/pairs.$world" \
        --against "$TRAVELPLANNER" "$NATURALPLAN" "$PLANBENCH"
done
