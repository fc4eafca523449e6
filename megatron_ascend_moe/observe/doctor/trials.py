"""Small things that are really run, each in processes of its own with a time limit, so that a crash or a hang is
a finding: a golden example on every kernel backend, and an all-to-all between two processes of this machine."""

import os
import socket
import subprocess
import sys

from megatron_ascend_moe.observe.doctor.finding import Finding

TIME_LIMIT = 300  # seconds, for one trial: the first use of a device compiles kernels
NO_ANSWER = "no answer within"


def check_goldens(accelerator: str | None, triton_installed: bool) -> list[Finding]:
    """The golden example on plain torch and on Triton: on the accelerator, else in Triton's interpreter."""
    findings = [_golden("torch", "cpu")]
    if accelerator is not None:
        findings += [_golden("torch", accelerator), _golden("triton", accelerator)]
    elif triton_installed:
        findings.append(_golden("triton", "cpu", TRITON_INTERPRET="1"))
    return findings


def _golden(kernels: str, device: str, **environ: str) -> Finding:
    where = f"{kernels} on {device}" + (" (interpreted)" if environ else "")
    fault = _run([["megatron_ascend_moe.observe.doctor.golden", kernels, device]], environ)
    if fault is None:
        return Finding("golden", "ok", f"{where}: forward and backward are right")
    wrong = "tokens would reach the wrong experts, or gradients the wrong tokens"
    silent = "the device hangs, or this machine is too busy to train"
    return Finding(
        "golden",
        "failure",
        f"{where}: {fault}",
        silent if fault.startswith(NO_ANSWER) else wrong,
        f"run `python -m megatron_ascend_moe.observe.doctor.golden {kernels} {device}` for the whole message; "
        "mend what is reported above first",
    )


def check_loopback(time_limit: float = TIME_LIMIT) -> list[Finding]:
    """An all-to-all with uneven splits between two gloo processes of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "megatron_ascend_moe.observe.doctor.loopback"
    fault = _run([[module, str(rank), str(port)] for rank in range(2)], {}, time_limit)
    if fault is None:
        return [Finding("loopback", "ok", "two processes exchanged rows over gloo")]
    return [
        Finding(
            "loopback",
            "failure",
            f"the all-to-all of two processes on this machine fails: {fault}",
            "expert parallelism exchanges rows by all-to-all",
            "check GLOO_SOCKET_IFNAME, firewalls and HTTP proxies for localhost, and the interfaces reported above",
        )
    ]


def _run(modules: list[list[str]], environ: dict[str, str], time_limit: float = TIME_LIMIT) -> str | None:
    """Run the modules at the same time; None when all succeed, else what went wrong with the first that did not."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *module], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for module in modules
    ]
    faults = []
    try:
        for process in running:
            output, _ = process.communicate(timeout=time_limit)
            if process.returncode:
                lines = output.strip().splitlines() or ["no message"]
                faults.append(f"exit code {process.returncode}: {lines[-1]}")
    except subprocess.TimeoutExpired:
        faults.append(f"{NO_ANSWER} {time_limit:g} s")
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return faults[0] if faults else None
