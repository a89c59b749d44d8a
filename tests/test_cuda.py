"""The CUDA kernels without a GPU: what was compiled, what it became, and who is refused.

They run, emulated on the CPU with sanitizers, in test_sanitizers.py; the loader meets a driver that
prints in test_cuda_loader.py.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import wavepe
from cases import generator
from wavepe import ops

cuda_kernels = pytest.importorskip("benchmarks.cuda_kernels", reason="not run from a source tree")
from wavepe import _torch
from wavepe.ops import _relative_bias

each_arch = pytest.mark.parametrize("arch", cuda_kernels.ARCHS)


def test_build_info_says_what_was_compiled():
    archs = wavepe.build_info()["cuda_archs"]
    assert all(re.fullmatch(r"sm_\d+", arch) for arch in archs)
    kernels = Path(_torch.__file__).read_bytes()
    held = bytes([0x50, 0xED, 0x55, 0xBA]) in kernels  # how a fatbin begins
    assert held == bool(archs)


@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_nothing_of_cuda_is_needed_to_import():
    words = ["readelf", "--dynamic", _torch.__file__]
    message = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", message)
    assert needed
    assert not [name for name in needed if re.search("cuda|nv", name)], needed


needs_tools = pytest.mark.skipif(
    not (cuda_kernels.ARCHS and cuda_kernels.tools()),
    reason="a build without CUDA kernels, or no nvcc, or no nvdisasm (make extras)",
)


@needs_tools
@pytest.mark.slow
@each_arch
def test_wide_kernels_move_whole_words_and_rope_spills_nothing(arch):
    rows = {row["kernel"]: row for row in cuda_kernels.measure(arch)}
    for dtype in ("f16", "bf16", "f32", "f64"):
        wide = rows[f"rope_{dtype}_wide"]
        assert (wide["reads"], wide["writes"]) == ([16], [16]), wide
        assert wide["spilled"] == rows[f"rope_{dtype}"]["spilled"] == 0
    for dtype in ("f32", "f64"):
        assert rows[f"skew_{dtype}_wide"]["writes"] == [16], rows[f"skew_{dtype}_wide"]


@needs_tools
@pytest.mark.slow
def test_the_table_of_kernels(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    assert cuda_kernels.main(["--json", str(file)]) == 0
    assert "| `rope_bf16_wide` |" in capsys.readouterr().out


def test_the_composition_of_relative_bias():
    """A GPU runs this, a matrix product and a skew, instead of the CPU's fused kernel."""
    rng = generator("composition")
    for q_shape, p_shape in (((2, 3, 9, 8), (5, 8)), ((3, 9, 8), (3, 5, 8)), ((9, 8), (1, 5, 8))):
        q = torch.from_numpy(rng.normal(size=q_shape))
        p = torch.from_numpy(rng.normal(size=p_shape))
        for beyond in ("zero", "edge"):
            got = _relative_bias.by_product(q, p, 11, -2, beyond)
            torch.testing.assert_close(got, ops.relative_bias(q, p, 11, first=-2, beyond=beyond))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _relative_bias.by_product(q.float(), p.float(), 11).dtype == torch.float32


CALLS = {
    "rope": lambda x, t, f, i: ops.rope(x, t, t),
    "rope_": lambda x, t, f, i: ops.rope_(x, t, t),
    "rope_qk": lambda x, t, f, i: ops.rope_qk(x, x, t, t),
    "rope_table": lambda x, t, f, i: ops.rope_table(i, f),
    "wavelet_table": lambda x, t, f, i: ops.wavelet_table(i, f, f),
}
FakeTensorMode = torch._subclasses.FakeTensorMode


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_of_a_gpu(name):
    """Compilers and exporters do this for a machine with a GPU, on a machine without one."""
    with FakeTensorMode(), torch.no_grad():
        x, t = torch.empty(1, 2, 5, 8, device="cuda"), torch.empty(5, 4, device="cuda")
        f = torch.empty(4, device="cuda")
        out = CALLS[name](x, t, f, torch.empty(5, dtype=torch.int64, device="cuda"))
        for tensor in out if isinstance(out, tuple) else (out,):
            assert tensor.device.type == "cuda"


@pytest.mark.parametrize("name", CALLS)
def test_mixed_devices_are_refused(name):
    with FakeTensorMode(), torch.no_grad():
        x, i = (torch.empty(n, device="cuda") for n in ((1, 2, 5, 8), 5))
        t, f = torch.empty(5, 4), torch.empty(4)
        with pytest.raises(RuntimeError, match=r"one device|two different devices"):
            CALLS[name](x, t, f, i.to(torch.int64))


def test_the_composition_is_not_cast_by_autocast():
    """Scores are float32, even if autocast makes the caller's tensors bfloat16."""
    rng = generator("autocast")
    q, k, v = (torch.from_numpy(20 * rng.normal(size=(1, 2, 9, 8))).bfloat16() for _ in range(3))

    want = torch.func.vjp(lambda x: ops.attention(x, k, v), q)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.vjp(lambda x: ops.attention(x, k, v), q)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
