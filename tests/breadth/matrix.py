"""Setting x megatron-core version x processes -> parity, refused, stock refuses or failed; README's support table.

    python tests/breadth/matrix.py [--version all] [--json F] [--markdown README.md]

Runs on a CPU over gloo. Each version runs in a process of its own: with the interpreter given by `--python
VERSION=PATH` (default: this one), and where that does not import the version, from `--tree VERSION=DIRECTORY`, by
default a directory filled with `pip install --target` for this run. Exit status 1 if any cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.breadth.settings import SECTIONS, SETTINGS  # noqa: E402

VERSIONS = ("0.15.3", "0.16.1", "0.19.2")
PROCESSES = "1,2,4,8"
BEGIN, END = "<!-- support table: begin (tests/breadth/matrix.py) -->", "<!-- support table: end -->"


def main() -> int:
    options = _parse()
    results = _read(options.json)
    for version in VERSIONS if options.version == "all" else (options.version,):
        for name, processes, outcome, detail, seconds in _run(version, _choose(version, options, results), options):
            results[name, version, processes] = outcome, detail
            _write(options.json, results)
            shown = detail.splitlines()[-1] if detail else ""
            print(f"{version} x{processes} {name}: {outcome} [{seconds} s] {shown}", file=sys.stderr, flush=True)
    table = markdown(results)
    print(table)
    if options.markdown:
        _replace_between_markers(Path(options.markdown), table)
    return any(outcome == "failed" for outcome, _ in results.values())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="all", help=f"one of {', '.join(VERSIONS)}, or all")
    parser.add_argument("--processes", default=PROCESSES, help="world sizes, separated by commas")
    parser.add_argument("--only", default="", help="regular expression over the settings' names")
    parser.add_argument("--missing", action="store_true", help="only cells that --json lacks or that failed")
    parser.add_argument("--json", help="file of results; cells that do not run this time keep what it holds")
    parser.add_argument("--markdown", help="file in which to replace the table between its marker comments")
    pair = {"action": "append", "default": [], "metavar": "VERSION=PATH"}
    parser.add_argument("--python", help="interpreter for a version", **pair)
    parser.add_argument("--tree", help="directory with a version, as `pip install --target` makes it", **pair)
    return parser.parse_args()


def _choose(version: str, options: argparse.Namespace, results: dict) -> list[tuple[str, int]]:
    """The cells of a version that the options ask for."""
    worlds = [int(n) for n in options.processes.split(",")]
    cells = [(s.name, n) for s in SETTINGS for n in worlds if n in s.layouts and re.search(options.only, s.name)]
    if options.missing:
        cells = [(name, n) for name, n in cells if results.get((name, version, n), ("failed",))[0] == "failed"]
    return cells


def _run(version: str, cells: list[tuple[str, int]], options: argparse.Namespace):
    """Yield the cells of one version as its process prints them."""
    if not cells:
        return
    python = dict(pair.split("=", 1) for pair in options.python).get(version, sys.executable)
    tree = dict(pair.split("=", 1) for pair in options.tree).get(version)
    with tempfile.TemporaryDirectory() as empty:
        if tree is None and _imported_version(python) != version:
            tree = empty
            install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tree]
            subprocess.run([*install, f"megatron-core=={version}"], check=True)
        path = os.pathsep.join(filter(None, [tree, str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [python, "-m", "tests.breadth.one_version", version]
        environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        # 0.15 compiles CUDA code on import, and dies where it finds nvcc, no GPU, and nothing that says what for
        environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
            json.dump(cells, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                if line.startswith("["):
                    yield json.loads(line)
        if process.returncode:
            raise SystemExit(f"the run of megatron-core {version} ended with exit code {process.returncode}")


def _imported_version(python: str) -> str | None:
    code = "import importlib.metadata as m; print(m.version('megatron-core'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _read(file: str | None) -> dict[tuple[str, str, int], tuple[str, str]]:
    if file is None or not Path(file).exists():
        return {}
    rows = json.loads(Path(file).read_text())
    return {(name, version, n): (outcome, detail) for name, version, n, outcome, detail in rows}


def _write(file: str | None, results: dict) -> None:
    if file is not None:
        Path(file).write_text(json.dumps([[*key, *value] for key, value in results.items()], indent=1))


def markdown(results: dict[tuple[str, str, int], tuple[str, str]]) -> str:
    """The table: settings in rows, versions in columns, one word where all process counts agree."""
    lines = [f"| Setting | processes | {' | '.join(VERSIONS)} |", f"|---|---|{'---|' * len(VERSIONS)}"]
    notes: list[str] = []
    for section, settings in SECTIONS.items():
        lines.append(f"| **{section}** | | {' | ' * (len(VERSIONS) - 1)} |")
        for setting in settings:
            mark = ""
            if setting.note:
                notes.append(setting.note)
                mark = f" [{len(notes)}]"
            cells = [_cell(setting, version, results) for version in VERSIONS]
            worlds = ", ".join(map(str, setting.layouts))
            lines.append(f"| {setting.name}{mark} | {worlds} | {' | '.join(cells)} |")
    count = len([key for key in results if results[key][0] != "failed"])
    lines += ["", *(f"[{i}] {note}.  " for i, note in enumerate(notes, 1))]
    lines += ["", f"{len(SETTINGS)} settings, {count} cells, on a CPU over gloo; nothing here has run on an NPU."]
    return "\n".join(lines)


def _cell(setting, version: str, results: dict) -> str:
    by_outcome: dict[str, list[str]] = {}
    for world in setting.layouts:
        outcome = results.get((setting.name, version, world), ("untested", ""))[0]
        by_outcome.setdefault(outcome, []).append(str(world))
    if len(by_outcome) == 1:
        return next(iter(by_outcome))
    return "; ".join(f"{outcome} ({', '.join(worlds)})" for outcome, worlds in by_outcome.items())


def _replace_between_markers(file: Path, table: str) -> None:
    text = file.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{file} lacks the markers {BEGIN!r} and {END!r}")
    head, rest = text.split(BEGIN, 1)
    file.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    sys.exit(main())
