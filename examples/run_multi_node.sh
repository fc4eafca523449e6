#!/usr/bin/env bash
# Pretrain on several nodes: run the same line on each of them, by hand, with pdsh, or with srun.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash examples/run_multi_node.sh --model qwen3-30b-a3b --parallel a2-2x8 -- --data-path …
#   srun --ntasks-per-node=1 bash examples/run_multi_node.sh --model … --parallel … -- …     # all from SLURM
#   bash examples/run_multi_node.sh --model … --parallel … --smoke       # two nodes, both played by this CPU
#
# NODE_RANK    this node's number from 0                        (SLURM_NODEID)
# MASTER_ADDR  name or address of node 0                        (first of SLURM_JOB_NODELIST)
# MASTER_PORT  a free port of node 0                            (6000)
# NNODES       must be what the parallel layout says, if given  (SLURM_JOB_NUM_NODES)
# TRITON_CACHE_DIR must be on a disk of each node: a shared one is raced on, and can give NaN silently.
set -euo pipefail
# shellcheck source=preflight.sh
. "$(dirname "${BASH_SOURCE[0]}")/preflight.sh"

parse_arguments "$@"
choose_script

# play_two_nodes: two torchrun agents on this machine, each through this script, as on two nodes.
play_two_nodes() {
  local node pids=() status=0
  export MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-6000}" NNODES=2
  for node in 0 1; do
    NODE_RANK="$node" bash "${BASH_SOURCE[0]}" "$@" &
    pids+=($!)
  done
  trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
  for node in 0 1; do
    wait "${pids[$node]}" || { status=$? && echo "node $node ended with exit code $status" >&2; }
  done
  trap - EXIT
  return "$status"
}

if [ -n "$SMOKE" ] && [ -z "${NODE_RANK:-${SLURM_NODEID:-}}" ]; then
  play_two_nodes "$@"
  exit
fi

NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}"
NNODES="${NNODES:-${SLURM_JOB_NUM_NODES:-}}"
if [ -z "${MASTER_ADDR:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
[[ "$NODE_RANK" =~ ^[0-9]+$ ]] || fail "NODE_RANK='$NODE_RANK': expected this node's number, from 0; set it on each node, or start with srun"
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is missing: name or address of node 0"
[[ "${MASTER_PORT:=6000}" =~ ^[0-9]+$ ]] || fail "MASTER_PORT='$MASTER_PORT': expected a port number"
if [ -n "$NNODES" ] && { [[ ! "$NNODES" =~ ^[0-9]+$ ]] || [ "$NODE_RANK" -ge "$NNODES" ]; }; then
  fail "NODE_RANK=$NODE_RANK, NNODES='$NNODES': expected NODE_RANK from 0 to NNODES - 1"
fi

prepare_node
own=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if [ -n "$SMOKE" ]; then
  own+=(--nnodes 2 --nproc-per-node 1)
elif [ -n "$NNODES" ]; then
  own+=(--nnodes "$NNODES")
fi
launch "logs/$(basename "$MODEL")-$(date +%Y%m%d-%H%M%S)-node$NODE_RANK.log" "${own[@]}"
