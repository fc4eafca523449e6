#!/usr/bin/env bash
# Qwen3-30B-A3B through Megatron-LM's own pretrain_gpt.py, on two A2 nodes.
#
#   MEGATRON_PATH=/path/to/Megatron-LM DATA_PATH=/data/text_document TOKENIZER=/data/tokenizer bash examples/pretrain_qwen3_30b_a3b.sh
#   bash examples/pretrain_qwen3_30b_a3b.sh --smoke      # the same flags at a CPU's size, through examples/pretrain_gpt_moe.py
#
# DATA_PATH is the prefix of Megatron's indexed dataset, TOKENIZER a Hugging Face tokenizer's folder. CHECKPOINTS, if
# set, is where checkpoints are saved and resumed from. --dry-run prints the command; flags after `--` override.
# Run it on every node: NODE_RANK and MASTER_ADDR as for run_multi_node.sh.
set -euo pipefail
export MODEL=qwen3-30b-a3b PARALLEL="${PARALLEL:-a2-2x8}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_model.sh" run_multi_node.sh "$@"
