"""wavepe.ops.wavelet_table: what test_ops_every.py does not test."""

import oracle
import pytest
import torch
import wavepe
from wavepe import ops

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
each_kind = pytest.mark.parametrize("kind", oracle.KINDS)


def test_forms_of_offsets(variant):
    scale, shift = (torch.from_numpy(a) for a in wavepe.wavelet_grid(8))
    for mirrored in (False, True):
        whole = ops.wavelet_table(20, scale, shift, mirrored=mirrored)
        for integer in INTEGERS:
            offsets = torch.arange(20, dtype=integer)
            got = ops.wavelet_table(offsets, scale, shift, mirrored=mirrored)
            assert torch.equal(got, whole), integer
    got = ops.wavelet_table(torch.tensor([-128], dtype=torch.int8), scale, shift, mirrored=True)
    assert torch.equal(got, ops.wavelet_table(torch.tensor([128]), scale, shift))


@each_kind
def test_gradients_of_far_tails_are_zero(variant, kind):
    """Where psi is 0 its derivative is 0 too, never inf * 0, and where the quotient overflows."""
    scale = torch.tensor([1e-3, 1e-30, 1e-308, 1.0], dtype=torch.float64)
    shift = torch.tensor([0.0, 0.0, 0.0, -1e30], dtype=torch.float64)
    columns = {torch.float32: [0, 1, 3], torch.float64: [0, 1, 2, 3]}
    for dtype, some in columns.items():
        leaves = [x[some].to(dtype).requires_grad_() for x in (scale, shift)]
        table = ops.wavelet_table(torch.tensor([5, 50, 2**31]), *leaves, kind=kind)
        table.sum().backward()
        assert not any(x.any() for x in (table, *(leaf.grad for leaf in leaves))), dtype


def test_errors_of_the_raw_gradients():
    """Autograd calls them; no error names a table that is not there."""
    grad, offsets, one = torch.ones(5, 4), torch.arange(5), torch.ones(4)
    for name in ("wavelet_table_backward", "sampled_wavelet_table_backward"):
        raw = getattr(torch.ops.wavepe, name)
        with pytest.raises(RuntimeError, match="kind 'mexican'"):
            raw(grad, offsets, one, one, "mexican", None)
        with pytest.raises(RuntimeError, match=r"must be a (torch\.)?Tensor, got None"):
            raw(grad, offsets, None, one, "ricker", None)
    raw = torch.ops.wavepe.sampled_wavelet_table_backward
    with pytest.raises(RuntimeError, match=r"grad must be \(5, 4\), got \(5, 3\)"):
        raw(grad[:, :3], offsets, one, one, "x", None)
