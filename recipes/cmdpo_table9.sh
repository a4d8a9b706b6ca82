#!/usr/bin/env bash
# Table 9 of CM-DPO: the verifier against 300 pairs labelled by hand, with Wilson intervals.
#   recipes/cmdpo_table9.sh draw      # writes $RUNS/pairs.travel/audit.jsonl: fill in label_first and label_second
#   recipes/cmdpo_table9.sh grade
# Paper: agreement 98.7 % (296 of 300), false pass 0.3 %, false fail 1.0 %, decode failures 1.7 % of the stream.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
case $1 in
    draw) do=audit ;;
    grade) do=grade ;;
    *) echo "wanted draw or grade" >&2; exit 2 ;;
esac
python -m nanoplan.synth --do "$do" --audit_n 300 --out "$RUNS/pairs.travel"
