#!/usr/bin/env bash
# One GRPO row of Anchored GRPO's Table 1, on four GPUs of 80 GB, with the paper's values: Qwen3-4B-Instruct with
# LoRA, K = 8, clip 0.2 / 0.25, no KL, 3,145 training requests.
#   TRIPTAILOR=DIR JUDGE=URL#MODEL recipes/anchored_grpo.sh NAME [--flag value ...]       a flag given here counts
#     anchored                        human references (the method)
#     constraint --reward constraint  the gate alone            score --reward score    a judge without reference
#     ungated --reward ungated        the judge alone           syn --references DIR    plans of another model
# JUDGE in the paper: Gemini-2.5-Flash, thinking off. Not in our copy of it, chosen here: rank 16, alpha 32,
# lr 2e-5, 32 requests a step, 2 epochs (196 steps), temperature 1, token mean.
# Estimate, not measured: 2 x 3,145 x 8 episodes of about 1,700 sampled and 7,000 read tokens. At 6,000 sampled
# tokens a second per GPU that is 1 hour of sampling on four; the updates, 0.44e9 tokens and 6 operations per
# parameter and token (LoRA, recomputation), 23 GPU hours at 40 % of an A100's bf16 peak, less what groups of equal
# rewards save. Memory per GPU: 8 GB of weights, 43 GB of cache (24 rows of 12,288 tokens, 147 kB each), and the
# activations of 16,384 packed tokens.
set -eu
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/anchored}
name=$1
shift
declare -A value=(
    [model]=Qwen/Qwen3-4B-Instruct-2507
    [reward]=anchored [group]=8 [clip_low]=0.2 [clip_high]=0.25 [kl_beta]=0 [temperature]=1 [seed]=0
    [lora_r]=16 [lora_alpha]=32 [lr]=2e-5 [prompts]=32 [steps]=196 [reduction]=token
)
while [ $# -gt 1 ]; do
    value[${1#--}]=$2
    shift 2
done
flags=()
for key in "${!value[@]}"; do flags+=("--$key" "${value[$key]}"); done
torchrun --nproc_per_node 4 train_grpo.py --data "$TRIPTAILOR" \
    --judge "${JUDGE:-rubric}" --turns 12 --turn_tokens 2048 --observation_tokens 2048 --total_tokens 12288 \
    --max_rows 10 --hours true --workers 16 --rows 24 --micro_tokens 16384 --checkpointing true \
    --max_grad_norm 1.0 --eval_n 0 --save_every 20 "${flags[@]}" --out "$RUNS/$name"
