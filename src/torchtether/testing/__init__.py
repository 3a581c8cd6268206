"""Laws that torchtether keeps, to check other people's tensor subclasses, schemes and formats.

    check_tensor_subclass(make)    does my tensor subclass survive nn.Module, optimizers, checkpoints and compilers?
    check_scheme(scheme)           does my scheme keep the laws that loading, saving, sharding and training rely on?
    check_format(format)           does my checkpoint format read its checkpoints, and refuse all others?

Each returns a report: ``print(report)`` is a table, ``report.failed`` says for each broken law what happened and what a
user loses, ``report.check()`` raises.  ``tt.testing.strategies`` has Hypothesis strategies for shapes, dtypes, values
and models with ties (import it by name; it needs ``hypothesis``).  With pytest, one test for each law::

    @pytest.mark.torchtether_laws(subclass=make_my_tensor)
    def test_my_tensor(torchtether_law):
        torchtether_law()
"""

from .formats import LAWS as _FORMAT_LAWS
from .formats import check_format
from .report import Report, Result, markdown
from .schemes import LAWS as _SCHEME_LAWS
from .schemes import check_scheme
from .subclasses import check_tensor_subclass
from .tensors import LAWS as _TENSOR_LAWS

SUBCLASS_LAWS = tuple(law.id for law in _TENSOR_LAWS if not law.optional)
"""The ids of the laws that ``check_tensor_subclass`` runs by default; ``"fsdp2"`` runs only if it is named."""
SCHEME_LAWS = tuple(law.id for law in _SCHEME_LAWS)
"""The ids of the laws that ``check_scheme`` runs."""
FORMAT_LAWS = tuple(law.id for law in _FORMAT_LAWS)
"""The ids of the laws that ``check_format`` runs."""

__all__ = [
    "FORMAT_LAWS", "SCHEME_LAWS", "SUBCLASS_LAWS", "Report", "Result", "check_format", "check_scheme",
    "check_tensor_subclass", "markdown",
]  # fmt: skip
