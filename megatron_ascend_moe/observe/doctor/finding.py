"""What a check has to say."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

SEVERITIES = ("ok", "note", "warning", "failure")


@dataclass(frozen=True)
class Finding:
    """One result of one check. `ok` needs no reason; `note` is worth knowing; `warning` may cost time or
    correctness; `failure` means that training will not work here as things stand."""

    check: str
    severity: str
    what: str
    why: str = ""
    mend: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r}: expected one of {', '.join(SEVERITIES)}")
        if self.severity in ("warning", "failure") and not (self.why and self.mend):
            raise ValueError(
                f"finding {self.what!r} of severity {self.severity} must say why it matters and how to mend"
            )


_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH|COOKIE", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]+:)[^/\s@]+@")


def without_secrets(findings: Iterable[Finding], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """The findings with every value of a secret-looking environment variable, and passwords in URLs, masked:
    paths and messages of other programs may repeat them."""
    secrets = sorted((v for k, v in environ.items() if _SECRET_NAME.search(k) and len(v) >= 4), key=len, reverse=True)

    def mask(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return _URL_PASSWORD.sub(r"\1***@", text)

    return [replace(f, what=mask(f.what), why=mask(f.why), mend=mask(f.mend)) for f in findings]
