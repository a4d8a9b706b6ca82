#!/usr/bin/env bash
# Caddie's evaluations: 200 questions (104 / 63 / 33 of two, three and four hops), eight trials each, up to three
# critiques. Every row prints success with SEM over tasks, pass^8, critiques per episode (H.1) and advice by kind
# (H.2), of table1, table2 and table6 also without a critic (items_*.jsonl hold the episodes). In table7
# --advice_judge http://HOST/v1#MODEL labels the advice beside the rules, as the paper's judge did for H.2.
#   MUSIQUE=DIR CRITIC=DIR recipes/critic_eval.sh table1|table2|table6|table7 [--flag value ...]
#     table1   the trained critic and two prompted ones (--style review, checklist), self-call
#     table2   the same critic beside other agents: AGENTS="FOLDER FOLDER"; behind a server: AGENT_URL=URL AGENTS=NAME
#     table6   self-call, windowed, probabilistic
#     table7   fixed steps 1 to 8, by eval.py
# Estimate, not measured: 1,600 episodes without and 1,600 with a critic a row, about 2,000 sampled tokens each:
# 0.3 GPU hours a row for a 4B agent.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=${RUNS:-runs/critic_eval}
BASE=${BASE:-Qwen/Qwen3-4B-Instruct-2507}
table=$1
shift

row() {  # name, critic, agent, protocol, style, more flags
    "$PYTHON" train_critic.py --steps 0 --bench "${BENCH:-musique}" --data "$MUSIQUE" --split "${SPLIT:-caddie}" \
        --out "$RUNS/$table/$1" --model "$2" --agent "$3" --eval_protocol "$4" --style "$5" --eval_n "${N:-200}" \
        --eval_trials 8 --top_k 3 --turns 19 --high 10 --turn_tokens 1024 --observation_tokens 1024 \
        --total_tokens 16384 --critic_tokens 1024 --critic_total 16384 --rows 128 "${@:6}"
}

case $table in
    table1)
        row trained "$CRITIC" "$BASE" self:3 advise "$@"
        row review "$BASE" "$BASE" self:3 review "$@"
        row checklist "$BASE" "$BASE" self:3 checklist "$@"
        ;;
    table2)
        for agent in $AGENTS; do
            row "$(basename "$agent")" "$CRITIC" "$agent" self:3 advise ${AGENT_URL:+--agent_url "$AGENT_URL"} "$@"
        done
        ;;
    table6)
        for protocol in self:1 self:3 window:1-10 prob:0.3:3; do
            row "$protocol" "$CRITIC" "$BASE" "$protocol" advise "$@"
        done
        ;;
    table7)
        for step in 1 2 3 4 5 6 7 8; do
            "$PYTHON" eval.py --bench "${BENCH:-musique}" --data "$MUSIQUE" --split "${SPLIT:-caddie}" \
                --out "$RUNS/table7/step$step" --model "$BASE" --critic "$CRITIC" --protocol "step:$step" \
                --n "${N:-200}" --trials 8 --options top_k=3 --turns 19 --turn_tokens 1024 \
                --observation_tokens 1024 --total_tokens 16384 --rows 128 "$@"
        done
        "$PYTHON" eval.py --sweep "$RUNS"/table7/step{1,2,3,4,5,6,7,8}
        ;;
    *) echo "table1, table2, table6 or table7, not $table" >&2 && exit 2 ;;
esac
