"""docs/guides/wavelets.md lists the published scale sets, and its specs give them."""

import re
from pathlib import Path

import numpy as np
import oracle
import pytest
import wavepe
from cases import assert_within

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "wavelets.md"

# METHODS of [W], for a head size of 128: exponents of the first and last scale, the last shift.
PUBLISHED = [(0, 7, 15), (1, 8, 15), (2, 9, 15), (0, 3, 31), (0, 1, 63), (0, 15, 7), (0, 31, 3),
             (0, 63, 1), (0, 127, 0), (7, 7, 127)]  # fmt: skip


def rows():
    """(first exponent, last exponent, last shift, spec) of each row of the page's table."""
    row = r"^\| 2\^(\d+) \.\. 2\^(\d+) \| 0 \.\. (\d+) \| `([^`]+)` \|$"
    found = re.findall(row, PAGE.read_text("utf-8"), re.M)
    return [(int(low), int(high), int(last), spec) for low, high, last, spec in found]


def test_the_page_lists_them_all():
    assert [row[:3] for row in rows()] == PUBLISHED


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[3])
def test_each_spec_gives_its_set(row):
    low, high, last, spec = row
    scales = [2.0**k for k in range(low, high + 1)]
    assert len(scales) * (last + 1) == 128
    scale, shift = oracle.wavelet_grid(128, scales)
    assert shift.max() == last
    encoding = wavepe.encoding(spec)
    assert str(encoding) == spec
    for kind in oracle.KINDS:
        p = wavepe.encoding(f"{spec}{',' if ':' in spec else ':'}kind={kind}").table(600, 128)[0]
        assert np.isfinite(p).all()
        assert_within(p, oracle.wavelet_table(600, scale, shift, kind), 1e-7)


def test_haar_with_a_fixed_scale():
    spec = "wavelet:kind=haar,fixed_scale=true"
    assert f"`{spec}`" in PAGE.read_text("utf-8")
    p = wavepe.encoding(spec).table(40, 128)[0]
    scale, shift = oracle.wavelet_grid(128, [1.0] * 8)
    assert np.array_equal(p, oracle.wavelet_table(40, scale, shift, "haar"))
    assert p.any()
