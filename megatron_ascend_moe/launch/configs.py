"""Read and merge launch configurations.

A configuration is a flat mapping from Megatron flag names (without the dashes) to values: a scalar becomes
`--key value`, a list `--key v1 v2`, true `--key`; false or null leaves the flag out. A parallel layout also has
one nested mapping, `torchrun`, with torchrun's own flags. Later configurations win, key by key.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"

Flags = dict[str, Any]


def find_config(kind: str, name: str) -> Path:
    """Path of configs/<kind>/<name>.yaml, or of `name` itself where it is a file.

    Raises:
        ValueError: no such configuration; the message names the nearest one.
    """
    if Path(name).is_file():
        return Path(name)
    path = CONFIG_DIR / kind / f"{name}.yaml"
    if path.is_file():
        return path
    known = sorted(p.stem for p in (CONFIG_DIR / kind).glob("*.yaml"))
    raise ValueError(
        f"no configuration {name!r} in {CONFIG_DIR / kind}{nearest(name, known)}: "
        f"expected a path or one of {', '.join(known) or 'nothing (the repository has no such folder here)'}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to `name`, or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def read_config(path: Path) -> Flags:
    """Read one YAML file.

    Raises:
        ValueError: not YAML, not a mapping, a key twice, or a nested value other than `torchrun`.
    """
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got what cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping of flag names to values, got {type(config).__name__}")
    for key, value in config.items():
        if isinstance(value, dict) and key != "torchrun":
            raise ValueError(f"{path}: key {key!r} holds a mapping; flags are flat, only `torchrun` is nested")
    return config


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a repeated key win silently; in a list of flags that is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise ValueError(f"{node.start_mark.name}: keys given twice: {', '.join(repeated)}")
        return super().construct_mapping(node, deep)


def merge(*configs: Mapping[str, Any]) -> Flags:
    """Merge, later ones winning key by key; `torchrun` is merged one level deeper."""
    merged: Flags = {}
    for config in configs:
        for key, value in config.items():
            if key == "torchrun":
                value = {**merged.get("torchrun", {}), **value}
            merged[key] = value
    return merged


def parse_overrides(argv: list[str]) -> Flags:
    """`--key v1 v2 --switch --other=v` as a configuration. `--key=null` removes a key.

    Raises:
        ValueError: a value before the first flag.
    """
    flags: Flags = {}
    key = None
    for token in argv:
        if token.startswith("--"):
            key, has_value, value = token[2:].partition("=")
            flags[key] = yaml.safe_load(value) if has_value else True
        elif key is None:
            raise ValueError(f"override {token!r} belongs to no flag: expected --key value …")
        elif flags[key] is True:
            flags[key] = token
        else:
            flags[key] = [*(flags[key] if isinstance(flags[key], list) else [flags[key]]), token]
    return flags


def cut_to_smoke_size(flags: Flags) -> Flags:
    """The same kind of model and run at a size a CPU trains in seconds; see configs/smoke.yaml."""
    smoke = yaml.safe_load((CONFIG_DIR / "smoke.yaml").read_text(encoding="utf-8"))
    resized = {key: smoke["resize"].get(key, value) for key, value in flags.items()}
    return merge(resized, smoke["set"], {"torchrun": {"nnodes": 1, "nproc-per-node": 2}})


def as_argv(flags: Mapping[str, Any]) -> list[str]:
    """The flags as a command line, without torchrun's."""
    argv: list[str] = []
    for key, value in flags.items():
        if key == "torchrun" or value is None or value is False:
            continue
        argv.append(f"--{key}")
        if isinstance(value, list):
            argv += [str(item) for item in value]
        elif value is not True:
            argv.append(str(value))
    return argv
