#!/usr/bin/env bash
# Caddie's appendix E (Table 5): a critic for an agent that was itself trained, N = 1, 2,000 steps.
#   MUSIQUE=DIR ADAPTER=DIR recipes/critic_grpo.sh [--flag value ...]
# ADAPTER is the agent's adapter in PEFT's format, as train_grpo.py --env musique --reward constraint --lora_r 16
# --steps 1120 writes it (the paper: 1,120 GRPO steps on MuSiQue). A fully fine-tuned agent is given as
# --agent FOLDER instead. Cost: as critic_musique.sh.
set -eu
cd "$(dirname "$0")/.."
exec recipes/critic_musique.sh grpo ${ADAPTER:+--agent_adapter "$ADAPTER"} "$@"
