#!/usr/bin/env bash
# How the shipped drafter for SmolLM2-135M-Instruct was made, on one H200: the model writes conversations, both sides of
# them, and the drafter learns from those. Each step goes on where it stopped, so minutes may be given in parts.
#
#   recipes/smollm2_eagle3.sh data  FOLDER MINUTES
#   recipes/smollm2_eagle3.sh train FOLDER MINUTES [more options of slipstream drafter train]
set -euo pipefail
what=$1 folder=$2 minutes=$3
shift 3
model=${MODEL:-smollm2-135m} device=${DEVICE:-cuda} python=${PYTHON:-python}
mkdir -p "$folder"
case $what in
data)
  $python -m slipstream drafter data --model "$model" --out "$folder/conversations.jsonl" --conversations 1000000 \
    --minutes "$minutes" --batch "${BATCH:-8192}" --user-tokens 64 --max-new-tokens 256 --greedy-share 0.8 --device "$device" "$@"
  ;;
train)
  $python -m slipstream drafter train --target "$model" --data "$folder/conversations.jsonl" --out "$folder/drafter" \
    --minutes "$minutes" --vocabulary 12288 --rows 32 --row-length 1024 --lr 8e-4 --save-every 1000 --device "$device" "$@"
  ;;
esac
