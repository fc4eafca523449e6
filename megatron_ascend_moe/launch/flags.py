"""Check flags against Megatron's own argument parser, and the dispatcher's settings against its own refusals."""

import argparse
import contextlib
import importlib.util
import io
import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from megatron_ascend_moe.config import DispatchConfig, check_host
from megatron_ascend_moe.launch.configs import as_argv, nearest


class NoMegatronParser(RuntimeError):
    """megatron.training cannot be imported here, so that flags cannot be checked."""


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's training argument parser, with the flags that this package adds.

    Raises:
        NoMegatronParser: megatron.training, or something that it imports, is not installed.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        raise NoMegatronParser(
            "megatron.training is not installed here (megatron-core wheels before 0.17 do not have it): put a "
            "Megatron-LM checkout of your version on PYTHONPATH"
        )
    parser = _RaisingParser(allow_abbrev=False)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # Megatron warns about each optional package that is missing
        try:
            from megatron.training import arguments
        except ImportError as error:
            raise NoMegatronParser(f"megatron.training.arguments cannot be imported: {error}") from error
        from megatron_ascend_moe import plugin

        plugin.install()  # widens Megatron's parser by this package's flags
        try:
            arguments.add_megatron_arguments(parser)
        finally:
            plugin.uninstall()
    return parser


class _RaisingParser(argparse.ArgumentParser):
    """argparse exits on an error; a library raises."""

    def error(self, message: str) -> None:
        raise ValueError(f"Megatron's parser refuses the flags: {message}")


def check_flags(flags: Mapping[str, Any], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the flags with Megatron's parser and return what it understood.

    Raises:
        ValueError: a key that is no flag of Megatron's (the message names the nearest one), a switch with a
            value, a value flag without one, or a value that the parser refuses.
    """
    actions = {option: action for action in parser._actions for option in action.option_strings}
    problems = [
        problem
        for key, value in flags.items()
        if key != "torchrun" and (problem := _problem(key, value, actions)) is not None
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return parser.parse_args(as_argv(flags))


def _problem(key: str, value: Any, actions: Mapping[str, argparse.Action]) -> str | None:
    action = actions.get(f"--{key}")
    if action is None:
        names = [option[2:] for option in actions if option.startswith("--")]
        return f"{key!r} is not a flag of this Megatron{nearest(key, names)}"
    if action.nargs == 0 and value not in (True, False, None):
        return f"{key!r} is a switch, got the value {value!r}: write `{key}: true`"
    if action.nargs != 0 and value is True:
        return f"{key!r} needs a value, got none"
    return None


def check_dispatcher(flags: Mapping[str, Any]) -> None:
    """Refuse here, once, what the dispatcher would refuse on every rank when its first layer is built.

    Raises:
        ValueError: a value outside its choices, a combination in `config.REFUSALS`, or `moe-ascend-*` flags without
            the dispatcher selected.
    """
    keys = {setting.name: "moe-ascend-" + setting.name.replace("_", "-") for setting in fields(DispatchConfig)}
    given = {name: flags[key] for name, key in keys.items() if flags.get(key) is not None}
    if flags.get("moe-token-dispatcher-type") != "ascend":
        if given:
            raise ValueError(
                f"{', '.join(keys[name] for name in given)}: given, but the dispatcher is not selected; set "
                "`moe-token-dispatcher-type: ascend`, or drop them"
            )
        return
    if isinstance(given.get("pad_multiple"), str) and given["pad_multiple"].isdigit():
        given["pad_multiple"] = int(given["pad_multiple"])  # values from the command line are text
    host = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": None}  # which every host has
    host |= {key.replace("-", "_"): value for key, value in flags.items() if value is not None}
    check_host(DispatchConfig(**given), SimpleNamespace(**host))
