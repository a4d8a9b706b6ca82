#!/usr/bin/env bash
# Syn-Anchored GRPO, a row of Table 1: references made by another model through the same tools, of which only those
# that pass every constraint are used. Paper: Gemini-3.0-Pro; 18.3 points fewer LLM wins than human references.
#   TRIPTAILOR=DIR AGENT=URL#MODEL JUDGE=URL#MODEL recipes/anchored_syn.sh
# A run that is killed goes on where it was: paid replies lie in $RUNS/paid. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
[ -e "$RUNS/references/items.jsonl" ] || python eval.py --bench triptailor --split train --data "$TRIPTAILOR" \
    --agent "$AGENT" --cache "$RUNS/paid" --options max_rows=10 hours=true --workers 16 --out "$RUNS/references"
recipes/anchored_grpo.sh syn --references "$RUNS/references"
