#!/usr/bin/env bash
# Pretrain on one node.
#
#   bash examples/run_single_node.sh --model deepseek-v2-lite --parallel a2-1x8 -- --data-path … --tokenizer-type …
#   bash examples/run_single_node.sh --model deepseek-v2-lite --parallel a2-1x8 --smoke     # on a CPU, in a minute
#   … --dry-run                                                                    # only print the command
#
# MEGATRON_PATH: a Megatron-LM checkout; its pretrain_gpt.py is run instead of examples/pretrain_gpt_moe.py.
# MASTER_PORT (6000), PYTHON (python). Megatron flags after `--` override the configurations.
set -euo pipefail
# shellcheck source=preflight.sh
. "$(dirname "${BASH_SOURCE[0]}")/preflight.sh"

parse_arguments "$@"
choose_script
prepare_node
launch "logs/$(basename "$MODEL")-$(date +%Y%m%d-%H%M%S).log" --node-rank 0 --master-addr localhost
