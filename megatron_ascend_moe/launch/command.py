"""The `launch` command: model + parallel layout + overrides -> a checked torchrun command.

    python -m megatron_ascend_moe launch --model qwen3-30b-a3b --parallel a2-2x8 --dry-run \\
        pretrain_gpt.py -- --train-iters 100 --data-path /data/text_document

With `--dry-run` the exact command is printed; without, it replaces this process.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from megatron_ascend_moe.launch import configs, flags, layout, shape, traffic


def main(argv: list[str] | None = None) -> int:
    """Run the command; see the module's docstring.

    Returns:
        The exit code: 0 after a dry run, 2 where the configuration is refused. A launch does not return.
    """
    argv = sys.argv[1:] if argv is None else argv
    own, overrides = _split(argv)
    options = _parser().parse_args(own)
    try:
        merged = _configuration(options, overrides)
        command = _checked_command(options, merged)
    except ValueError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    print(shlex.join(command), flush=True)
    if not options.dry_run:
        os.execvp(command[0], command)
    return 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments and, after `--`, Megatron flags that override the configurations."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ascend_moe launch",
        description="Turn a model and a parallel layout into a checked Megatron command, and run it.",
        epilog="Megatron flags after `--` override the configurations.",
    )
    parser.add_argument("script", help="training script, such as Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--model", required=True, help="name in configs/models, or a YAML file")
    parser.add_argument("--parallel", required=True, help="name in configs/parallel, or a YAML file")
    parser.add_argument("--training", default=str(configs.CONFIG_DIR / "training.yaml"), help="YAML of the rest")
    parser.add_argument("--config", action="append", default=[], help="more YAML, later ones win", metavar="YAML")
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), default="auto", help="passed to `run`")
    parser.add_argument("--nnodes", type=int, help="nodes, if not those of the parallel layout")
    parser.add_argument("--nproc-per-node", type=int, help="processes a node, if not those of the parallel layout")
    parser.add_argument("--node-rank", default=os.environ.get("NODE_RANK", "0"), help="default: $NODE_RANK, or 0")
    parser.add_argument("--master-addr", default=os.environ.get("MASTER_ADDR", "localhost"))
    parser.add_argument("--master-port", default=os.environ.get("MASTER_PORT", "6000"))
    parser.add_argument("--smoke", action="store_true", help="cut the model to a size that a CPU trains in seconds")
    parser.add_argument("--dry-run", action="store_true", help="check, print the exact command and stop")
    return parser


def _configuration(options: argparse.Namespace, overrides: list[str]) -> configs.Flags:
    """Training, model, layout, extra files and overrides merged, in that order.

    Raises:
        ValueError: from reading any of them.
    """
    paths = [
        Path(options.training),
        configs.find_config("models", options.model),
        configs.find_config("parallel", options.parallel),
        *map(Path, options.config),
    ]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"no such file: {', '.join(missing)}")
    merged = configs.merge(*map(configs.read_config, paths))
    if options.smoke:
        merged = configs.cut_to_smoke_size(merged)
    asked = {"nnodes": options.nnodes, "nproc-per-node": options.nproc_per_node}
    torchrun = {"torchrun": {key: value for key, value in asked.items() if value is not None}}
    return configs.merge(merged, torchrun, configs.parse_overrides(overrides))


def _checked_command(options: argparse.Namespace, merged: configs.Flags) -> list[str]:
    """Check everything, print the summary to stderr, and build the command.

    Raises:
        ValueError: what is wrong, one problem a line.
    """
    try:
        flags.check_flags(merged, flags.megatron_parser())
    except flags.NoMegatronParser as reason:
        print(f"launch: FLAGS NOT CHECKED against Megatron's parser: {reason}", file=sys.stderr)
    flags.check_dispatcher(merged)
    at = layout.read_layout(merged)
    print(_summary(merged, at), file=sys.stderr)
    torchrun = {
        **merged.get("torchrun", {}),
        "node-rank": options.node_rank,
        "master-addr": options.master_addr,
        "master-port": options.master_port,
    }
    return [
        _torchrun(),
        *configs.as_argv(torchrun),
        *("-m", "megatron_ascend_moe", "run", "--device", options.device),
        options.script,
        *configs.as_argv(merged),
    ]


def _summary(merged: configs.Flags, at: layout.Layout) -> str:
    """A few lines for a person: parameters, groups, and what one dispatch moves."""
    count = shape.count_parameters(merged)
    lines = [
        f"parameters   {count.total / 1e9:.2f} B total, {count.active / 1e9:.2f} B active per token",
        f"ranks        {at.world} = {at.nodes} nodes x {at.ranks_per_node}: TP {at.tp} PP {at.pp} CP {at.cp} "
        f"EP {at.ep} ETP {at.etp}, DP {at.dp}, expert DP {at.edp}",
    ]
    if merged.get("num-experts") is not None:
        move = traffic.dispatch_traffic(merged, at)
        lines += [
            f"dispatch     {move.tokens} tokens -> {move.routes} routes; {move.expert_rows} rows for "
            f"{move.local_experts} local experts when balanced",
            f"padding      {move.pad_rows_expected:.0f} rows expected, {move.pad_rows_at_most} at most "
            f"({move.pad_rows_expected / move.expert_rows:.1%}, {move.pad_rows_at_most / move.expert_rows:.1%})",
            f"bytes        {move.bytes_sent / 2**20:.1f} MiB sent per dispatch and rank ({move.rows_sent:.0f} rows of "
            f"{move.row_bytes} bytes); the combine, and the backward of each, move about as much",
        ]
    return "\n".join(lines)


def _torchrun() -> str:
    """torchrun of this Python's environment, which need not be the first on PATH."""
    beside = Path(sys.executable).with_name("torchrun")
    return str(beside) if beside.exists() else "torchrun"
