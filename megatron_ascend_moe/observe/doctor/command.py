"""The `doctor` command: every check, a report for a person or a machine, and an exit code."""

import argparse
import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator

import megatron_ascend_moe
from megatron_ascend_moe.observe.doctor import ascend, environment, software, trials
from megatron_ascend_moe.observe.doctor.finding import SEVERITIES, Finding, without_secrets


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print the findings.

    Returns:
        1 if any finding is a failure, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ascend_moe doctor",
        description="Check this machine's software, devices and settings.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-trials", action="store_true", help="leave out what starts processes or uses a device")
    options = parser.parse_args(argv)
    findings = []
    for finding in examine(trials_too=not options.no_trials):
        findings.append(finding)
        if not options.json:
            print(_lines(finding), flush=True)  # as they come: the trials take their time
    failures = sum(finding.severity == "failure" for finding in findings)
    if options.json:
        report = {
            "version": megatron_ascend_moe.__version__,
            "failures": failures,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        counts = {severity: sum(f.severity == severity for f in findings) for severity in SEVERITIES}
        print(", ".join(f"{count} {severity}" for severity, count in counts.items()))
    return 1 if failures else 0


def examine(trials_too: bool = True) -> Iterator[Finding]:
    """The findings of every check, as they are made, with secrets masked. A check that breaks is itself a failure."""
    npu = ascend.is_ascend_machine()
    checks: list[Callable[[], list[Finding]]] = [
        software.check_python,
        software.check_versions,
        lambda: software.check_triton(npu),
        lambda: ascend.check_torch_npu(npu),
        lambda: ascend.check_cann(npu),
        lambda: ascend.check_soc(npu),
        environment.check_interfaces,
        lambda: environment.check_timeouts(npu),
        lambda: environment.check_allocator(npu),
        environment.check_debugging,
        environment.check_cache,
    ]
    if trials_too and software.installed("torch") is not None:  # its absence is a finding of its own, above
        checks += [
            lambda: trials.check_goldens(_accelerator(npu), software.triton_origin() is not None),
            trials.check_loopback,
        ]
    for check in checks:
        yield from without_secrets(_guarded(check))


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return [
            Finding(
                "doctor",
                "failure",
                f"a check broke in {where}: {type(error).__name__}: {error}",
                "what it looks at was not examined",
                "report this message; the other checks are complete",
            )
        ]


def _accelerator(npu: bool) -> str | None:
    if npu:
        return "npu"
    return "cuda" if importlib.import_module("torch").cuda.is_available() else None


def _lines(finding: Finding) -> str:
    line = f"[{finding.severity:>7}] {finding.check}: {finding.what}"
    if finding.why:
        line += f"\n            why:  {finding.why}"
    if finding.mend:
        line += f"\n            mend: {finding.mend}"
    return line


if __name__ == "__main__":
    sys.exit(main())
