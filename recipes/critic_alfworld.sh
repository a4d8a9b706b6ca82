#!/usr/bin/env bash
# Caddie's critic for ALFWorld: Table 1's training, on four GPUs of 80 GB, with the paper's values: the 1,557 games of
# place, heat and light, intervention at steps 2-10 drawn from the task, 12 actions shared by prefix and continuation,
# an episode that outgrows its context has failed, 800 steps.
#   ALFWORLD=DIR recipes/critic_alfworld.sh [NAME] [--flag value ...]
# Not in our copy of the paper, chosen here: G = 8, N = 1, 32 states a step, lr 1e-6, temperature 1.
# Estimate, not measured: 800 x 32 x 8 = 0.2 M continuations of about 500 sampled tokens: 5 GPU hours of sampling.
set -eu
cd "$(dirname "$0")/.."
name=${1:-base}
[ $# -gt 0 ] && shift
exec env MUSIQUE="$ALFWORLD" RUNS="${RUNS:-runs/critic_alfworld}" recipes/critic_musique.sh "$name" \
    --bench alfworld --low 2 --high 10 --step_seed task --overflow fail --steps 800 --train_actions 12 "$@"
