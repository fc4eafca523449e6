#!/usr/bin/env bash
# DeepSeek-V3 through Megatron-LM's own pretrain_gpt.py, on 32 A3 nodes.
#
#   MEGATRON_PATH=/path/to/Megatron-LM DATA_PATH=/data/text_document TOKENIZER=/data/tokenizer bash examples/pretrain_deepseek_v3.sh
#   bash examples/pretrain_deepseek_v3.sh --smoke      # the same flags at a CPU's size, through examples/pretrain_gpt_moe.py
#
# DATA_PATH is the prefix of Megatron's indexed dataset, TOKENIZER a Hugging Face tokenizer's folder. CHECKPOINTS, if
# set, is where checkpoints are saved and resumed from. --dry-run prints the command; flags after `--` override.
# Run it on every node: NODE_RANK and MASTER_ADDR as for run_multi_node.sh.
set -euo pipefail
export MODEL=deepseek-v3 PARALLEL="${PARALLEL:-a3-32x16-deepseek-v3}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_model.sh" run_multi_node.sh "$@"
