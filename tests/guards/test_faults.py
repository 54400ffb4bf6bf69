"""The faults that tests must see: each has its place, and one is planted here."""

import pathlib

from tests import skips
from tests.guards import faults


def test_every_fault_has_its_place():
    for fault in faults.FAULTS:
        assert fault.path().is_file()
        assert fault.planted != fault.line
        for name in fault.tests.split():
            assert (pathlib.Path(faults.ROOT) / "tests" / name).is_file(), name


@skips.only_on("torch", because="one backend")
def test_a_planted_fault_is_seen():
    (fault,) = (f for f in faults.FAULTS if f.name == "capacity rounded down")
    assert "test_capacity" in faults.plant(fault)
    harmless = fault._replace(planted=fault.line, tests="ops/test_capacity.py")
    assert faults.plant(harmless) is None
