#!/usr/bin/env bash
# Caddie's critic for MuSiQue, attached passages: Table 1's training, on four GPUs of 80 GB, with the paper's values:
# Qwen3-4B-Instruct-2507 as critic (all weights) and as frozen agent, intervention uniform in steps 1-10, 2,000 steps.
#   MUSIQUE=DIR recipes/critic_musique.sh [NAME] [--flag value ...]          a flag given here counts
#     base                                  N = 1, the paper's cheaper choice
#     n5 --continuations 5                  appendix A
#     gumbel --reward gumbel                counterfactual with shared positional noise
#     nocritic --baseline none --baseline_n 4     no-critique baseline
#     self --states self                    states where the agent asks
#     wiki --retrieval http://HOST:PORT     a retrieval service in place of the passages (python -m envs.musique serve)
# Not in our copy of the paper, chosen here: G = 8, 32 states a step, lr 1e-6, 3 draws, temperature 1, top_k 3.
# Estimate, not measured: 2,000 x 32 x 8 = 0.5 M continuations of about 900 sampled tokens, 0.46e9 tokens; at 6,000
# sampled tokens a second per GPU 21 GPU hours, redraws not counted; critiques and updates about a third of that.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/critic_musique}
name=${1:-base}
[ $# -gt 0 ] && shift
declare -A value=(
    [model]=Qwen/Qwen3-4B-Instruct-2507 [agent]=Qwen/Qwen3-4B-Instruct-2507 [bench]=musique [top_k]=3
    [steps]=2000 [prompts]=32 [group]=8 [continuations]=1 [draws]=3 [low]=1 [high]=10 [lr]=1e-6 [warmup]=20
    [schedule]=constant [clip_low]=0.2 [clip_high]=0.28 [reduction]=token [temperature]=1 [seed]=0
    [turns]=16 [turn_tokens]=1024 [observation_tokens]=1024 [total_tokens]=16384 [critic_tokens]=1024
    [critic_total]=16384 [micro_tokens]=16384 [rows]=128 [checkpointing]=true [eval_n]=0 [save_every]=50
)
while [ $# -gt 1 ]; do
    value[${1#--}]=$2
    shift 2
done
flags=()
for key in "${!value[@]}"; do flags+=("--$key" "${value[$key]}"); done
torchrun --nproc_per_node 4 train_critic.py --data "$MUSIQUE" "${flags[@]}" --out "$RUNS/$name"
