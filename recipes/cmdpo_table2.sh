#!/usr/bin/env bash
# Table 2 of CM-DPO: the 15,000 pairs, 14,200 raw generations of travel and 11,800 of retail.
#   URL=https://api.openai.com/v1 NANOPLAN_API_KEY=... recipes/cmdpo_table2.sh models           # the paper's models
#   URL=... recipes/cmdpo_table2.sh models rewrite             # the ablation Full Rewrite, beside the other pairs
#   recipes/cmdpo_table2.sh scripts                            # scripted drafts, exact teacher: no model, no bill
# Student gpt-4o-mini, teacher o3-mini (the paper), query writer gpt-4o-mini (the paper names none). Pairs of both
# worlds end in $RUNS/pairs.jsonl (rewrites: pairs_rewrite.jsonl). Start it again after a kill: it goes on, and no
# reply is bought twice.
# Paper: acceptance 59.2 and 55.9 %, token distance 34 and 29, severity $87 and $142, $320 in all.
# Estimate at $0.15/0.60 and $1.10/4.40 per million tokens: a travel prompt has about 4,000 tokens, so $100 to $300
# for both worlds, reasoning tokens of the teacher included. Not run here. Scripts: hours on two cores.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
reasoning='{"temperature":null,"max_tokens":null,"max_completion_tokens":16384}'  # o3-mini's form of a question
case $1 in
    models) makers=(
        --query "$URL#gpt-4o-mini?price_in=0.15&price_out=0.60&concurrency=32"
        --draft "$URL#gpt-4o-mini?price_in=0.15&price_out=0.60&concurrency=32"
        --teacher "$URL#o3-mini?price_in=1.10&price_out=4.40&concurrency=32&extra=$reasoning"
        --workers 32) ;;
    scripts) makers=(--workers 2) ;;
    *) echo "wanted models or scripts" >&2; exit 2 ;;
esac
name=pairs
[ "${2:-}" = rewrite ] && makers+=(--rewrite true) && name=pairs_rewrite
mkdir -p "$RUNS"
python -m nanoplan.synth --domain travel --size paper --n 14200 --temperature 1 --seed 0 \
    --out "$RUNS/$name.travel" "${makers[@]}"
python -m nanoplan.synth --domain retail --size paper --n 11800 --temperature 1 --seed 0 \
    --out "$RUNS/$name.retail" "${makers[@]}"
for world in travel retail; do
    [ ! -f "$RUNS/$name.$world/pairs.jsonl" ] || cat "$RUNS/$name.$world/pairs.jsonl"
done > "$RUNS/$name.jsonl"
