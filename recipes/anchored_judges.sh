#!/usr/bin/env bash
# The evaluator-robustness question: the plans of a stored run under judges of other families, another rubric and a
# reward model, none of them used in training. Nothing is planned again.
#   TRIPTAILOR=DIR JUDGES="URL#gpt-4o URL#gpt-4o?rubric=overall URL#claude-4.5-haiku rm:FOLDER" \
#       recipes/anchored_judges.sh anchored untrained
# Cost: 703 x 2 comparisons per judge and system, about 2,500 tokens each. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
for name in "$@"; do
    # shellcheck disable=SC2086
    python eval.py --bench triptailor --data "$TRIPTAILOR" --split test --outputs "$RUNS/eval/$name/items.jsonl" \
        --judge $JUDGES --cache "$RUNS/judged" --out "$RUNS/judges/$name"
done
[ $# -ne 2 ] || python eval.py --compare "$RUNS/judges/$2" "$RUNS/judges/$1"
