"""Each public fault has a test of its name or a reason why it cannot happen, and tests/FAULTS.md says which."""

import re

from packtest import faults

KINDS = {"LORA", "OFFLOAD", "LIFE", "COMPILE", "DTYPE", "STRIDE", "NUM"}


def test_each_fault_has_a_test_or_a_reason():
    tests = faults.tests_of_faults()
    for number, (_, seen, cannot) in faults.FAULTS.items():
        assert seen.endswith(".")
        assert bool(cannot) != bool(tests.get(number)), f"{number} needs a test or a reason, and not both: {seen}"


def test_no_test_names_a_fault_that_is_not_listed():
    assert faults.tests_of_faults().keys() <= faults.FAULTS.keys()


def test_the_page_has_each_fault_with_tests_that_exist():
    tests, rows = faults.tests_of_faults(), {}
    for line in faults.PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0] in faults.FAULTS:
            rows[cells[0]] = cells[1:]
    assert list(rows) == list(faults.FAULTS), "run tests/support/packtest/faults.py"
    for number, (kinds, seen, here) in rows.items():
        assert (kinds, seen) == faults.FAULTS[number][:2], "run tests/support/packtest/faults.py"
        listed = re.findall(r"`([^`]+::test_[^`]+)`", here)
        assert listed or here == faults.FAULTS[number][2]
        assert set(listed) <= set(tests.get(number, ())), f"{number}: run tests/support/packtest/faults.py"


def test_every_kind_is_there():
    first = [kinds.split()[0] for kinds, _, _ in faults.FAULTS.values()]
    assert set(first) >= KINDS
    # as many as were reported of each kind
    assert {kind: first.count(kind) for kind in sorted(KINDS)} == {
        "COMPILE": 5, "DTYPE": 5, "LIFE": 10, "LORA": 8, "NUM": 8, "OFFLOAD": 13, "STRIDE": 5,
    }  # fmt: skip
