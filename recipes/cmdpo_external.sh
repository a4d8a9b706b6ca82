#!/usr/bin/env bash
# Tables 3 and 5 of CM-DPO, external rows: models as they are, and a multi-agent refine loop, by any endpoint.
#   AGENT='https://api.openai.com/v1#gpt-4o?price_in=2.5&price_out=10' \
#   TRAVELPLANNER=DIR NATURALPLAN=DIR PLANBENCH=DIR recipes/cmdpo_external.sh zero_shot     # or: mas
# zero_shot: one question without tools; for Llama-3-8B serve the model and name its server. mas: a drafter and a
# reviewer (REVIEWER, else the same model) that checks each draft against the listed constraints, 3 revisions at most.
# Paper (T = 0): Llama-3-8B PR 1.3, DR 35.4, SR 18.5, 2.1 s, Blocksworld 12.8; GPT-4o PR 39.8, DR 88.3, SR 68.4,
# 5.4 s, Blocksworld 58.2; LRPlan with GPT-4o PR 89.4, DR 98.1, SR 95.1, 28.5 s.
# Estimate at those prices: zero_shot 180 x 4,400 + 200 x 650 + 150 x 450 prompt tokens and about 800, 400 and 150 of
# reply each: $5; mas, at most eight questions a plan: $30. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
case $1 in
    zero_shot) how=(--method direct) ;;
    mas) how=(--method refine --rounds 3 ${REVIEWER:+--reviewer "$REVIEWER"}) ;;
    *) echo "wanted zero_shot or mas" >&2; exit 2 ;;
esac
run() { python eval.py --agent "$AGENT" "${how[@]}" --temperature 0 --cache "$RUNS/replies" --seed 0 "$@"; }
# Table 3: PR is valid_rate, DR is decode_rate, by CM-DPO's own schema; latency is "seconds per plan"
run --bench travelplanner --data "$TRAVELPLANNER" --split validation --options mode=cmdpo \
    --turn_tokens 4096 --total_tokens 65536 --out "$RUNS/external/$1/travelplanner"
# Table 3: SR, the official score, of 200 meetings of every size
run --bench naturalplan --data "$NATURALPLAN" --split meeting --n 200 --options shots=0 \
    --turn_tokens 2048 --total_tokens 32768 --out "$RUNS/external/$1/meeting"
# Table 5: 150 Blocksworld problems of 3 to 5 blocks
run --bench planbench --data "$PLANBENCH" --split blocksworld_3+blocksworld --n 150 \
    --options shots=0 blocks=3,4,5 \
    --turn_tokens 1024 --total_tokens 16384 --out "$RUNS/external/$1/blocksworld"
