"""`python -m megatron_ascend_moe run`: an unmodified Megatron training script, with the plugin installed.

    torchrun … -m megatron_ascend_moe run [--device auto|npu|cuda|cpu] SCRIPT [the script's own flags]

It prepares the device before Megatron is imported, installs the plugin, and hands over to the script as if
Python had been called with it. The script's flags are then Megatron's own, plus
`--moe-token-dispatcher-type ascend` and the plugin's `--moe-ascend-*`.
"""

import argparse
import importlib
import importlib.util
import os
import runpy
import sys

import megatron_ascend_moe

DEVICES = ("auto", "npu", "cuda", "cpu")


def main(argv: list[str]) -> int:
    """Run the script that `argv` names; its exceptions and its SystemExit pass through.

    RuntimeError where the device that was asked for is not usable (`npu` without torch_npu, `cuda` without a
    GPU, `cpu` beside an accelerator, `auto` without any).
    """
    arguments = _parse(argv)
    prepare_device(arguments.device)
    from megatron_ascend_moe.host.dataset_helpers import use_built_helpers

    use_built_helpers()
    megatron_ascend_moe.install()
    sys.argv = [arguments.script, *arguments.flags]
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))  # as `python SCRIPT` does
    runpy.run_path(arguments.script, run_name="__main__")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ascend_moe run",
        description="Run an unmodified Megatron script with the plugin installed (start it with torchrun).",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="npu: through torch_npu and its transfer_to_npu; cuda: as it is; cpu: the host for machines "
        "without an accelerator (gloo); auto: the accelerator that is there (default)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="for example Megatron-LM's pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="…", help="the script's own flags")
    arguments = parser.parse_args(argv)
    if not os.path.isfile(arguments.script):
        parser.error(f"SCRIPT {arguments.script!r} is not a file (the run command's own flags go before it)")
    return arguments


def prepare_device(device: str) -> None:
    """Put in place what Megatron needs of `device` ("auto", "npu", "cuda" or "cpu") before it is imported.

    RuntimeError where that device is not usable.
    """
    if device == "auto":
        device = _find_accelerator()
    if device == "npu":
        _prepare_npu()
    elif device == "cpu":
        from megatron_ascend_moe.host.cpu_training import enable_training_loop

        enable_training_loop()
    else:
        _require_cuda()


def _find_accelerator() -> str:
    """`npu` or `cuda`; never `cpu`, which is slow enough that nobody should get it without asking."""
    import torch

    if importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    if torch.cuda.is_available():
        return "cuda"
    raise RuntimeError(
        "--device auto found neither torch_npu nor a GPU: install torch_npu for Ascend, or say --device cpu "
        "to train on CPU with gloo"
    )


def _prepare_npu() -> None:
    """torch_npu's own aliasing of torch.cuda, which must be in place before Megatron binds those names."""
    try:
        importlib.import_module("torch_npu")
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    except ImportError as error:
        raise RuntimeError(
            f"--device npu needs torch_npu, whose import failed: {error}. Install the torch-npu that matches "
            "torch, and source CANN's set_env.sh so that its libraries are found"
        ) from error


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch.cuda.is_available() is False; expected a GPU, or --device cpu")
