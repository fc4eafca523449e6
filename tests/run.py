"""The test command: `python3 tests/run.py` runs the whole suite in every environment it needs.

It assumes a Python (3.10 or newer) and a package index, brings nox in an environment of its own (.venv-nox in
the clone) and runs every session of noxfile.py. Arguments go to nox: `-l` lists the sessions, `-s NAME` runs
one, and what follows `--` goes to pytest (`python3 tests/run.py -s current -- -k norm`).

An interpreter or tool that is missing skips its session, loudly; with CI=true in the environment it fails.
The last line counts the tests of all sessions.
"""

from __future__ import annotations  # a Python that is too old shall get as far as being told so

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOOTSTRAP = ROOT / ".venv-nox"
OLDEST = (3, 10)  # of noxfile.py's language
RESULTS = ROOT / ".nox" / "results"
REPORT = ROOT / ".nox" / "report.json"
COUNTS = ("passed", "failed", "skipped")


def main(arguments: list[str]) -> int:
    if sys.version_info < OLDEST:
        sys.exit(f"tests/run.py: this is Python {sys.version.split()[0]}; expected 3.10 or newer: start it with one of those")
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    REPORT.unlink(missing_ok=True)
    environment = {**os.environ, "VIRTUALENV_OVERRIDE_APP_DATA": str(ROOT / ".nox" / "cache" / "virtualenv")}
    command = [str(_bootstrap_nox()), "-f", str(ROOT / "noxfile.py"), "--report", str(REPORT), *arguments]
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    return _summarise(code, everything=not arguments) if REPORT.exists() else code


def _bootstrap_nox() -> Path:
    """Path of a working nox, installed on the first call, and again where this is another Python."""
    nox, stamp = BOOTSTRAP / "bin" / "nox", BOOTSTRAP / "complete"
    if not stamp.exists() or stamp.read_text() != sys.version:
        print(f"installing nox into {BOOTSTRAP}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(BOOTSTRAP)], check=True)
        subprocess.run([str(BOOTSTRAP / "bin" / "python"), "-m", "pip", "install", "-q", "nox"], check=True)
        stamp.write_text(sys.version)
    return nox


def _summarise(code: int, everything: bool) -> int:
    """Print one line a session and the total; the exit code, not 0 if anything failed or, of all, nothing passed."""
    total = dict.fromkeys(COUNTS, 0)
    sessions = json.loads(REPORT.read_text())["sessions"]
    print("\nsession            result    passed  failed skipped")
    for session in sessions:
        counts = _count(RESULTS / f"{session['name']}.xml")
        if session["result"] == "failed" and not counts["failed"]:
            counts["failed"] = 1  # the session itself: an installation, a linter, a crash
        for kind in COUNTS:
            total[kind] += counts[kind]
        numbers = " ".join(f"{counts[kind]:7d}" for kind in COUNTS)
        print(f"{session['name']:18} {session['result']:8} {numbers}")
        if session["result"] == "skipped":
            print(f"  !! {session['name']} DID NOT RUN: see its message above")
    if everything and not total["passed"]:
        code = code or 1
    print(", ".join(f"{total[kind]} {kind}" for kind in COUNTS), flush=True)
    return code or int(total["failed"] > 0)


def _count(report: Path) -> dict[str, int]:
    """Tests passed, failed (errors included) and skipped in one of pytest's JUnit reports; zeros without one."""
    counts = dict.fromkeys(COUNTS, 0)
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            failed = int(suite.get("failures")) + int(suite.get("errors"))
            skipped = int(suite.get("skipped"))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests")) - failed - skipped
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
