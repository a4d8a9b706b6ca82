#!/usr/bin/env bash
# Appendix 19 of CM-DPO: Mystery Blocksworld, all 600 problems, greedy, zero-shot.
#   MODELS="edit_dpo simpo edit_cmdpo" PLANBENCH=DIR recipes/cmdpo_table19.sh
# MODELS are names of runs whose model is $RUNS/NAME/model. Paper: SynPlan-8B 42.7, plain DPO 24.3, SimPO 39.8.
# Estimate: 600 answers of about 200 tokens a model, minutes on four A100s. Not run here.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/cmdpo}
for name in ${MODELS:-edit_dpo simpo edit_cmdpo}; do
    torchrun --nproc_per_node 4 -- eval.py --model "$RUNS/$name/model" --temperature 0 --turns 1 --seed 0 \
        --bench planbench --data "$PLANBENCH" --split mystery_blocksworld_3+mystery_blocksworld --options shots=0 \
        --turn_tokens 1000 --total_tokens 8192 --out "$RUNS/mystery/$name"
done
