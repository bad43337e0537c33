"""What went wrong in public Gated DeltaNet code, as small inputs with right values, one test for each case number.

Numbers are those of the project's collection of public bug reports; each test's docstring says what the fault was.
"""

from gdn.testing.field_cases.convolution import ConvolutionCases
from gdn.testing.field_cases.drafts import DraftCases
from gdn.testing.field_cases.gates import GateCases
from gdn.testing.field_cases.layouts import LayoutCases
from gdn.testing.field_cases.numerics import NumericCases
from gdn.testing.field_cases.sequences import SequenceCases
from gdn.testing.field_cases.serving import ServingCases
from gdn.testing.field_cases.slots import SlotCases


class FieldCases(
    SlotCases, SequenceCases, LayoutCases, NumericCases, GateCases, DraftCases, ConvolutionCases, ServingCases
):
    """All of them."""


__all__ = ["FieldCases"]
