"""The pytest plugin: one test for each law of ``tt.testing``. pytest loads it if torchtether is installed.

    @pytest.mark.torchtether_laws(subclass=make_my_tensor)             # options of check_tensor_subclass follow
    @pytest.mark.torchtether_laws(scheme=MyScheme())                   # or of check_scheme
    @pytest.mark.torchtether_laws(format=my_format, schemes=[...])     # or of check_format
    def test_mine(torchtether_law):
        torchtether_law()

The ids are ``test_mine[MyScheme-bound]`` and so on. A law that does not apply is a skipped test, with the reason. This
module lies outside the package and imports it late, so that pytest does not import torch for projects without such
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_MARK = "torchtether_laws"
_FIXTURE = "torchtether_law"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(subclass=, scheme=, format=, laws=, ...): run {_FIXTURE} once per law of torchtether.testing",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with the argument ``torchtether_law`` by the laws of each subject in its marks."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    marks = list(metafunc.definition.iter_markers(_MARK))
    if not marks:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {_FIXTURE} needs @pytest.mark.{_MARK}(subclass=make)")
    cases = [case for mark in reversed(marks) for case in _cases(metafunc.definition.nodeid, dict(mark.kwargs))]
    metafunc.parametrize(_FIXTURE, cases)


def _cases(where: str, options: dict[str, Any]) -> list[Any]:
    from torchtether import testing

    kinds: dict[str, tuple[Callable[..., testing.Report], tuple[str, ...]]] = {
        "subclass": (testing.check_tensor_subclass, testing.SUBCLASS_LAWS),
        "scheme": (testing.check_scheme, testing.SCHEME_LAWS),
        "format": (testing.check_format, testing.FORMAT_LAWS),
    }
    named = [kind for kind in kinds if kind in options]
    if len(named) != 1:
        raise pytest.UsageError(f"{where}: @pytest.mark.{_MARK} takes one of {', '.join(kinds)}, got {named or 'none'}")
    check, laws = kinds[named[0]]
    subject = options.pop(named[0])
    asked = options.pop("laws", None)
    asked = (asked,) if isinstance(asked, str) else asked
    name = options.get("name") or getattr(subject, "__name__", None) or str(subject)
    name = name.rpartition(".")[2] if "(" not in name else name.partition("(")[0]

    def case(law: str) -> Any:
        def run() -> None:
            (result,) = check(subject, laws=[law], **options).results
            if result.status == "skipped":
                pytest.skip(result.what)
            if result.status == "failed":
                pytest.fail(f"{result.says}: {result.what}\nlost: {result.loses}", pytrace=False)

        return pytest.param(run, id=f"{name}-{law}")

    return [case(law) for law in (laws if asked is None else asked)]
