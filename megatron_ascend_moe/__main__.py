"""`python -m megatron_ascend_moe COMMAND …`: one line a command, each imported only when it is asked for."""

import importlib
import sys

# command -> (module with main(argv) -> exit code, one line of help)
COMMANDS = {
    "run": ("megatron_ascend_moe.host.run", "run an unmodified Megatron script with the plugin installed"),
    "launch": ("megatron_ascend_moe.launch", "turn model + parallel YAML configs into a Megatron command"),
    "doctor": ("megatron_ascend_moe.observe.doctor", "check this machine's software, devices and settings"),
    "compile": ("megatron_ascend_moe.toolchain.compile", "compile every kernel for an Ascend SoC, without an NPU"),
    "bench": ("megatron_ascend_moe.bench", "measure kernels and layers against the copy bandwidth"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        wanted = not argv or argv[0] in ("-h", "--help")
        out = sys.stdout if wanted else sys.stderr
        if not wanted:
            print(f"unknown command {argv[0]!r}", file=out)
        print("usage: python -m megatron_ascend_moe COMMAND …\n", file=out)
        for name, (_, help_line) in COMMANDS.items():
            print(f"  {name:<9} {help_line}", file=out)
        return 0 if wanted else 2
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
