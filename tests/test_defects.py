"""The seeded defects can still be applied. That each is found takes minutes: see tests/defects.py."""

import ast

import pytest

from tests.defects import DEFECTS, ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_seeded_defect_fits_the_code_of_today(defect):
    ast.parse(defect.applied())
    assert all((ROOT / name).exists() for name in defect.tests.split())
