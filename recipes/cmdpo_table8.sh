#!/usr/bin/env bash
# Table 8 of CM-DPO: severity constants, the medians over violating drafts on 1,000 instances that no split has.
#   recipes/cmdpo_table8.sh                                # the scripted planner's drafts; no model
#   URL=... NANOPLAN_API_KEY=... recipes/cmdpo_table8.sh   # gpt-4o-mini's
# Paper: cost $84, time 38 minutes, pace 1 city; retail $138, 1 feature, 1 edge. `--tau FILE` of synth uses them.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
draft=(); [ -n "${URL:-}" ] && draft=(--draft "$URL#gpt-4o-mini?price_in=0.15&price_out=0.60")
for world in travel retail; do
    python -m nanoplan.synth --do tau --domain $world --size paper --n 1000 \
        --out "$RUNS/tau.$world" ${draft[@]+"${draft[@]}"}
done
