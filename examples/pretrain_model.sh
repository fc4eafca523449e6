#!/usr/bin/env bash
# Called by the scripts of the models, with MODEL and PARALLEL set: pretrain_model.sh RUNNER [its arguments].
# Adds data, tokenizer and checkpoints from the environment, after checking them, and hands over to RUNNER.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
runner="$1"
shift

own=() overrides=() smoke=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  if [ "$1" = --smoke ]; then smoke=1; fi
  own+=("$1")
  shift
done
if [ $# -gt 0 ]; then shift && overrides=("$@"); fi

if [ -z "$smoke" ]; then
  for variable in MEGATRON_PATH DATA_PATH TOKENIZER; do
    if [ -z "${!variable:-}" ]; then
      echo "$variable is missing (or use --smoke): see the head of the script" >&2
      exit 2
    fi
  done
  for file in "$DATA_PATH.idx" "$DATA_PATH.bin" "$TOKENIZER"; do
    if [ ! -e "$file" ]; then
      echo "$file does not exist: DATA_PATH is the prefix of .idx and .bin, TOKENIZER a tokenizer's folder" >&2
      exit 2
    fi
  done
  overrides=(--data-path "$DATA_PATH" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" "${overrides[@]}")
  if [ -n "${CHECKPOINTS:-}" ]; then
    overrides=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 "${overrides[@]}")
  fi
fi
exec bash "$here/$runner" "${own[@]}" -- "${overrides[@]}"
