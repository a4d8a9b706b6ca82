#!/usr/bin/env bash
# Caddie's claims on a laptop CPU, built-in world and models, three seeds: no critic, a prompted one, the trained one
# with N = 1 and 5, the appendix's rewards, self-call against windowed, a fixed-step sweep, transfer to a second
# agent of another size and to one that GRPO trained (appendix E), and critics trained for these.
#   recipes/laptop_critic.sh                 all of it; a row that is there already is not run again
#   SEEDS=0 ROWS="n1 n5" recipes/laptop_critic.sh            some of it
#   recipes/laptop_critic.sh table           only the table of what is there
# A row is one run of train_critic.py in runs/laptop_critic/SEED/ROW. All of it took 63 minutes of one core, 14 of them
# for the two other agents (docs/results.md).
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=${RUNS:-runs/laptop_critic}
SEEDS=${SEEDS:-0 1 2}
ROWS=${ROWS:-n1 n5 n5_half gumbel nocritic self review checklist selfcall step1 step2 step3 transfer own
    grpo grpo_transfer grpo_step2 grpo_transfer_step2 grpo_selfcall}
OTHER=$RUNS/agent2
TRAINED=$RUNS/agent_grpo

flags() {  # of a row
    case $1 in
        n1) echo "" ;;
        n5) echo "--continuations 5" ;;
        n5_half) echo "--continuations 5 --steps 15" ;;  # about as long as n1
        gumbel) echo "--reward gumbel" ;;
        nocritic) echo "--baseline none" ;;
        self) echo "--states self --eval_protocol self:3" ;;
        review | checklist) echo "--steps 0 --style $1" ;;
        selfcall) echo "--steps 0 --model $2/n1/model --eval_protocol self:3" ;;
        step*) echo "--steps 0 --model $2/n1/model --eval_protocol step:${1#step}" ;;
        transfer) echo "--steps 0 --model $2/n1/model --agent $OTHER" ;;
        own) echo "--agent $OTHER" ;;
        grpo) echo "--agent $TRAINED/model" ;;
        grpo_transfer) echo "--steps 0 --model $2/n1/model --agent $TRAINED/model" ;;
        grpo_step2) echo "--steps 0 --model $2/grpo/model --agent $TRAINED/model --eval_protocol step:2" ;;
        grpo_transfer_step2) echo "--steps 0 --model $2/n1/model --agent $TRAINED/model --eval_protocol step:2" ;;
        grpo_selfcall) echo "--steps 0 --model $2/grpo/model --agent $TRAINED/model --eval_protocol self:3" ;;
    esac
}

if [ "${1:-}" != table ]; then
    [ -e "$OTHER/model.safetensors" ] ||
        "$PYTHON" assets/make_critic.py --only agent --hidden 96 --agent_out "$OTHER"
    [ -e "$TRAINED/summary.json" ] ||
        "$PYTHON" train_grpo.py --env musique --reward constraint --model assets/agent --turns 8 --turn_tokens 48 \
            --observation_tokens 256 --steps 20 --eval_n 100 --out "$TRAINED"
    for seed in $SEEDS; do
        for row in $ROWS; do
            at=$RUNS/$seed/$row
            # shellcheck disable=SC2046
            [ -e "$at/summary.json" ] ||
                "$PYTHON" train_critic.py --out "$at" --seed "$seed" $(flags "$row" "$RUNS/$seed")
        done
    done
fi
"$PYTHON" recipes/laptop_critic_table.py "$RUNS"
