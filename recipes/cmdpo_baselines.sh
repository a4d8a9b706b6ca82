#!/usr/bin/env bash
# The training-time baselines of CM-DPO's appendix 14 at the values it names, same pairs and warm start.
#   PAIRS=pairs.jsonl recipes/cmdpo_baselines.sh
# What the paper leaves open is our choice (docs/deviations.md): IPO from sums and from means, MMPO's gap (the
# severity, not a learned classifier), MODPO's weight (one of its five-point sweep), alpha-DPO's beta and gamma.
set -eu
cd "$(dirname "$0")"
./cmdpo_pref.sh dpo --loss dpo --beta 0.1
./cmdpo_pref.sh ipo --loss ipo --ipo_tau 0.1
./cmdpo_pref.sh ipo_normalised --loss ipo_normalised --ipo_tau 0.1
./cmdpo_pref.sh kto --loss kto --beta 0.1 --kto_chosen 1.0 --kto_rejected 1.0
./cmdpo_pref.sh simpo --loss simpo --simpo_beta 2.0 --simpo_gamma 1.4
./cmdpo_pref.sh dpop --loss dpop --beta 0.1 --dpop_penalty 50
./cmdpo_pref.sh mmpo --loss mmpo --beta 0.1 --mmpo_gamma 2.2
./cmdpo_pref.sh alpha_dpo --loss alpha_dpo --alpha_dpo_alpha 0.5 --simpo_beta 2.0 --simpo_gamma 1.4
for weight in 0.2 0.4 0.6 0.8 1.0; do
    ./cmdpo_pref.sh "modpo_$weight" --loss modpo --beta 0.1 --modpo_weight "$weight"
done
./cmdpo_pref.sh cdpo_constrained --loss cdpo_constrained --beta 0.1 --dual_lr 1e-3 --dual_split val --dual_n 32
