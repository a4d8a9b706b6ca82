#!/usr/bin/env bash
# Anchored GRPO's claims on a laptop CPU, built-in world and model, three seeds each: untrained, SFT on imputed
# traces, constraint-only, score, anchored, syn-anchored, anchored DPO, Best-of-8.
#   recipes/laptop_anchored.sh                 all of it; what is there already is not made again
#   SEEDS="0" ROWS="sft anchored" recipes/laptop_anchored.sh                       some of it
#   recipes/laptop_anchored.sh table           only the table of what is there
# A row is a folder runs/laptop_anchored/SEED/ROW; every row is measured on the same held-out requests, one plan
# each, sampled at temperature 1. GRPO rows run STEPS steps of train_grpo.py's defaults. A seed took 26 minutes of one
# core (docs/results.md); SEEDS=0, 1 and 2 can run beside each other.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=${RUNS:-runs/laptop_anchored}
SEEDS=${SEEDS:-0 1 2}
ROWS=${ROWS:-untrained sft constraint score anchored syn dpo best_of_8}  # and ungated
STEPS=${STEPS:-30}
REQUESTS=${REQUESTS:-256}

measure() {  # folder, flags
    [ -e "$1/eval/results.json" ] || "$PYTHON" eval.py --bench triptailor --out "$1/eval" --n "$REQUESTS" "${@:2}"
}

grpo() {  # folder, seed, flags
    [ -e "$1/summary.json" ] || "$PYTHON" train_grpo.py --out "$1" --steps "$STEPS" --eval_n 0 --seed "${@:2}"
    measure "$1" --model "$1/model" --seed "$2"
}

row() {  # row, seed
    local seeded=$RUNS/$2 at=$RUNS/$2/$1
    case $1 in
        untrained) measure "$at" --model assets/tiny --seed "$2" ;;
        constraint | score | ungated | anchored) grpo "$at" "$2" --reward "$1" ;;
        sft)
            [ -e "$RUNS/traces.jsonl" ] ||
                "$PYTHON" -m envs.triptailor_traces traces --out "$RUNS/traces.jsonl"
            [ -e "$at/summary.json" ] || "$PYTHON" train_cmdpo.py --stage sft --model assets/tiny --seed "$2" \
                --data "$RUNS/traces.jsonl" --sft_epochs 1 --sft_lr 1e-4 --max_tokens 1200 --eval_n 0 --out "$at"
            measure "$at" --model "$at/model" --seed "$2"
            ;;
        syn)  # the constraint-only model's plans that pass take the place of the references
            row constraint "$2"
            [ -e "$at.references/items.jsonl" ] || "$PYTHON" eval.py --bench triptailor --split train --n 1000 \
                --model "$seeded/constraint/model" --seed "$2" --out "$at.references"
            grpo "$at" "$2" --references "$at.references"
            ;;
        dpo)
            [ -e "$at.plans/items.jsonl" ] || "$PYTHON" eval.py --bench triptailor --split train --n 300 \
                --trials 8 --model assets/tiny --seed "$2" --out "$at.plans"
            [ -e "$at.pairs.jsonl" ] ||
                "$PYTHON" -m envs.triptailor_traces pairs --run "$at.plans" --out "$at.pairs.jsonl"
            [ -e "$at/summary.json" ] || "$PYTHON" train_cmdpo.py --stage pref --loss dpo --model assets/tiny \
                --data "$at.pairs.jsonl" --epochs 3 --seed "$2" --max_tokens 1200 --eval_n 0 --out "$at"
            measure "$at" --model "$at/model" --seed "$2"
            ;;
        best_of_8)
            [ -e "$at.plans/items.jsonl" ] || "$PYTHON" eval.py --bench triptailor --n "$REQUESTS" --trials 8 \
                --model assets/tiny --seed "$2" --out "$at.plans"
            for select in constraints oracle rubric; do
                [ -e "$at.$select/results.json" ] || "$PYTHON" eval.py --bench triptailor --n "$REQUESTS" \
                    --outputs "$at.plans/items.jsonl" --best_of 8 --select "$select" --out "$at.$select"
            done
            ;;
        *) echo "no row $1" >&2 && exit 1 ;;
    esac
}

if [ "${1:-}" != table ]; then
    mkdir -p "$RUNS"
    for seed in $SEEDS; do
        for name in $ROWS; do row "$name" "$seed"; done
    done
fi
"$PYTHON" recipes/laptop_anchored_table.py "$RUNS"
