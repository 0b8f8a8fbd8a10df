import ast

import pytest

from tests.defects import DEFECTS


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_each_seeded_defect_still_fits_the_code(defect):
    """Else what docs/reliability.md says of them could not be run again."""
    ast.parse(defect.applied())
