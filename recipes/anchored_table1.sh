#!/usr/bin/env bash
# Table 1 of Anchored GRPO, row by row: what trains it, then recipes/anchored_eval.sh. Each is a command of its own.
#   TRIPTAILOR=DIR JUDGE=URL#MODEL JUDGES="URL#MODEL ..." AGENT=URL#MODEL recipes/anchored_table1.sh [ROW ...]
# Rows workflow and direct ask AGENT, the paper's best pipeline with GPT-4o-mini and Gemini-3.0-Pro.
# Paper (703 requests): untrained valid 46.7 %, LLM win 45.4; SFT Final Surpass 43.7, LLM win 39.5; constraint-only
# LLM win 55.5; Score 38.5; Anchored Final Surpass 80.1, LLM win 61.6, rationality 94.5.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
rows=${*:-untrained sft constraint score ungated anchored syn dpo workflow}
for row in $rows; do
    case $row in
        untrained) ;;
        sft | dpo | syn) "recipes/anchored_$row.sh" ;;
        anchored) recipes/anchored_grpo.sh anchored ;;
        constraint | score | ungated) recipes/anchored_grpo.sh "$row" --reward "$row" ;;
        workflow | direct)
            # shellcheck disable=SC2086
            python eval.py --bench triptailor --data "$TRIPTAILOR" --split test --agent "$AGENT" \
                --method "$row" --judge ${JUDGES:-rubric} --cache "$RUNS/replies" --seed 0 --out "$RUNS/eval/$row"
            continue
            ;;
        *) echo "no row $row: untrained sft constraint score ungated anchored syn dpo workflow direct" >&2 && exit 1 ;;
    esac
    recipes/anchored_eval.sh "$row"
done
