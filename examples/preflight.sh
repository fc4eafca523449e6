# shellcheck shell=bash
# Sourced by the launch scripts: what they check and set before anything is started on a node.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python}"

fail() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# parse_arguments "$@": --model and --parallel, --smoke, --dry-run, and after `--` Megatron flags.
# Sets MODEL, PARALLEL, SMOKE, DRY_RUN (each empty if not given) and the array OVERRIDES.
parse_arguments() {
  MODEL="${MODEL:-}" PARALLEL="${PARALLEL:-}" SMOKE="" DRY_RUN="" OVERRIDES=()
  while [ $# -gt 0 ]; do
    case "$1" in
      --model | --parallel)
        [ $# -ge 2 ] || fail "$1 needs a value"
        if [ "$1" = --model ]; then MODEL="$2"; else PARALLEL="$2"; fi
        shift 2
        ;;
      --smoke) SMOKE=1 && shift ;;
      --dry-run) DRY_RUN=1 && shift ;;
      --)
        shift
        OVERRIDES=("$@")
        break
        ;;
      *) fail "unknown argument '$1': expected --model M --parallel P [--smoke] [--dry-run] [-- Megatron flags]" ;;
    esac
  done
  [ -n "$MODEL" ] || fail "--model is missing: a name in configs/models, or a YAML file"
  [ -n "$PARALLEL" ] || fail "--parallel is missing: a name in configs/parallel, or a YAML file"
}

# choose_script: sets SCRIPT to Megatron-LM's own pretrain_gpt.py where MEGATRON_PATH names a checkout, and to
# this repository's pretraining script otherwise.
choose_script() {
  SCRIPT="$REPOSITORY/examples/pretrain_gpt_moe.py"
  if [ -n "${MEGATRON_PATH:-}" ]; then
    SCRIPT="$MEGATRON_PATH/pretrain_gpt.py"
    [ -f "$SCRIPT" ] || fail "MEGATRON_PATH=$MEGATRON_PATH has no pretrain_gpt.py"
    export PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"
  fi
}

# prepare_node: environment, logs/ and the doctor, which ends the script where this node cannot train.
prepare_node() {
  export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
  # shellcheck source=../configs/ascend.env
  . "$REPOSITORY/configs/ascend.env"
  mkdir -p logs "$TRITON_CACHE_DIR"
  local trials=()
  if [ -n "$SMOKE$DRY_RUN" ]; then trials=(--no-trials); fi
  "$PYTHON" -m megatron_ascend_moe doctor "${trials[@]}" || fail "the doctor found failures on $(hostname): see above"
}

# launch LOG [launch's own arguments]: check the configuration and start it, with the output in LOG as well.
launch() {
  local log="$1" own=(--model "$MODEL" --parallel "$PARALLEL")
  shift
  if [ -n "$SMOKE" ]; then own+=(--smoke --device cpu); fi
  if [ -n "$DRY_RUN" ]; then own+=(--dry-run); fi
  "$PYTHON" -m megatron_ascend_moe launch "${own[@]}" "$@" "$SCRIPT" -- "${OVERRIDES[@]}" 2>&1 | tee "$log"
}
