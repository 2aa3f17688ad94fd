"""The audit of dependencies fails for advisories that a newer version mends, and says where nothing was audited."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("audit")
    SourceFileLoader("audit", str(ROOT / ".ci" / "audit")).exec_module(module)
    monkeypatch.setattr("sys.argv", ["audit", "python"])
    monkeypatch.setattr(module, "installed", lambda _: {"one==1.0", "two==2.0"})
    return module


def _package(*fixes: list[str]) -> dict[str, Any]:
    return {
        "name": "one",
        "version": "1.0",
        "vulns": [{"id": f"A-{n}", "fix_versions": fix} for n, fix in enumerate(fixes)],
    }


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        (None, 0, "skipped: pip-audit is not to be had, or its service does not answer (2 packages not audited)"),
        ([{"name": "one", "skip_reason": "not found"}], 0, "skipped: "),
        ([_package()], 0, "1 of 2 packages audited, 0 advisories"),
        ([_package([])], 0, "one 1.0: A-0, mended in no version"),
        ([_package([], ["1.1", "2.0"])], 1, "one 1.0: A-1, mended in 1.1, 2.0"),
    ],
)
def test_what_the_audit_answers(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: list[dict[str, Any]] | None,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(audit, "audited", lambda pins, folder: answers)
    assert audit.main() == status
    assert said in capsys.readouterr().out
