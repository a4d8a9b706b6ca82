#!/usr/bin/env bash
# Table 7 of CM-DPO: graph statistics over 15,000 instances of each world, printed beside the paper's. No model.
#   recipes/cmdpo_table7.sh                                                  # minutes on one core; N=500 is enough
# Paper: travel 3.4 hard, 1.8 soft, 41.2 entities, 14.7 grounding edges; retail 3.2, 2.0, 28.4, 11.9, conflicts 0.31.
set -eu
cd "$(dirname "$0")/.."
python -m nanoplan.synth --do graph --size paper --n "${N:-15000}"
