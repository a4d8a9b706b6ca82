#!/usr/bin/env bash
# CM-DPO's claims on a laptop CPU, built-in world and model, three seeds each: the 2x2 of Table 4 (full rewrites
# or minimal edits, DPO or CM-DPO), SFT, every baseline, every source of the margin.
#   recipes/laptop_cmdpo.sh                all of it; a row that is there already is not run again
#   SEEDS="0" ROWS="edit_dpo edit_cmdpo" recipes/laptop_cmdpo.sh                  some of it
#   recipes/laptop_cmdpo.sh table          only the table of what is there
# A row is one run of train_cmdpo.py in runs/laptop_cmdpo/SEED/ROW; the rows of a seed start from one warm start.
# A loss has the better of the learning rates 5e-5 and 2e-4 (MMPO, KTO and DPOP also of beta 0.1 at 5e-5) on tiny/val,
# from seed 0's warm start. All of it took 63 minutes of one core (docs/results.md).
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=${RUNS:-runs/laptop_cmdpo}
SEEDS=${SEEDS:-0 1 2}
BASELINES="ipo ipo_normalised kto simpo dpop mmpo alpha_dpo modpo cdpo_constrained"
MARGINS="random length raw unit reward_model"
ROWS=${ROWS:-rewrite_dpo edit_dpo rewrite_cmdpo edit_cmdpo $BASELINES $MARGINS}

flags() {  # of a row
    case $1 in
        rewrite_*) echo "--rewrite true --loss ${1#rewrite_}" ;;
        edit_*) echo "--loss ${1#edit_}" ;;
        reward_model) echo "--margin reward_model --reward_model $2/edit_dpo/model" ;;
        random | length | raw | unit) echo "--margin $1" ;;
        ipo_normalised | simpo | alpha_dpo) echo "--loss $1 --lr 5e-5" ;;
        kto | mmpo) echo "--loss $1 --lr 5e-5 --beta 0.1" ;;
        *) echo "--loss $1" ;;
    esac
}

train() {  # folder, flags
    [ -e "$1/summary.json" ] || "$PYTHON" train_cmdpo.py --out "$@"
}

if [ "${1:-}" != table ]; then
    for seed in $SEEDS; do
        at=$RUNS/$seed
        train "$at/sft" --stage sft --seed "$seed"
        for row in $ROWS; do
            # shellcheck disable=SC2046
            train "$at/$row" --stage pref --model "$at/sft/model" --seed "$seed" $(flags "$row" "$at")
        done
    done
fi
"$PYTHON" recipes/laptop_cmdpo_table.py "$RUNS"
